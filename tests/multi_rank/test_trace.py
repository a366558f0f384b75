"""`hybrid.trace()`: what the collectives carried, by their own formulas."""

from __future__ import annotations

import torch

import hybrid
from hybrid.collectives import ops
from hybrid.collectives.trace import sent_bytes
from tests.multi_rank.worlds import shard_group
from tests.ranks import run_ranks


def traced() -> tuple[dict[str, tuple[int, int, int]], int, int, str]:
    group = shard_group()
    bounds = (0, 100, 100, 350)
    ops.all_reduce(torch.ones(77), group=group).wait()
    with hybrid.trace() as recording:
        ops.all_reduce(torch.ones(300), group=group).wait()
        recording.mark_step()
        buffer = torch.ones(360, dtype=torch.bfloat16)
        ops.reduce_scatter(buffer, bounds=bounds, group=group).wait()
        ops.all_gather(buffer, bounds=bounds, group=group).wait()
        ops.broadcast(torch.ones(30), source=1, group=group)
        ops.barrier(group)
    ops.all_reduce(torch.ones(77), group=group).wait()
    by_op = recording.totals()["dp_shard"]
    sums = {op: (totals.calls, totals.payload_bytes, totals.sent_bytes) for op, totals in by_op.items()}
    assert set(recording.totals(step=0)["dp_shard"]) == {"all_reduce"}
    assert set(recording.totals(step=1)["dp_shard"]) == {"reduce_scatter", "all_gather", "broadcast"}
    assert all(call.seconds >= call.wait_seconds >= 0 for call in recording.calls)
    control = recording.totals(control=True)["dp_shard"]["all_reduce"].calls
    return sums, control, recording.sent_bytes(), recording.table()


def test_totals_equal_the_formulas_on_every_rank() -> None:
    """Protects the traffic figures: uneven shards exact, calls outside the block and control traffic apart."""
    for rank, (sums, control_calls, sent, table) in enumerate(run_ranks(traced, 3)):
        own_bytes = 2 * (100, 0, 250)[rank]
        assert sums == {
            "all_reduce": (1, 1200, 2 * 2 * 1200 // 3),
            "reduce_scatter": (1, 700, 700 - own_bytes),
            "all_gather": (1, 700, 2 * own_bytes),
            "broadcast": (1, 120, 80),
        }
        assert control_calls == 1
        assert sent == 1600 + 700 - own_bytes + 2 * own_bytes + 80
        assert "all_reduce (control)" in table
        assert "payload bytes" in table


def test_all_ranks_together_send_what_the_whole_group_must() -> None:
    """Protects the per-rank formulas: over all ranks a reduce-scatter and an all-gather move the same bytes."""
    bounds = (0, 10, 10, 64)
    for op in ("reduce_scatter", "all_gather"):
        total = sum(sent_bytes(op, num_bytes=64, size=3, rank=rank, bounds_bytes=bounds) for rank in range(3))
        assert total == 2 * 64


def group_of_one() -> int:
    group = shard_group()
    with hybrid.trace() as recording:
        ops.all_reduce(torch.ones(5), group=group).wait()
    return len(recording.calls)


def test_a_group_of_one_has_no_traffic() -> None:
    """Protects the figures of a single process: nothing is sent, so nothing is counted."""
    assert run_ranks(group_of_one, 1) == [0]
