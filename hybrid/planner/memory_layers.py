"""From tensors to what the device has to have: the allocator's pool, the context and the communicators, as intervals.

    tensors       live bytes at the fullest moment                     memory.py
    reserved      what the allocator keeps for them: fragmentation
    device        with the context of the process and one NCCL communicator per group of ranks

An interval's ends are the 5th and the 95th percentile. What is independent adds up in squares. The constants, each with
its source, are in `data/memory.yaml`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

from hybrid.planner.data_file import read_data_file
from hybrid.planner.job import Candidate

__all__ = ["FrameworkProfile", "Interval", "device_bytes", "framework_profile", "num_communicators", "reserved_bytes"]

# Standard deviations between the median and the 95th percentile of a normal distribution.
_NORMAL = NormalDist()
_SIGMAS = _NORMAL.inv_cdf(0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """5th percentile, median and 95th percentile."""

    low: float
    expected: float
    high: float

    def __add__(self, other: Interval) -> Interval:
        """Of the sum of two that do not depend on each other."""
        expected = self.expected + other.expected
        return Interval(
            low=expected - math.hypot(self.expected - self.low, other.expected - other.low),
            expected=expected,
            high=expected + math.hypot(self.high - self.expected, other.high - other.expected),
        )

    def times(self, factor: float) -> Interval:
        """All of it, larger: the parts depend on each other entirely."""
        return Interval(low=self.low * factor, expected=self.expected * factor, high=self.high * factor)

    def chance_above(self, limit: float) -> float:
        """Chance that the value exceeds `limit`: two halves of normal distributions that meet in the median."""
        distance = limit - self.expected
        spread = (self.high - self.expected if distance >= 0 else self.expected - self.low) / _SIGMAS
        if spread <= 0:
            return float(distance < 0)
        return 0.5 * math.erfc(distance / spread / math.sqrt(2.0))

    def at_risk(self, risk: float) -> float:
        """The limit that is exceeded with this chance."""
        distance = _NORMAL.inv_cdf(1.0 - risk)
        return self.expected + distance / _SIGMAS * (
            self.high - self.expected if distance >= 0 else self.expected - self.low
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkProfile:
    """What a framework does otherwise; the entries of `frameworks` in `data/memory.yaml`."""

    logits_bytes: float
    keeps_gathered: bool
    keeps_sent: bool
    keeps_dummy_gradients: bool
    has_static_gradients: bool
    step_bytes: float
    step_bytes_cut: float
    constant_bytes: float
    source: str
    date: str
    step_bytes_masters: float = 0.0
    gathers_apart: bool = False


@lru_cache(maxsize=1)
def _constants() -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = read_data_file("memory.yaml")
    return loaded


@lru_cache(maxsize=64)
def framework_profile(software: str) -> FrameworkProfile:
    """By the name of the job's software: the longest name that it begins with; this framework where there is none."""
    frameworks = _constants()["frameworks"]
    name = max((name for name in frameworks if software.startswith(name)), key=len, default="hybrid")
    return FrameworkProfile(**frameworks[name])


@lru_cache(maxsize=16)
def _interval(layer: str, kind: str) -> Interval:
    entry = _constants()[layer][kind]
    return Interval(low=float(entry["low"]), expected=float(entry["expected"]), high=float(entry["high"]))


def reserved_bytes(tensors_bytes: float, *, is_processor: bool) -> Interval:
    """What the allocator keeps for so many bytes of tensors."""
    return _interval("allocator", _kind(is_processor)).times(tensors_bytes)


def device_bytes(
    reserved: Interval,
    communicators: int,
    *,
    is_processor: bool,
    context: tuple[float, float, float] | None = None,
) -> Interval:
    """What the device must have for it, in a process that communicates in so many groups.

    context: low, expected and high of the process before it trains, where that was measured.
    """
    kind = _kind(is_processor)
    groups = _interval("communicator", kind).times(communicators)
    if context is not None:
        return reserved + Interval(low=context[0], expected=context[1], high=context[2]) + groups
    return reserved + _interval("context", kind) + groups


def _kind(is_processor: bool) -> str:
    return "cpu" if is_processor else "cuda"


def num_communicators(candidate: Candidate) -> int:
    """Groups of more than one rank that a rank sends in: each has a communicator from its first use on.

    All ranks (norm, counters), those that share gradients and parameters, tp, cp, one per direction of a pipeline,
    experts and their copies; groups of the same ranks count once.
    """
    return _num_communicators(
        candidate.pp, candidate.dp_replicate, candidate.dp_shard, candidate.cp, candidate.tp, candidate.ep,
        candidate.zero_stage > 0,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _num_communicators(pp: int, dp_replicate: int, dp_shard: int, cp: int, tp: int, ep: int, is_cut: bool) -> int:
    sizes = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    data = ("dp_replicate", "dp_shard", "cp")
    wanted = [tuple(sizes), data, ("tp",), ("cp",)]
    if is_cut:
        wanted += [("dp_shard", "cp"), ("dp_replicate",)]
    # Groups of the same axes of more than one rank are the same ranks.
    groups = {frozenset(axis for axis in axes if sizes[axis] > 1) for axes in wanted} - {frozenset()}
    return len(groups) + 2 * (pp > 1) + (ep > 1) + (1 < ep < dp_replicate * dp_shard * cp)
