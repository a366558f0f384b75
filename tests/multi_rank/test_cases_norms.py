"""Reported faults of the gradient norm and of clipping: one norm of the whole model, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.multi_rank.case_runs import (
    ONE_STEP,
    assert_close,
    assert_same_on_all_ranks,
    assert_weights,
    variant,
    wrapped,
)
from tests.ranks import run_ranks

GRADIENT = (3.0, -4.0, 0.0, 12.0)


class Weights(nn.Module):
    """The loss is sum(w * g): the gradient is g on every rank. `stretch` zeros between the numbers of g."""

    def __init__(self, *, stretch: int = 1, pieces: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        wide = torch.zeros(len(GRADIENT) * stretch, dtype=dtype)
        wide[::stretch] = torch.tensor(GRADIENT, dtype=dtype)
        self.gradients = wide.chunk(pieces)
        self.parts = nn.ParameterList([torch.zeros_like(part) for part in self.gradients])

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return sum((part * g).sum() for part, g in zip(self.parts, self.gradients, strict=True)) * samples.mean()

    def expected(self, *numbers: float) -> dict[str, torch.Tensor]:
        whole = torch.cat([torch.zeros_like(part) for part in self.gradients])
        whole[:: len(whole) // len(GRADIENT)] = -torch.tensor(numbers, dtype=whole.dtype)
        pieces = whole.split([len(part) for part in self.gradients])
        return {f"parts.{place}": piece for place, piece in enumerate(pieces)}


# Clip -> the norm before it (None: there is none), the update after it; w = -update.
CLIPS: dict[str, tuple[Any, float | None, tuple[float, ...]]] = {
    "2-norm": ({"max_norm": 6.5}, 13.0, (1.5, -2.0, 0.0, 6.0)),
    "largest": ({"max_norm": 6.0, "norm_type": math.inf}, 12.0, (1.5, -2.0, 0.0, 6.0)),
    "1-norm": ({"max_norm": 9.5, "norm_type": 1.0}, 19.0, (1.5, -2.0, 0.0, 6.0)),
    "3-norm": ({"max_norm": 100.0, "norm_type": 3.0}, (27 + 64 + 1728) ** (1 / 3), GRADIENT),
    "value": ({"clip_value": 2.0}, None, (2.0, -2.0, 0.0, 2.0)),
    "far away": ({"max_norm": 1e6}, 13.0, GRADIENT),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def clip_through(way: str, model: Any, optimizer: Any, clipping: dict[str, float]) -> float | None:
    """One step; the norm, if this way tells it."""
    samples = torch.ones(2)
    if way == "train_batch":
        result = model.train_batch(samples, optimizer, forward_step=lambda model, batch: model(batch))
        return result.grad_norm.item() if "max_norm" in clipping else None
    model(samples).backward()
    norm = None
    if way == "calls":
        if "clip_value" in clipping:
            model.clip_grad_value_(clipping["clip_value"])
        else:
            norm = model.clip_grad_norm_(**clipping).item()
            assert_close(model.clip_grad_norm_(math.inf, clipping.get("norm_type", 2.0)).item(),
                         min(norm, clipping["max_norm"]), ONE_STEP, "the norm after the clip")  # fmt: skip
    optimizer.step()
    return norm


WAYS = ("train_batch", "step", "calls")

# One small weight; one that is cut on every rank; several, of which some ranks own none.
SHAPES = ({"stretch": 1, "pieces": 1}, {"stretch": 101, "pieces": 1}, {"stretch": 33, "pieces": 3})


def choices(stages: tuple[int, ...]) -> Iterator[tuple[int, str, str, dict[str, int]]]:
    """(stage, clip, way, shape): every clip at every stage; the 2-norm by every way; shapes in turn."""
    shapes, ways = cycle(SHAPES), cycle(WAYS)
    for stage in stages:
        for way in WAYS:
            yield stage, "2-norm", way, next(shapes)
        next(shapes)
        for clip in CLIPS:
            yield stage, clip, next(ways), next(shapes)
        next(ways)


def check_clips(shard_size: int | None) -> None:
    for stage, name, way, shape in choices((0, 1, 2) if shard_size is None else (1, 2)):
        clipping, norm, update = CLIPS[name]
        with variant(
            stage=stage,
            shard_size=shard_size,
            gradient_clipping=None if way == "calls" else clipping,
            partition="parameter" if shape["pieces"] > 1 and stage == 2 else None,
        ) as strategy:
            dtype = torch.float32 if stage == 1 else torch.float64  # of fp64 the norm's own sums are no copies
            what = f"{name} by {way} of {shape} in {dtype}"
            model, optimizer = wrapped(Weights(**shape, dtype=dtype), sgd, strategy)
            got = clip_through(way, model, optimizer, clipping)
            if got is not None:
                assert norm is not None
                assert_close(got, norm, ONE_STEP, f"the norm, {what}")
            # The stock helper divides by norm + 1e-6.
            assert_weights(model, Weights(**shape, dtype=dtype).expected(*update), ONE_STEP)
            assert_same_on_all_ranks(dict(model.named_parameters()), what)


@pytest.mark.parametrize("world_size", [2, 3])
def test_bc06_norm_and_clip_are_those_of_the_whole_gradient(world_size: int) -> None:
    """Fault: each rank clipped by the norm of its own shard, or summed what should be maximised."""
    run_ranks(check_clips, world_size, None)


def test_bc07_replicas_of_shards_count_once_in_the_norm() -> None:
    """Fault: with hybrid sharding the squares were summed over the replicas too (18.38 instead of 13)."""
    run_ranks(check_clips, 4, 2)


# -- norms that decide ------------------------------------------------------------------------------------------


def check_bad_values() -> None:
    """A NaN or infinity on one rank only, in an element that another rank owns."""
    for stage in (0, 1, 2):
        for bad in (math.nan, math.inf):
            for norm_type in (2.0, math.inf):
                with variant(stage=stage) as strategy:
                    model, _ = wrapped(Weights(stretch=101), sgd, strategy)
                    samples = torch.full((2,), bad if dist.get_rank() == 1 else 1.0)
                    model(samples).backward()
                    norm = model.clip_grad_norm_(1.0, norm_type)
                    assert not torch.isfinite(norm), f"stage {stage}, {bad}: norm {norm}"
                    with pytest.raises(RuntimeError, match=r"nan|inf"):
                        model.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)


def test_bc06_a_bad_value_on_one_rank_is_in_everybodys_norm() -> None:
    """Fault of the same kind: one rank sees a finite norm where another sees NaN, and they part ways."""
    run_ranks(check_bad_values, 2)


def check_precise_norm() -> None:
    """Many equal elements: a sum of squares in fp32 over a flat buffer is off by far more than this."""
    elements = 3_000_000
    for stage in (0, 2):
        with variant(stage=stage) as strategy:
            weight = nn.Linear(1, elements, bias=False)
            model, _ = wrapped(weight, sgd, strategy)
            (model.weight * 0.1).sum().backward()
            norm = model.clip_grad_norm_(1.0)
            wanted = float(torch.tensor(0.1).double()) * math.sqrt(elements)
            assert abs(norm.item() / wanted - 1) < 1e-6


def test_bc06_the_norm_of_many_elements_is_exact() -> None:
    """Fault of the same kind: squares added in fp32 lose a percent over a large model."""
    run_ranks(check_precise_norm, 2)


MANY = 130_000_000


class OneGradient(nn.Module):
    """One weight, whose gradient is 0.1 everywhere. Its forward costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(MANY))

    def forward(self) -> torch.Tensor:
        return self.weight


def check_many_elements(stage: int) -> None:
    with variant(stage=stage) as strategy:
        model, _ = wrapped(OneGradient(), sgd, strategy)
        tenth = torch.tensor(0.1)
        model().backward(tenth.expand(MANY))
        wanted = float(tenth.double()) * math.sqrt(MANY)
        for _ in range(2):
            norm = model.clip_grad_norm_(math.inf)
            assert abs(norm.item() / wanted - 1) < 1e-6, f"norm {norm.item()}, not {wanted}"
        if dist.get_world_size() == 1:
            # What the blocks of fp64 sums are for: torch's own norm of the same gradient loses a percent.
            model.zero_grad()
            plain = torch.linalg.vector_norm(torch.full((MANY,), 0.1)).item()
            assert abs(plain / wanted - 1) > 1e-3


@pytest.mark.slow
def test_bc06_the_norm_of_a_hundred_million_elements_is_exact() -> None:
    """Fault of the same kind: squares added in fp32 stop growing, and the clip lets too much through."""
    run_ranks(check_many_elements, 1, 0)


@pytest.mark.full
def test_bc06_the_norm_of_a_hundred_million_elements_is_exact_over_shards() -> None:
    """The same over two ranks; apart from the default run for its memory, of about 2 GB a rank."""
    run_ranks(check_many_elements, 2, 1)
