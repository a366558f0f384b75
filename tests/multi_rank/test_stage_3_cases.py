"""ZeRO stage 3: structures, loops, reported cases, memory and traffic."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import assert_close, own_part, variant, wrapped
from tests.multi_rank.test_stage_3 import (
    SAMPLES,
    WIDTH,
    Block,
    ParentReads,
    Stack,
    TiedUnits,
    UsedTwice,
    batch,
    built,
    check,
    sgd,
)
from tests.ranks import run_ranks

Pair = namedtuple("Pair", ["value", "note"])


@dataclasses.dataclass(frozen=True)
class Record:
    value: torch.Tensor
    nothing: None = None


class Plain:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda t: t, lambda v: v),
    "tuple": (lambda t: (t, None), lambda v: v[0]),
    "list": (lambda t: [1, t], lambda v: v[1]),
    "dict": (lambda t: {"a": t}, lambda v: v["a"]),
    "dict of lists": (lambda t: {"a": [t, "x"]}, lambda v: v["a"][0]),
    "namedtuple": (lambda t: Pair(t, "note"), lambda v: v.value),
    "dataclass": (Record, lambda v: v.value),
    "object": (Plain, lambda v: v.value),
}


class KeywordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.container = "tensor"

    def forward(self, *, x: torch.Tensor, scale: float = 1.0) -> Any:
        return CONTAINERS[self.container][0](torch.tanh(self.linear(x)) * scale)


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeywordBlock() for _ in CONTAINERS)
        for block, name in zip(self.blocks, CONTAINERS, strict=True):
            block.container = name

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = inputs + CONTAINERS[block.container][1](block(x=inputs, scale=0.5))
        return inputs


class Parents(nn.Module):
    """BC-44 a-e: bias matrix of a child, ParameterList, ModuleDict, tied embedding weight, weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)
        self.vectors = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
        self.table = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.pairs = nn.ModuleList(Block() for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs + inputs @ self.child.weight + sum(self.vectors)
        hidden = self.normed(self.table["b"](self.table["a"](hidden)))
        hidden = functional.linear(hidden, self.embedding.weight) * self.pairs[1].scale
        return self.pairs[1](self.pairs[0](hidden)) + self.embedding(torch.arange(1)).sum()


class AuxiliaryAttribute(Stack):
    """Keeps a part of its loss where the training loop finds it."""

    aux: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        self.aux = (hidden * self.last.bias).square().mean() * self.blocks[0].scale.sum()
        return super().forward(inputs)


class AuxiliaryList(Stack):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.collected = []
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
            self.collected.append((hidden * self.last.bias).square().mean())
        return self.last(hidden)


def backward_of_attribute(model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    for only in (False, True, False):
        output = model(inputs)
        (model.aux if only else model.aux + functional.mse_loss(output, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()


def backward_of_list(model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    for only in (False, True, False):
        output = model(inputs)
        (sum(model.collected) if only else sum(model.collected) + functional.mse_loss(output, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_evaluation(model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """BC-47: thrown-away forward, eval, a loop that feeds its output back, backward in eval mode."""
    total = torch.zeros(()).double()
    for step in range(3):
        model(inputs)
        model.eval()
        with torch.no_grad():
            total = total + functional.mse_loss(model(inputs), targets)
            hidden = inputs
            for _ in range(3):
                hidden = model(hidden)
            total = total + hidden.square().mean()
        with torch.inference_mode():
            total = total + model(inputs).square().mean().item()
        if step < 2:
            model.train()
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return total


def frozen_stack() -> nn.Module:
    model = Stack()
    model.blocks[1].requires_grad_(False)
    model.first.weight.requires_grad_(False)
    model.blocks[2].scale.requires_grad_(False)
    return model


class MixedSizes(nn.Module):
    """BC-41: 0-d, (1,), (3,), (7, 3), (1, 17)."""

    def __init__(self) -> None:
        super().__init__()
        for index, shape in enumerate([(), (1,), (3,), (7, 3), (1, 17)]):
            self.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        sums = [torch.tanh(inputs.sum(1)[:, None] * p.flatten()).sum(1) for p in self.parameters()]
        return torch.stack([*sums, sums[0]], 1)


def run_all(cases: list[tuple[Any, Any, dict[str, Any]]]) -> None:
    for build, loop, settings in cases:
        try:
            check(build, *([loop] if loop else []), **settings)
        except BaseException as error:
            error.add_note(f"{build.__name__}, {getattr(loop, '__name__', 'steps')}, {settings}")
            raise


GROUPS: dict[str, tuple[int, list[tuple[Any, Any, dict[str, Any]]]]] = {
    "containers": (2, [(Containers, None, {"prefetch": n}) for n in (0, 2)]),
    "parents": (2, [(Parents, None, {"prefetch": n}) for n in (0, 1)]),
    "attribute": (2, [(AuxiliaryAttribute, backward_of_attribute, {})]),
    "list": (2, [(AuxiliaryList, backward_of_list, {})]),
    "evaluation": (2, [(build, with_evaluation, {}) for build in (Stack, ParentReads, TiedUnits)]),
    "frozen": (2, [(frozen_stack, None, {"prefetch": n}) for n in (0, 1)]),
    "units and buckets": (
        2,
        [
            (build, None, {"bucket_bytes": size, "units": units, "prefetch": prefetch, "overlap_comm": overlap})
            for build, size, units, prefetch, overlap in (
                (Stack, 1, None, 0, True),
                (Stack, 100_000, None, 3, False),
                (UsedTwice, 600, ["Linear"], 1, True),
                (TiedUnits, 600, ["Linear", "Block"], 1, True),
                (ParentReads, 1, ["Linear"], 2, True),
                (Stack, 287, ["ModuleList"], 1, True),
            )
        ],
    ),
    "sizes": (3, [(MixedSizes, None, {"bucket_bytes": size}) for size in (1, 10_000)]),
    "replicas": (4, [(build, None, {"shard_size": size}) for build in (TiedUnits, ParentReads) for size in (1, 2, 4)]),
}


@pytest.mark.parametrize("group", GROUPS)
def test_structures(group: str) -> None:
    """Weights after training are those of plain torch."""
    world_size, cases = GROUPS[group]
    run_ranks(run_all, world_size, cases, timeout_seconds=40)


# ---- norms, accumulation (BC-06, BC-07, BC-12) -------------------------------------------------------------------


class Weighted(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, g: torch.Tensor) -> torch.Tensor:
        return (self.w * g).sum()


def norms(shard_size: int | None) -> None:
    g = torch.tensor([3.0, 4.0, 0.0, 12.0])
    for order, limit, norm, wanted in (
        (2.0, 6.5, 13.0, (1.5, 2.0, 0.0, 6.0)),
        (float("inf"), 6.0, 12.0, (1.5, 2.0, 0.0, 6.0)),
        (None, 2.0, None, (2.0, 2.0, 0.0, 2.0)),
    ):
        with variant(stage=3, shard_size=shard_size) as strategy:
            model, optimizer = wrapped(Weighted(4), lambda p: torch.optim.SGD(list(p), lr=1.0), strategy)
            model(g).backward()
            if order is None:
                model.clip_grad_value_(limit)
            else:
                assert_close(model.clip_grad_norm_(limit, order), torch.tensor(norm), 1e-6, "norm")
            optimizer.step()
            assert_close(hybrid.full_parameter(model.w), -torch.tensor(wanted), 1e-5, "w")


@pytest.mark.parametrize(("world_size", "shard_size"), [(2, None), (3, None), (4, 2)])
def test_norms(world_size: int, shard_size: int | None) -> None:
    """BC-06 and BC-07: the norm of all shards, each element once; alike on every rank."""
    run_ranks(norms, world_size, shard_size)


def accumulation(shard_size: int | None) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with variant(stage=3, shard_size=shard_size) as strategy:
        model, optimizer = wrapped(Weighted(1), lambda p: torch.optim.SGD(list(p), lr=1.0), strategy)
        for step in range(2):
            with hybrid.trace() as record, model.no_sync():
                model(torch.tensor([10.0 * rank + 2 * step + 1])).backward()
            assert not [call for call in record.calls if call.op in {"reduce_scatter", "all_reduce"}]
            model(torch.tensor([10.0 * rank + 2 * step + 2])).backward()
            optimizer.step()
            optimizer.zero_grad()
        wanted = -sum(10.0 * r + k for r in range(world_size) for k in range(1, 5)) / world_size
        assert_close(hybrid.full_parameter(model.w), torch.tensor([wanted]), 1e-6, "w")


@pytest.mark.parametrize(("world_size", "shard_size"), [(2, None), (4, 2)])
def test_deferred_gradients(world_size: int, shard_size: int | None) -> None:
    """BC-12: no_sync sends no gradient and loses none."""
    run_ranks(accumulation, world_size, shard_size)


# ---- ranks that differ -------------------------------------------------------------------------------------------


def empty_rank(accumulate_steps: int) -> None:
    """Rank 1 has no sample: refused on both ranks alike, since both gather parameters in each forward."""
    inputs, targets = batch()
    with variant(stage=3, bucket_bytes=200, timeout_seconds=4, accumulate_steps=accumulate_steps) as strategy:
        model, optimizer = wrapped(built(Stack), sgd, strategy)
        own = slice(0, SAMPLES) if dist.get_rank() == 0 else slice(SAMPLES, SAMPLES)
        mine = (inputs[own], targets[own])
        with pytest.raises(hybrid.BatchError, match="empty micro-batch at stage 3"):
            model.train_batch(mine, optimizer, loss_fn=functional.mse_loss)
        with pytest.raises(hybrid.BatchError, match="empty micro-batch at stage 3"):
            model.eval_batch(mine, loss_fn=functional.mse_loss)


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_a_rank_without_samples(accumulate_steps: int) -> None:
    run_ranks(empty_rank, 2, accumulate_steps, timeout_seconds=25)


def two_models() -> None:
    """BC-47: G and D in turn, one backward through both."""
    inputs, targets = batch()

    def play(g: Any, d: Any, g_opt: Any, d_opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        for step in range(4):
            d_opt.zero_grad()
            (d(y).square().mean() + (d(g(x).detach()) - 1).square().mean()).backward()
            d_opt.step()
            if step % 2:
                g_opt.zero_grad()
                d(g(x)).square().mean().backward()
                g_opt.step()

    g, d = built(Stack), built(TiedUnits)
    play(g, d, sgd(g.parameters()), sgd(d.parameters()), inputs, targets)
    with variant(stage=3, bucket_bytes=200, timeout_seconds=6) as strategy:
        own_g, g_opt = wrapped(built(Stack), sgd, strategy)
        own_d, d_opt = wrapped(built(TiedUnits), sgd, strategy)
        play(own_g, own_d, g_opt, d_opt, own_part(inputs), own_part(targets))
        for own, plain in ((own_g, g), (own_d, d)):
            state = own.full_state_dict()
            for name, value in plain.state_dict().items():
                assert_close(state[name], value, 1e-11, name)


def test_two_models_in_turn() -> None:
    run_ranks(two_models, 2, timeout_seconds=25)


# ---- memory and traffic ------------------------------------------------------------------------------------------


def memory(world_size: int) -> None:
    inputs, targets = (own_part(t) for t in batch())
    with variant(stage=3, bucket_bytes=200, prefetch=1) as strategy:
        model, optimizer = wrapped(built(frozen_stack), sgd, strategy)
        engine = model.hybrid_runtime.engine
        padded = sum(bucket.partition.num_elements for bucket in engine.all_buckets()) * 8
        around = len(engine.unsharder._around)
        per_unit = max(len(buckets) for buckets in engine.unsharder._units.values())
        frozen_before = hybrid.full_parameter(model.blocks[1].inner.weight)

        def own_only() -> None:
            assert model.memory_bytes()["parameters"] == padded // world_size, (model.memory_bytes(), padded)
            assert all(bucket.data.untyped_storage().nbytes() == 0 for bucket in engine.all_buckets())

        own_only()
        for _ in range(2):
            engine.unsharder.gathered.peak_whole = 0
            loss = functional.mse_loss(model(inputs), targets)
            own_only()
            loss.backward()
            own_only()
            trainable = sum(bucket.partition.num_elements for bucket in engine.buckets) * 8
            assert model.memory_bytes()["gradients"] == trainable // world_size
            optimizer.step()
            own_only()
            optimizer.zero_grad()
            assert engine.unsharder.gathered.peak_whole <= around + 2 * per_unit, (
                engine.unsharder.gathered.peak_whole,
                around,
                per_unit,
            )
        with torch.no_grad():
            model(inputs)
        own_only()
        assert torch.equal(hybrid.full_parameter(model.blocks[1].inner.weight), frozen_before)


@pytest.mark.parametrize("world_size", [2, 4])
def test_memory(world_size: int) -> None:
    """Between passes each rank has its shard alone, frozen parameters too; in them what is around and two units."""
    run_ranks(memory, world_size, world_size)


def traffic() -> None:
    inputs, targets = (own_part(t) for t in batch())
    sent = {}
    for stage in (2, 3):
        with variant(stage=stage, bucket_bytes=200) as strategy:
            model, optimizer = wrapped(built(Stack), sgd, strategy)
            for _ in range(2):  # the second is traced: the order of units is known
                with hybrid.trace() as record:
                    functional.mse_loss(model(inputs), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            gathered = sum(c.payload_bytes for c in record.calls if c.op == "all_gather" and not c.control)
            reduced = sum(c.payload_bytes for c in record.calls if c.op == "reduce_scatter" and not c.control)
            padded = sum(b.partition.num_elements for b in model.hybrid_runtime.engine.buckets) * 8
            sent[stage] = (gathered / padded, reduced / padded)
    assert sent == {2: (1, 1), 3: (2, 1)}


def test_traffic() -> None:
    """One gather more than stage 2, and nothing else."""
    run_ranks(traffic, 2)
