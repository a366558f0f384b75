"""What `hybrid calibrate` measured on a machine, as it stands under `measured` in a cluster file.

Every part may be missing: then the planner's own constants count. A `spread` is that of the windows of a measurement on
all ranks, from the 10th to the 90th percentile, over their median.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from datetime import date as Date
from itertools import pairwise
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictStr

__all__ = [
    "AttentionPoint",
    "CollectiveCurve",
    "CollectivePoint",
    "Day",
    "Launch",
    "Machine",
    "MatmulPoint",
    "Measurements",
    "PointwisePoint",
    "Seconds",
    "Spread",
    "StepCosts",
]


def _day(value: object) -> object:
    """YAML reads a date without quotes as one."""
    return value.isoformat() if type(value) is Date else value


def _checked_day(value: str) -> str:
    try:
        Date.fromisoformat(value)
    except ValueError:
        raise ValueError(f"{value!r} is no day; write it as 2026-11-30") from None
    return value


# Beyond these bounds a figure is a slip of the hand, and what is computed from it no longer a number.
Count = Annotated[int, Field(strict=True, ge=1, le=2**50)]
Seconds = Annotated[float, Field(strict=True, ge=1e-12, le=1e6, allow_inf_nan=False)]
MaybeSeconds = Annotated[float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, ge=1.0, le=1e18, allow_inf_nan=False)]
Bytes = Annotated[float, Field(strict=True, ge=1.0, le=1e18, allow_inf_nan=False)]
Factor = Annotated[float, Field(strict=True, ge=1e-6, le=1e6, allow_inf_nan=False)]
Spread = Annotated[float, Field(strict=True, ge=0, le=1e4, allow_inf_nan=False)]
Load = Annotated[float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)]
Day = Annotated[StrictStr, BeforeValidator(_day), AfterValidator(_checked_day)]
Dtype = Literal["fp32", "bf16", "fp16"]


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MatmulPoint(_Value):
    """One product `[m, k] · [k, n]`; `is_weight`: of a weight gradient, whose k are the rows of the batch."""

    m: Count
    k: Count
    n: Count
    dtype: Dtype
    is_weight: StrictBool = False
    seconds: Seconds
    spread: Spread = 0.0


class AttentionPoint(_Value):
    """torch's fused attention with a causal mask."""

    batch: Count
    heads: Count
    seq: Count
    head_dim: Count
    dtype: Dtype
    is_backward: StrictBool
    seconds: Seconds
    spread: Spread = 0.0


class PointwisePoint(_Value):
    """Additions, norms and activation functions that read and write so many bytes each."""

    num_bytes: Count
    bytes_per_second: Rate
    spread: Spread = 0.0


class Launch(_Value):
    """Of an operation that has nothing to compute, with autograd and the call of its module."""

    forward_seconds: Seconds
    backward_factor: Factor
    spread: Spread = 0.0


class StepCosts(_Value):
    """What `train_batch` takes beside the model: per step, and per micro-batch and direction."""

    step_seconds: MaybeSeconds
    micro_batch_seconds: MaybeSeconds
    spread: Spread = 0.0


class CollectivePoint(_Value):
    """`num_bytes` of the whole value."""

    num_bytes: Count
    seconds: Seconds
    spread: Spread = 0.0


def _different(points: tuple[Any, ...], keys: Iterable[Hashable]) -> tuple[Any, ...]:
    """A ValueError where two measurements of the same contradict each other."""
    seen: dict[Hashable, int] = {}
    for number, key in enumerate(keys):
        if key in seen:
            raise ValueError(f"entries {seen[key]} and {number} are of the same ({key}): take one of them out")
        seen[key] = number
    return points


def _by_bytes(points: tuple[Any, ...]) -> tuple[Any, ...]:
    return _different(points, (f"num_bytes {one.num_bytes}" for one in points))


def _by_product(points: tuple[MatmulPoint, ...]) -> tuple[MatmulPoint, ...]:
    names = (f"{one.m} · {one.k} · {one.n} {one.dtype}{' is_weight' * one.is_weight}" for one in points)
    return _different(points, names)


def _by_attention(points: tuple[AttentionPoint, ...]) -> tuple[AttentionPoint, ...]:
    return _different(
        points,
        (
            f"{one.batch} · {one.heads} · {one.seq} · {one.head_dim} {one.dtype}{' is_backward' * one.is_backward}"
            for one in points
        ),
    )


def _by_group(curves: tuple[CollectiveCurve, ...]) -> tuple[CollectiveCurve, ...]:
    return _different(curves, (f"{one.kind} over {one.size}, {one.stride} apart" for one in curves))


def _ascending(values: tuple[float, float, float]) -> tuple[float, float, float]:
    if any(low > high for low, high in pairwise(values)):
        raise ValueError(f"{list(values)} is not least, median and most: give them in ascending order")
    return values


class CollectiveCurve(_Value):
    """Of all groups of `size` ranks, `stride` apart, at once; `send` goes from one rank of a pair to the other."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "send"]
    size: Annotated[int, Field(strict=True, ge=2, le=2**24)]
    stride: Count
    points: Annotated[tuple[CollectivePoint, ...], Field(min_length=1), AfterValidator(_by_bytes)]


class Machine(_Value):
    """Where it was measured.

    Args:
        hosts: names, in the order of their ranks.
        processor: model, as the system calls it.
        cores: of a host, that its ranks may use.
        ranks_per_host: that were measured together: with more ranks than cores each has a part of a core.
        threads_per_rank: of torch, as a launcher gives them out.
        accelerator: model; None where the ranks compute on the processors.
        backend: of the collectives.
    """

    hosts: Annotated[tuple[str, ...], Field(min_length=1)]
    processor: str
    cores: Count
    ranks_per_host: Count
    threads_per_rank: Count = 1
    accelerator: str | None = None
    backend: Literal["gloo", "nccl"]


class Measurements(_Value):
    """One run of `hybrid calibrate`.

    Args:
        date: of the run.
        torch: its version.
        seconds: that measuring took.
        load: processes that wanted a core before the run began, on average over a minute; beyond the cores' number they
            were in its way.
        machine: where.
        optimizer_bytes_per_second: of norm, clipping and AdamW, by the traffic that the planner counts.
        context_bytes: least, median and most that a process had before it trained.
    """

    date: Day
    torch: str
    seconds: MaybeSeconds
    load: Load = 0.0
    machine: Machine
    matmul: Annotated[tuple[MatmulPoint, ...], AfterValidator(_by_product)] = ()
    attention: Annotated[tuple[AttentionPoint, ...], AfterValidator(_by_attention)] = ()
    pointwise: Annotated[tuple[PointwisePoint, ...], AfterValidator(_by_bytes)] = ()
    optimizer_bytes_per_second: Rate | None = None
    launch: Launch | None = None
    step: StepCosts | None = None
    context_bytes: Annotated[tuple[Bytes, Bytes, Bytes], AfterValidator(_ascending)] | None = None
    collectives: Annotated[tuple[CollectiveCurve, ...], AfterValidator(_by_group)] = ()

    @property
    def source(self) -> str:
        """For whoever reads a figure."""
        hosts = self.machine.hosts
        return f"hybrid calibrate on {hosts[0]}" + (f" and {len(hosts) - 1} more" if len(hosts) > 1 else "")

    @property
    def spread(self) -> float:
        """The median of all."""
        found = [one.spread for curve in self.collectives for one in curve.points]
        found += [one.spread for one in self.matmul]
        found += [one.spread for one in self.attention]
        found += [one.spread for one in self.pointwise]
        return median(found) if found else 0.0

    def to_dict(self) -> Mapping[str, Any]:
        """Plain data, for YAML."""
        return self.model_dump(mode="json", exclude_defaults=True)
