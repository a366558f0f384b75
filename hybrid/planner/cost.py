"""Seconds of one optimizer step of a layout, in parts that add up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hybrid.contracts.schedule_timing import Timeline
from hybrid.planner.job import Candidate, Job
from hybrid.planner.kept import Kept
from hybrid.planner.pricer import PARTS, Pricer
from hybrid.planner.unit_time import UnitSeconds

__all__ = [
    "PARTS",
    "StepTime",
    "least_base_seconds",
    "least_step_seconds",
    "step_time",
    "step_timeline",
    "unit_seconds",
    "work_seconds",
]

# What the names of `binding` stand for.
_BINDINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "compute": ("compute", "attention", "recompute"),
        "memory bandwidth": ("elementwise", "optimizer"),
        "host": ("host", "overhead"),
        "tp": ("tp_exposed",),
        "cp": ("cp_exposed",),
        "ep": ("ep_exposed",),
        "pp": ("pp_bubble", "pp_transfer"),
        "dp": ("dp_exposed", "gather_exposed"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Args:
    total_seconds: of a step.
    parts: seconds of the pipeline rank that is ready last; they add up to the total.
    stage_seconds: per pipeline rank: work on its micro-batches.
    timeline: of the schedule, where it was asked for (`step_timeline`).
    """

    parts: Mapping[str, float]
    stage_seconds: tuple[float, ...]
    timeline: Timeline | None = None
    total_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", MappingProxyType(dict(self.parts)))
        object.__setattr__(self, "total_seconds", math.fsum(self.parts.values()))

    @property
    def binding(self) -> str:
        """What takes most of the step: compute, memory bandwidth, host, tp, cp, ep, pp or dp."""
        return max(_BINDINGS, key=lambda name: sum(self.parts[part] for part in _BINDINGS[name]))


def step_time(job: Job, candidate: Candidate) -> StepTime:
    """Price a layout. Whether it fits into memory is not looked at."""
    priced = _pricer(job).price(candidate)
    return StepTime(parts=priced.parts, stage_seconds=priced.stage_seconds)


def least_step_seconds(job: Job, candidate: Candidate, *, is_played: bool) -> float:
    """Not more than `step_time`, much sooner where other ways to cut the state of the layout have been priced; and if
    not `is_played` without its schedule, sooner still."""
    return _pricer(job).least_seconds(candidate, is_played=is_played)


def least_base_seconds(job: Job, candidate: Candidate, *, is_played: bool) -> float:
    """Not more than `step_time` of any way to cut the state of the layout: from the work of its pipeline chunks, and if
    `is_played` from its schedule."""
    return _pricer(job).least_base_seconds(candidate, is_played=is_played)


def work_seconds(job: Job, candidate: Candidate) -> float:
    """Of a forward and a backward of one micro-batch through all units, as if one rank had them all."""
    return _pricer(job).work_seconds(candidate)


def step_timeline(job: Job, candidate: Candidate) -> Timeline:
    """The pipeline schedule on the clock, every action by name."""
    return _pricer(job).timeline(candidate)


def unit_seconds(job: Job, candidate: Candidate) -> dict[str, UnitSeconds]:
    """Name of a unit -> its forward and backward of one micro-batch on one rank, in parts."""
    return _pricer(job).units(candidate)


_PRICERS: Kept[Pricer] = Kept(16)


def _pricer(job: Job) -> Pricer:
    """The one of this very object: what it has worked out serves all candidates of a search."""
    return _PRICERS.get(job, make=lambda: Pricer(job))
