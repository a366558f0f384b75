"""What a dry run found, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["KINDS", "Difference", "DryRun", "LocalParameter", "RankDryRun", "Traffic"]

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "parameters": "whole buckets of the parameters that compute (stage 3: while they are gathered)",
        "parameter_shards": "own shards of the parameters, stage 3",
        "masters": "fp32 copies of the own shards",
        "gradients": "whole buckets of gradients",
        "gradient_shards": "own shards of reduced gradients: the accumulators",
        "optimizer_state": "what the optimizer keeps, without its counters",
        "bookkeeping": "an element that stands for each gradient, counters of the optimizer",
        "buffers": "the model's own buffers",
    }
)
"""Kind of state -> what it is. With offload, kinds in host memory have `host_` in front."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParameter:
    """One parameter on one rank.

    Args:
        fqn: in the user's model.
        global_shape, local_shape: whole, and what tensor parallel leaves here.
        dtype: in which it computes here.
        bucket: its place in the launch order of gradients; None in no bucket (frozen, below stage 3).
        own: elements `[start, stop)` of the local parameter that this rank updates; None: nothing of it.
        trainable: whether it has a gradient.
    """

    fqn: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    bucket: int | None
    own: tuple[int, int] | None
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """All collectives of one kind over one axis, in one step of one rank.

    Args:
        axis: of the group: `dp_shard`, `tp`, `pp_forward`, `dp_replicate+dp_shard`, ...
        op: `all_reduce`, `reduce_scatter`, `all_gather`, `broadcast`, `send`.
        group_size: ranks of the group.
        calls: how many.
        payload_bytes: of the buffers.
        sent_bytes: that this rank sends, by the operation's own formula (a ring).
        is_control: counters, flags and checks: no part of the training state or of activations.
    """

    axis: str
    op: str
    group_size: int
    calls: int
    payload_bytes: int
    sent_bytes: int
    is_control: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A figure that the planner predicts, and what the run gave.

    Args:
        what: which figure.
        planned, found: bytes, or units of each chunk.
    """

    what: str
    planned: Any
    found: Any

    @property
    def is_equal(self) -> bool:
        return bool(self.planned == self.found)


@dataclass(frozen=True, kw_only=True)
class RankDryRun:
    """One rank.

    Args:
        rank: of the world.
        coordinates: its place on each axis.
        stage: its pipeline stage, and `layers` the units that are there; 0 and all of them without a pipeline.
        parameters: what it holds, in the order of the model.
        bytes_by_point: moment of a step -> kind of state -> bytes; the moments are `after_wrap`, `between_backwards`
            (only with more than one micro-batch), `after_backward` (gradients reduced, before the update) and
            `after_step`.
        gathered_bytes: stage 3: the most that was whole at a time.
        traffic: collectives of one step.
        actions: forwards, backwards (and halves of them), reductions, gathers and the update, in the order in which
            they began.
        comparison: the planner's figures beside those of the run; empty where the planner does not know the model.
        notes: what was left out, and why.
        seconds: of the dry run.
    """

    rank: int
    coordinates: Mapping[str, int]
    stage: int
    layers: tuple[str, ...]
    parameters: tuple[LocalParameter, ...]
    bytes_by_point: Mapping[str, Mapping[str, int]]
    gathered_bytes: int
    traffic: tuple[Traffic, ...]
    actions: tuple[str, ...]
    comparison: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Where the planner and the run do not say the same."""
        return tuple(one for one in self.comparison if not one.is_equal)

    def sent_bytes(self, axis: str) -> int:
        """By this rank in a step over an axis, without control traffic."""
        return sum(one.sent_bytes for one in self.traffic if one.axis == axis and not one.is_control)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "rank": self.rank,
            "coordinates": dict(self.coordinates),
            "stage": self.stage,
            "layers": list(self.layers),
            "parameters": [asdict(one) for one in self.parameters],
            "bytes": {point: dict(kinds) for point, kinds in self.bytes_by_point.items()},
            "gathered_bytes": self.gathered_bytes,
            "traffic": [asdict(one) for one in self.traffic],
            "actions": list(self.actions),
            "comparison": [{**asdict(one), "is_equal": one.is_equal} for one in self.comparison],
            "notes": list(self.notes),
            "seconds": self.seconds,
        }


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """All ranks that were asked for.

    Args:
        world_size: of the job.
        layout: its degrees, in words.
        model: its class.
        ranks: in the order in which they were asked for.
        alike: rank -> how many ranks of the world hold and send the same; only where all distinct ranks were run.
    """

    world_size: int
    layout: str
    model: str
    ranks: tuple[RankDryRun, ...]
    alike: Mapping[int, int] | None = None

    def __getitem__(self, rank: int) -> RankDryRun:
        for one in self.ranks:
            if one.rank == rank:
                return one
        raise KeyError(f"rank {rank} was not run; {', '.join(str(one.rank) for one in self.ranks)} were")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "world_size": self.world_size,
            "layout": self.layout,
            "model": self.model,
            "ranks": [one.to_dict() for one in self.ranks],
            "alike": None if self.alike is None else {str(rank): count for rank, count in self.alike.items()},
        }
