"""What `hybrid calibrate` measured on a machine, as it stands under `measured` in a cluster file.

Every part may be missing: then the planner's own constants count. A `spread` is that of the windows of a measurement on
all ranks, from the 10th to the 90th percentile, over their median.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "AttentionPoint",
    "CollectiveCurve",
    "CollectivePoint",
    "Launch",
    "Machine",
    "MatmulPoint",
    "Measurements",
    "PointwisePoint",
    "StepCosts",
]

Count = Annotated[int, Field(ge=1)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeast0 = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Dtype = Literal["fp32", "bf16", "fp16"]


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MatmulPoint(_Value):
    """One product `[m, k] · [k, n]`; `is_weight`: of a weight gradient, whose k are the rows of the batch."""

    m: Count
    k: Count
    n: Count
    dtype: Dtype
    is_weight: bool = False
    seconds: Above0
    spread: AtLeast0 = 0.0


class AttentionPoint(_Value):
    """torch's fused attention with a causal mask."""

    batch: Count
    heads: Count
    seq: Count
    head_dim: Count
    dtype: Dtype
    is_backward: bool
    seconds: Above0
    spread: AtLeast0 = 0.0


class PointwisePoint(_Value):
    """Additions, norms and activation functions that read and write so many bytes each."""

    num_bytes: Count
    bytes_per_second: Above0
    spread: AtLeast0 = 0.0


class Launch(_Value):
    """Of an operation that has nothing to compute, with autograd and the call of its module."""

    forward_seconds: Above0
    backward_factor: Above0
    spread: AtLeast0 = 0.0


class StepCosts(_Value):
    """What `train_batch` takes beside the model: per step, and per micro-batch and direction."""

    step_seconds: AtLeast0
    micro_batch_seconds: AtLeast0
    spread: AtLeast0 = 0.0


class CollectivePoint(_Value):
    """`num_bytes` of the whole value."""

    num_bytes: Count
    seconds: Above0
    spread: AtLeast0 = 0.0


class CollectiveCurve(_Value):
    """Of all groups of `size` ranks, `stride` apart, at once; `send` goes from one rank of a pair to the other."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "send"]
    size: Annotated[int, Field(ge=2)]
    stride: Count
    points: Annotated[tuple[CollectivePoint, ...], Field(min_length=1)]


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

    date: str
    torch: str
    seconds: AtLeast0
    load: AtLeast0 = 0.0
    machine: Machine
    matmul: tuple[MatmulPoint, ...] = ()
    attention: tuple[AttentionPoint, ...] = ()
    pointwise: tuple[PointwisePoint, ...] = ()
    optimizer_bytes_per_second: Above0 | None = None
    launch: Launch | None = None
    step: StepCosts | None = None
    context_bytes: tuple[Above0, Above0, Above0] | None = None
    collectives: tuple[CollectiveCurve, ...] = ()

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
