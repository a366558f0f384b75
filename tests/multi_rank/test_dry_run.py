"""A dry run is the real run without values: the same bytes and the same collectives, call by call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.test_memory_and_traffic import in_one_world
from tests.multi_rank.test_planner_memory import Layout
from tests.pipeline_models import own
from tests.planner_chain import SMALL, batch, chain

WORLD_SIZE = 4

LAYOUTS = (
    Layout(mb=2),
    Layout(stage=1, shard_size=2, mb=2, amp=True),
    Layout(stage=2, shard_size=4, partition="parameter"),
    Layout(stage=3, shard_size=2, mb=2, recompute="full", reshard_after="run"),
    Layout(stage=3, shard_size=2, tp=2, amp=True, mb=2),
    Layout(tp=2, stage=1, shard_size=2, recompute="full"),
    Layout(pp=2, stage=2, shard_size=2, mb=4, grad_reduce="last_micro_batch"),
    Layout(pp=2, stage=3, shard_size=2, mb=4, schedule="interleaved", amp=True),
    Layout(pp=2, tp=2, mb=2),
)

Seen = tuple[dict[str, int], dict[tuple[str, str], tuple[int, int, int]]]


def train(layout: Layout) -> Seen:
    """(bytes by kind after a step, (axis, operation) -> calls, payload and sent bytes of it) on one rank."""
    model: Any = hybrid.distributed_model(chain(SMALL), strategy=layout.strategy(SMALL))
    optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    with hybrid.trace() as recording:
        model.train_batch(own(batch(SMALL)), optimizer, loss_fn=functional.mse_loss)
    traffic = {
        (axis, op): (sums.calls, sums.payload_bytes, sums.sent_bytes)
        for axis, by_op in recording.totals().items()
        for op, sums in by_op.items()
    }
    return model.memory_bytes(), traffic


def factory() -> tuple[nn.Module, torch.Tensor]:
    return chain(SMALL), torch.zeros(SMALL.samples // WORLD_SIZE, SMALL.width)


def imagine(layout: Layout) -> list[Seen]:
    """The same of a dry run, for each rank."""
    strategy = layout.strategy(SMALL)
    strategy.micro_batch_size = layout.candidate(WORLD_SIZE, SMALL).micro_batch_size
    found = hybrid.dryrun(strategy, factory, world_size=WORLD_SIZE, ranks=range(WORLD_SIZE))
    seen = []
    for one in found.ranks:
        kinds = one.bytes_by_point["after_step"]
        counters = 4 * sum(p.own is not None and p.trainable for p in one.parameters)
        sizes = {
            "parameters": sum(kinds.get(kind, 0) for kind in ("parameters", "parameter_shards", "masters")),
            "gradients": sum(kinds.get(kind, 0) for kind in ("gradients", "gradient_shards")),
            "optimizer_state": kinds["optimizer_state"] + counters,
        }
        traffic = {
            (row.axis, row.op): (row.calls, row.payload_bytes, row.sent_bytes)
            for row in one.traffic
            if not row.is_control
        }
        seen.append((sizes, traffic))
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dry_run_holds_and_sends_what_the_real_run_does(layout: Layout) -> None:
    """Whoever believes a dry run of 16,384 ranks believes this: on 4 it is the truth, on every rank."""
    real = in_one_world(train, WORLD_SIZE, tuple((case,) for case in LAYOUTS))[(layout,)]
    for rank, (found, imagined) in enumerate(zip(real, imagine(layout), strict=True)):
        assert imagined == found, f"rank {rank}"
