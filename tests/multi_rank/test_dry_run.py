"""A dry run is the real run without values: the same bytes and the same collectives, call by call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from hybrid.contracts.cluster import parse_cluster
from hybrid.planner.axis_bytes import axis_bytes
from hybrid.planner.job import Candidate, Job, Precision
from hybrid.planner.model_spec import ModelSpec, ParameterSpec, UnitSpec
from tests.multi_rank.test_memory_and_traffic import in_one_world
from tests.multi_rank.test_planner_memory import Layout
from tests.pipeline_models import own
from tests.planner_chain import SMALL, batch, chain
from tests.ranks import run_ranks

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


# -- a bucket whose units do not stand in a row ------------------------------------------------------------------------

BLOCKS, WIDTH, MICRO_BATCHES, PREFETCHES = 4, 15, 2, (0, 1, 2)


def gapped() -> nn.Sequential:
    """The last stage lays two blocks and the head into one bucket, the norm between them, in float32, into another."""
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))


def train_gapped() -> list[tuple[int, int]]:
    """(bytes sent over dp_shard in the second step, calls) on one rank, for each of `PREFETCHES`."""
    seen = []
    for prefetch in PREFETCHES:
        strategy = hybrid.DistributedStrategy(
            sharding=True,
            sharding_configs={"stage": 3, "prefetch": prefetch, "grad_reduce": "every_micro_batch"},
            pipeline=True,
            pipeline_configs={"degree": 2, "split": [BLOCKS // 2, BLOCKS // 2 + 2], "accumulate_steps": MICRO_BATCHES},
            amp=True,
            amp_configs={"dtype": "bfloat16", "level": "O2"},
        )
        model: Any = hybrid.distributed_model(gapped(), strategy=strategy)
        optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
        data = torch.ones(4, WIDTH), torch.ones(4, WIDTH)
        model.train_batch(data, optimizer, loss_fn=functional.mse_loss)
        with hybrid.trace() as recording:
            model.train_batch(data, optimizer, loss_fn=functional.mse_loss)
        sums = recording.totals()["dp_shard"].values()
        seen.append((sum(one.sent_bytes for one in sums), sum(one.calls for one in sums)))
        hybrid.shutdown()
    return seen


def told(prefetch: int) -> list[float]:
    """The same by the planner, for each stage."""
    weight, bias = ParameterSpec(name="weight", shape=(WIDTH, WIDTH)), ParameterSpec(name="bias", shape=(WIDTH,))
    blocks = [UnitSpec(name=str(at), kind="block", parameters=(weight, bias)) for at in range(BLOCKS)]
    norm = [ParameterSpec(name=f"{BLOCKS}.{name}", shape=(WIDTH,), is_norm=True) for name in ("weight", "bias")]
    head = ParameterSpec(name=f"{BLOCKS + 1}.weight", shape=(WIDTH, WIDTH))
    ends = UnitSpec(name="head", kind="other", parameters=(*norm, head))
    job = Job(
        model=ModelSpec(name="gapped", units=(*blocks, ends), hidden=WIDTH),
        cluster=parse_cluster("local"),
        global_batch_size=8, seq=1, precision=Precision(norm=4), prefetch=prefetch,
    )  # fmt: skip
    candidate = Candidate(
        pp=2, dp_shard=2, zero_stage=3, split=(BLOCKS // 2, BLOCKS // 2 + 1), grad_reduce="every_micro_batch",
        micro_batch_size=2, num_micro_batches=MICRO_BATCHES,
    )  # fmt: skip
    return [sent["dp"] for sent in axis_bytes(job, candidate)]


def test_what_stage_3_gathers_again_is_in_the_plan() -> None:
    """A forward frees such a bucket at the norm, and gathers it again for the head unless it is fetched ahead by then.

    Faults: the plan had one gather for each forward; what was fetched two units ahead was freed by the next unit, and
    fetched again.
    """
    plans = [told(prefetch) for prefetch in PREFETCHES]
    for rank, seen in enumerate(run_ranks(train_gapped, WORLD_SIZE)):
        for prefetch, plan, (found, calls) in zip(PREFETCHES, plans, seen, strict=True):
            # A trace cuts the fraction of a byte off each call.
            assert 0 <= plan[rank // 2] - found < calls, (rank, prefetch, plan, found)
    assert plans[0] == plans[1]
    assert plans[2][0] == plans[1][0]
    assert plans[2][1] < plans[1][1]
