"""ZeRO is a promise about bytes: what each rank holds, and what it sends, equal the formulas of the design.

Bytes held are counted twice: as `model.memory_bytes()` reports them, and as the storages of all tensors that
Python can reach. Both must equal the formula, padding included, so the report cannot leave anything out.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

import hybrid
from hybrid.collectives.scratch import SCRATCH
from hybrid.planner.job import Candidate, Precision
from hybrid.planner.traffic import state_bytes
from tests.models import MODELS, build, cut
from tests.parity_case import even_cuts
from tests.ranks import run_ranks

BUCKET_BYTES = 3000

# (ranks, shard_size)
LAYOUTS = ((2, 2), (4, 4), (4, 2))
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}
STATE_TENSORS = {"adamw": 2, "sgd": 1}
"""State tensors per element; AdamW has a 4-byte step counter per parameter besides."""


def make_strategy(zero_stage: int, shard_size: int, **settings: Any) -> hybrid.DistributedStrategy:
    strategy = hybrid.DistributedStrategy()
    strategy.timeout_seconds = 20
    strategy.accumulate_steps = settings.pop("accumulate_steps", 1)
    strategy.sharding = True
    sharding: dict[str, Any] = {"stage": zero_stage, "bucket_bytes": BUCKET_BYTES, **settings}
    strategy.sharding_configs = sharding if zero_stage == 0 else {**sharding, "shard_size": shard_size}
    return strategy


def wrapped(zero_stage: int, shard_size: int, optimizer: str = "adamw", **settings: Any) -> tuple[Any, Any]:
    model = build("blocks")
    model = hybrid.distributed_model(model, strategy=make_strategy(zero_stage, shard_size, **settings))
    return model, hybrid.distributed_optimizer(OPTIMIZERS[optimizer](model.parameters()))


def local_batch(step: int) -> Any:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return cut(MODELS["blocks"].batch(step), *even_cuts(0, 12, world_size)[rank])


def live_storages() -> dict[int, int]:
    """Address -> bytes of every storage that a Python object can reach and that is younger than `gc.freeze()`.

    Left out is what gloo's messages are written to and read from, which a GPU does not have: tensors of bytes.
    """
    SCRATCH.clear()
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():  # what stands for a gradient lets nobody look at its memory
        messages = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.dtype is torch.uint8}
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return {address: size for address, size in storages.items() if address not in messages}


def live_bytes() -> int:
    return sum(live_storages().values())


def in_turn(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], Any]:
    """On each rank: the results of several runs, each a job of its own."""
    results = {}
    for values in arguments:
        gc.collect()
        gc.freeze()  # looking for tensors among all objects of the libraries would take a second each time
        results[values] = function(*values)
        hybrid.shutdown()
    return results


@functools.cache
def in_one_world(
    function: Callable[..., Any], world_size: int, arguments: tuple[tuple[Any, ...], ...]
) -> dict[tuple[Any, ...], list[Any]]:
    """Arguments -> results by rank, all from one world."""
    ranks = run_ranks(in_turn, world_size, function, arguments)
    return {values: [results[values] for results in ranks] for values in arguments}


# -- bytes held -------------------------------------------------------------------------------------------------


def observe(zero_stage: int, shard_size: int, optimizer_name: str) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    """(point, measured, expected) along two steps of a plain loop and one of train_batch."""
    batch, loss = local_batch(0), MODELS["blocks"].loss
    model = build("blocks")
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen_bytes = 4 * sum(p.numel() for p in model.parameters() if not p.requires_grad)
    before = live_bytes()
    model = hybrid.distributed_model(model, strategy=make_strategy(zero_stage, shard_size))
    optimizer = hybrid.distributed_optimizer(OPTIMIZERS[optimizer_name](model.parameters()))
    buckets = model.hybrid_runtime.engine.buckets
    num_shards = shard_size if zero_stage > 0 else 1
    assert all(bucket.partition.num_shards == num_shards for bucket in buckets)
    padded = sum(bucket.partition.num_elements for bucket in buckets)
    padding = sum(bucket.partition.padding_elements for bucket in buckets)
    assert padded - padding == trainable
    # Whole buffers exist for buckets that got a gradient: the unused layer may have one of its own.
    used = [b for b in buckets if not all(fqn.startswith("unused") for fqn in b.fqns)]
    whole = 4 * sum(bucket.partition.num_elements for bucket in used)
    every_shard = 4 * padded // num_shards
    owned = [part for b in buckets for part in b.partition.slices(b.shard) if not part.fqn.startswith("unused")]
    state = 4 * STATE_TENSORS[optimizer_name] * sum(part.num_elements for part in owned)
    state += 4 * len(owned) if optimizer_name == "adamw" else 0
    # Beyond the table: padding, and one element that stands for each gradient.
    base = live_bytes()
    rows = [("overhead of wrapping", {"live": base - before}, {"live": 4 * padding + 4 * num_trainable(model)})]

    def row(point: str, gradients: int, state: int) -> None:
        reported = model.memory_bytes()
        measured = {**reported, "live": live_bytes() - base}
        expected = {"parameters": 4 * padded + frozen_bytes, "gradients": gradients, "optimizer_state": state}
        rows.append((point, measured, {**expected, "live": gradients + state}))

    row("after wrap", 0, 0)
    with model.no_sync():
        loss(model, batch).backward()
    row("after the first backward in no_sync", whole, 0)
    loss(model, batch).backward()
    row("after the reduction", every_shard, 0)
    optimizer.step()
    row("after step", every_shard, state)
    optimizer.zero_grad()
    row("after zero_grad", 0, state)
    loss(model, batch).backward()
    row("after a backward with state", every_shard, state)
    optimizer.step()
    model.zero_grad()
    row("after model.zero_grad", 0, state)
    model.train_batch(batch, optimizer, loss_fn=MODELS["blocks"].loss_fn)
    row("after train_batch", 0, state)
    return rows


def num_trainable(model: torch.nn.Module) -> int:
    return sum(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize(("world_size", "shard_size"), LAYOUTS)
def test_live_bytes_equal_the_table(world_size: int, shard_size: int, zero_stage: int, optimizer: str) -> None:
    """Each buffer is as large as the design says, born and gone when it says, and reported as it is."""
    cases = tuple((stage, shard_size, name) for stage in (0, 1, 2) for name in OPTIMIZERS)
    ranks = in_one_world(observe, world_size, cases)[zero_stage, shard_size, optimizer]
    wrong = [
        f"rank {rank}, {point}: {measured}, not {expected}"
        for rank, rows in enumerate(ranks)
        for point, measured, expected in rows
        if measured != expected
    ]
    assert not wrong, "\n".join(wrong)


def accumulate(zero_stage: int, grad_reduce: str) -> list[tuple[int, int, int]]:
    """(gradient bytes, whole, own shards) at the beginning of each forward of one train_batch."""
    model, optimizer = wrapped(zero_stage, 2, accumulate_steps=3, grad_reduce=grad_reduce)
    buckets = model.hybrid_runtime.engine.buckets
    used = [b for b in buckets if not all(fqn.startswith("unused") for fqn in b.fqns)]
    whole = 4 * sum(bucket.partition.num_elements for bucket in used)
    shards = 4 * sum(bucket.high - bucket.low for bucket in buckets)
    seen = []

    def forward_step(model: Any, batch: Any) -> torch.Tensor:
        seen.append((model.memory_bytes()["gradients"], whole, shards))
        return MODELS["blocks"].loss(model, batch)

    model.train_batch(local_batch(0), optimizer, forward_step=forward_step)
    return seen


ACCUMULATION = {
    (1, "auto"): "whole",
    (2, "auto"): "shard",
    (2, "every_micro_batch"): "shard",
    (2, "last_micro_batch"): "whole",
}


@pytest.mark.parametrize("case", ACCUMULATION, ids=lambda case: f"z{case[0]}-{case[1]}")
def test_accumulation_holds_whole_gradients_or_shards(case: tuple[int, str]) -> None:
    """Between micro-batches stage 1 holds whole gradients, and stage 2 only what its grad_reduce asks for."""
    for seen in in_one_world(accumulate, 2, tuple(ACCUMULATION))[case]:
        expected = [0, *(whole if ACCUMULATION[case] == "whole" else shards for _, whole, shards in seen[1:])]
        assert [held for held, _, _ in seen] == expected


def watch_backward(overlap_comm: bool, way: str) -> tuple[int, int]:
    """(most whole gradient buffers alive at a time during backward, number of buckets), for a chain of layers."""
    widths = (15, 17, 15, 17, 15, 17, 15)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in pairwise(widths)))
    model = hybrid.distributed_model(model, strategy=make_strategy(2, 2, overlap_comm=overlap_comm, bucket_bytes=1100))
    optimizer = hybrid.distributed_optimizer(OPTIMIZERS["adamw"](model.parameters()))
    sizes = [4 * bucket.partition.num_elements for bucket in model.hybrid_runtime.engine.buckets]
    assert not any(size % 4096 == 0 for size in sizes)  # as received shards have
    batch, loss_fn = local_batch(0), MODELS["blocks"].loss_fn
    known = live_storages()
    most = 0

    def look(_: torch.Tensor) -> None:
        nonlocal most
        new = {address: size for address, size in live_storages().items() if address not in known}
        most = max(most, sum(size in sizes for size in new.values()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    if way == "train_batch":
        model.train_batch(batch, optimizer, loss_fn=loss_fn)
    else:
        loss_fn(model(batch[0]), batch[1]).backward()
    return most, len(sizes)


BACKWARDS = tuple((overlap_comm, way) for overlap_comm in (True, False) for way in ("train_batch", "loop"))


@pytest.mark.parametrize("case", BACKWARDS, ids=lambda case: f"{'' if case[0] else 'no_'}overlap-{case[1]}")
def test_stage_2_has_two_whole_buckets_at_most(case: tuple[bool, str]) -> None:
    """The point of stage 2: whole gradients exist bucket by bucket, with and without overlap."""
    for most, num_buckets in in_one_world(watch_backward, 2, BACKWARDS)[case]:
        assert num_buckets >= 5
        assert 1 <= most <= 2


# -- bytes sent -------------------------------------------------------------------------------------------------


@contextmanager
def traced(seen: dict[str, Any], what: str) -> Iterator[None]:
    with hybrid.trace() as recording:
        yield
    by_axis = recording.totals()
    seen[what] = {
        "sent": recording.sent_bytes(),
        "control": recording.sent_bytes(control=True),
        "by_axis": {axis: {op: sums.sent_bytes for op, sums in by_op.items()} for axis, by_op in by_axis.items()},
    }


def send(zero_stage: int, shard_size: int, partition: str, grad_dtype: str) -> dict[str, Any]:
    """Traffic of one step in each of several ways, and the sizes that the formula needs."""
    model, optimizer = wrapped(zero_stage, shard_size, partition=partition, grad_dtype=grad_dtype)
    buckets = model.hybrid_runtime.engine.buckets
    loss, loss_fn = MODELS["blocks"].loss, MODELS["blocks"].loss_fn
    seen: dict[str, Any] = {
        "padded": sum(bucket.partition.num_elements for bucket in buckets),
        "own": sum(bucket.high - bucket.low for bucket in buckets),
        "num_parameters": num_trainable(model),
    }
    for step in range(2):
        with traced(seen, f"train_batch {step}"):
            model.train_batch(local_batch(step), optimizer, loss_fn=loss_fn)
    with traced(seen, "step=False"):
        model.train_batch(local_batch(2), optimizer, loss_fn=loss_fn, step=False)
    with traced(seen, "step=True"):
        model.train_batch(local_batch(3), optimizer, loss_fn=loss_fn)
    with traced(seen, "no_sync"), model.no_sync():
        loss(model, local_batch(4)).backward()
    with traced(seen, "backward"):
        loss(model, local_batch(5)).backward()
    with traced(seen, "step"):
        optimizer.step()
    with traced(seen, "rest"):
        optimizer.zero_grad()
        loss(model, local_batch(6))
        model.eval_batch(local_batch(7), loss_fn=loss_fn)
        model.state_dict()
    return seen


def expected_bytes(seen: dict[str, Any], zero_stage: int, world_size: int, shard_size: int) -> dict[str, int]:
    """By hand from design §4, for even shards: reduction, gather and the sum over replicas, per rank and step."""
    whole, replicas = 4 * seen["padded"], world_size // shard_size
    if zero_stage == 0:
        return {"reduce": 2 * whole * (world_size - 1) // world_size, "gather": 0, "replicas": 0}
    cut_bytes = whole * (shard_size - 1) // shard_size
    return {
        "reduce": cut_bytes,
        "gather": cut_bytes,
        "replicas": 2 * (whole // shard_size) * (replicas - 1) // replicas,
    }


@pytest.mark.parametrize("grad_dtype", ["float32", "param"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize(("world_size", "shard_size"), LAYOUTS)
def test_traffic_equals_its_formula(world_size: int, shard_size: int, zero_stage: int, grad_dtype: str) -> None:
    """Padded elements × (reduce bytes + parameter bytes) × (N-1)/N at stages 1-2, twice the reduce bytes at 0.

    Accumulation without a reduction sends nothing but counters, and nothing is sent where nothing is due.
    """
    cases = tuple((stage, shard_size, "auto", dtype) for stage in (0, 1, 2) for dtype in ("float32", "param"))
    for seen in in_one_world(send, world_size, cases)[zero_stage, shard_size, "auto", grad_dtype]:
        parts = expected_bytes(seen, zero_stage, world_size, shard_size)
        layout = Candidate(dp_replicate=world_size // shard_size, dp_shard=shard_size, zero_stage=zero_stage)
        assert state_bytes(seen["padded"], Precision(parameter=4), layout) == parts  # what the planner prices
        at_step = parts["reduce"] + parts["gather"] + parts["replicas"]
        reduces_when_told = zero_stage == 2
        assert {what: totals["sent"] for what, totals in seen.items() if isinstance(totals, dict)} == {
            "train_batch 0": at_step,
            "train_batch 1": at_step,
            "step=False": parts["reduce"] if reduces_when_told else 0,
            "step=True": at_step,
            "no_sync": 0,
            "backward": parts["reduce"],
            "step": parts["gather"] + parts["replicas"],
            "rest": 0,
        }
        assert seen["train_batch 0"]["by_axis"] == by_axis(parts, zero_stage)


def by_axis(parts: dict[str, int], zero_stage: int) -> dict[str, dict[str, int]]:
    """What the trace must show: axis -> operation -> bytes."""
    if zero_stage == 0:
        return {"dp_replicate+dp_shard": {"all_reduce": parts["reduce"]}}
    axes = {"dp_shard": {"reduce_scatter": parts["reduce"], "all_gather": parts["gather"]}}
    return axes | ({"dp_replicate": {"all_reduce": parts["replicas"]}} if parts["replicas"] else {})


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_traffic_of_whole_parameters_sums_to_the_formula(zero_stage: int) -> None:
    """Uneven shards (partition "parameter"): each rank keeps its own range; together they send what even ones do."""
    cases = tuple((stage, 4, "parameter", "float32") for stage in (1, 2))
    ranks = in_one_world(send, 4, cases)[zero_stage, 4, "parameter", "float32"]
    for seen in ranks:
        reduced, gathered = 4 * (seen["padded"] - seen["own"]), 4 * seen["own"] * 3
        assert seen["train_batch 0"]["sent"] == reduced + gathered
    assert sum(seen["own"] for seen in ranks) == ranks[0]["padded"]
    assert sum(seen["train_batch 0"]["sent"] for seen in ranks) == 2 * 4 * ranks[0]["padded"] * 3


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_control_traffic_is_apart_and_counts_parameters_only(zero_stage: int) -> None:
    """Counters go beside: a number per parameter and a few more per step, whatever the size of the model."""
    cases = tuple((stage, 2, "auto", "float32") for stage in (0, 1, 2))
    for seen in in_one_world(send, 2, cases)[zero_stage, 2, "auto", "float32"]:
        assert 8 * seen["num_parameters"] <= seen["train_batch 1"]["control"] <= 8 * (seen["num_parameters"] + 16)


def send_micro_batches(zero_stage: int, grad_reduce: str | int) -> tuple[int, int]:
    """(bytes sent in one step of four micro-batches, bytes of one reduction)."""
    model, optimizer = wrapped(zero_stage, 2, accumulate_steps=4, grad_reduce=grad_reduce)
    padded = sum(bucket.partition.num_elements for bucket in model.hybrid_runtime.engine.buckets)
    seen: dict[str, Any] = {}
    with traced(seen, "step"):
        model.train_batch(local_batch(0), optimizer, loss_fn=MODELS["blocks"].loss_fn)
    return seen["step"]["sent"], 4 * padded // 2


REDUCTIONS: dict[tuple[int, str | int], int] = {
    (1, "auto"): 1,
    (2, "auto"): 4,
    (2, "every_micro_batch"): 4,
    (2, "last_micro_batch"): 1,
    (2, 1): 4,
    (2, 2): 2,
    (2, 3): 2,
    (2, 4): 1,
}


@pytest.mark.parametrize("case", REDUCTIONS, ids=lambda case: f"z{case[0]}-{case[1]}")
def test_grad_reduce_multiplies_the_reduce_bytes(case: tuple[int, str | int]) -> None:
    """Four micro-batches reduce as often as the setting says, and the parameters are gathered once."""
    for sent, once in in_one_world(send_micro_batches, 2, tuple(REDUCTIONS))[case]:
        assert sent == (REDUCTIONS[case] + 1) * once
