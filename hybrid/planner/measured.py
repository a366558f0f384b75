"""Measurements of a machine (`hybrid calibrate`) in the planner's formulas.

    time = formula · (measured / formula at the points that were measured)

Between points the logarithm of that ratio is a mean, weighted with the inverse fourth power of the distance in the
logarithms of the sizes; outside of what was measured that of the nearest edge counts. So a measured shape takes the
measured time, the formula gives the way from one to the next, and links or devices that are changed afterwards
(sensitivities) change the time as they would without measurements. A collective's time goes in a line from one
measured size to the next. Pointwise work has no formula: its rate by size is the measured one. Host costs replace
those of the software: `measured_software`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hybrid.contracts.cluster import DeviceKind, GroupLinks
from hybrid.contracts.measurements import AttentionPoint, MatmulPoint, Measurements
from hybrid.planner.kept import Kept
from hybrid.planner.software import Constant, Software

__all__ = [
    "MeasuredCollective",
    "MeasuredCollectives",
    "attention_factor",
    "matmul_factor",
    "measured_software",
    "pointwise_rate",
]

_POWER = 4
# Where a kind of product was not measured: the kind whose ratio stands for it.
_STANDS_FOR = {"fp16": "bf16", "bf16": "fp16"}


@dataclass(frozen=True, slots=True)
class _Ratios:
    """Logarithms of sizes -> logarithm of measured over formula."""

    places: tuple[tuple[float, ...], ...]
    logs: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def of(cls, sizes: Sequence[tuple[float, ...]], ratios: Sequence[float]) -> _Ratios:
        places = tuple(tuple(math.log2(size) for size in one) for one in sizes)
        return cls(
            places=places,
            logs=tuple(map(math.log, ratios)),
            low=tuple(map(min, zip(*places, strict=True))),
            high=tuple(map(max, zip(*places, strict=True))),
        )

    def factor(self, *sizes: float) -> float:
        """At these sizes."""
        place = [
            min(max(math.log2(size), low), high) for size, low, high in zip(sizes, self.low, self.high, strict=True)
        ]
        total = weights = 0.0
        for there, log in zip(self.places, self.logs, strict=True):
            distance = sum((a - b) ** 2 for a, b in zip(place, there, strict=True))
            if distance < 1e-12:
                return math.exp(log)
            weight = distance ** (-_POWER / 2)
            total += weight * log
            weights += weight
        return math.exp(total / weights)


_MATMULS: Kept[dict[tuple[str, bool], _Ratios]] = Kept(8)
_ATTENTIONS: Kept[dict[bool, _Ratios]] = Kept(8)
_RATES: Kept[_Ratios | None] = Kept(8)


def matmul_factor(
    device: DeviceKind,
    formula: Callable[[DeviceKind, MatmulPoint], float],
    *,
    m: float,
    k: float,
    n: float,
    dtype: str,
    is_weight: bool,
) -> float:
    """Of a product; 1 where none was measured.

    Args:
        formula: seconds of a product on the device as it was measured.
    """
    measured = device.measured
    if measured is None or not measured.points.matmul:
        return 1.0

    def make() -> dict[tuple[str, bool], _Ratios]:
        groups: dict[tuple[str, bool], list[MatmulPoint]] = {}
        for point in measured.points.matmul:
            groups.setdefault((point.dtype, point.is_weight), []).append(point)
        return {
            key: _Ratios.of(
                [(point.m, point.k, point.n) for point in points],
                [point.seconds / formula(measured.base, point) for point in points],
            )
            for key, points in groups.items()
        }

    known = _MATMULS.get(measured, make=make)
    for kind in (dtype, _STANDS_FOR.get(dtype, dtype)):
        found = known.get((kind, is_weight)) or known.get((kind, not is_weight))
        if found is not None:
            return found.factor(m, k, n)
    return 1.0


def attention_factor(
    device: DeviceKind,
    formula: Callable[[DeviceKind, AttentionPoint], float],
    *,
    rows: float,
    seq: float,
    head_dim: float,
    is_backward: bool,
) -> float:
    """Of fused attention; `rows`: heads of all samples. 1 where none was measured."""
    measured = device.measured
    if measured is None or not measured.points.attention:
        return 1.0

    def make() -> dict[bool, _Ratios]:
        groups: dict[bool, list[AttentionPoint]] = {}
        for point in measured.points.attention:
            groups.setdefault(point.is_backward, []).append(point)
        return {
            key: _Ratios.of(
                [(point.batch * point.heads, point.seq, point.head_dim) for point in points],
                [point.seconds / formula(measured.base, point) for point in points],
            )
            for key, points in groups.items()
        }

    found = _ATTENTIONS.get(measured, make=make).get(is_backward)
    return 1.0 if found is None else found.factor(rows, seq, head_dim)


def pointwise_rate(device: DeviceKind, num_bytes: float) -> float:
    """Bytes per second of pointwise kernels that read and write so many bytes each; without measurements that of the
    memory."""
    measured = device.measured
    if measured is None or not measured.points.pointwise:
        return device.memory_bytes_per_second

    def make() -> _Ratios:
        points = measured.points.pointwise
        return _Ratios.of([(one.num_bytes,) for one in points], [one.bytes_per_second for one in points])

    rates = _RATES.get(measured, make=make)
    assert rates is not None  # there are points
    faster = device.memory_bytes_per_second / measured.base.memory_bytes_per_second
    return rates.factor(max(1.0, num_bytes)) * faster


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """One kind of collective on groups with these links; `points`: (bytes, seconds), ascending."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "send"]
    links: GroupLinks
    points: tuple[tuple[float, float], ...]

    def seconds(self, num_bytes: float) -> float:
        """A line from each size to the next; below the smallest as long as that."""
        after = bisect_left(self.points, (num_bytes,))
        if after == 0:
            return self.points[0][1]
        (low, before), (high, behind) = self.points[after - 1 : after + 1]
        return before + (behind - before) * (num_bytes - low) / (high - low)

    def distance(self, kind: str, links: GroupLinks) -> tuple[float, ...]:
        """How unlike a collective is, first of all in what matters most."""
        own = self.links
        return (
            float((own.num_domains > 1) != (links.num_domains > 1)),
            float(self.kind != kind),
            abs(math.log2(own.size / links.size)) + abs(math.log2(own.ranks_per_domain / links.ranks_per_domain)),
        )


class MeasuredCollectives:
    """All that were measured; of groups that were not, the nearest stands for them.

    formula: seconds of one of them at a size, without measurements.
    """

    def __init__(
        self,
        curves: Sequence[MeasuredCollective] = (),
        formula: Callable[[MeasuredCollective, float], float] = lambda curve, num_bytes: 1.0,
    ) -> None:
        self._curves, self._formula = tuple(curves), formula
        self._nearest: dict[tuple[str, GroupLinks], MeasuredCollective] = {}

    def factor(self, kind: str, num_bytes: float, links: GroupLinks) -> float:
        """Measured over formula, of the nearest that was measured; 1 where nothing was. Beyond the largest size as at
        that."""
        if not self._curves:
            return 1.0
        key = (kind, links)
        if key not in self._nearest:
            self._nearest[key] = min(self._curves, key=lambda curve: curve.distance(kind, links))
        nearest = self._nearest[key]
        size = min(num_bytes, nearest.points[-1][0])
        return nearest.seconds(size) / self._formula(nearest, size)


def measured_software(base: Software, measured: Measurements, device: DeviceKind) -> Software:
    """The stack's constants, as far as they were measured on the device: what a launch, a step and a micro-batch cost
    the host, how fast the optimizer is.

    Latencies of collectives are in their curves, losses of memory bandwidth in the rates of pointwise work, so that
    these constants are neutral.
    """
    values: dict[str, tuple[float, str]] = {}
    if measured.launch is not None:
        values["launch_seconds"] = measured.launch.forward_seconds, "seconds"
        values["backward_launch_factor"] = measured.launch.backward_factor, "forwards"
        # On a processor the thread that launches an operation also computes it.
        values["is_launch_ahead"] = float(measured.machine.accelerator is not None), "flag"
    if measured.step is not None:
        values["step_seconds"] = measured.step.step_seconds, "seconds"
        values["micro_batch_seconds"] = measured.step.micro_batch_seconds, "seconds"
    if measured.optimizer_bytes_per_second is not None:
        rate = measured.optimizer_bytes_per_second / device.memory_bytes_per_second
        values["optimizer_memory_fraction"] = rate, "fraction"
    if measured.pointwise:
        values["memory_fraction"] = 1.0, "fraction"
    if measured.collectives:
        values["collective_seconds"] = 0.0, "seconds"
        values["collective_fraction"] = 1.0, "fraction"
    sources = {
        name: Constant(value=value, unit=unit, source=measured.source, date=measured.date, fitted_on="")
        for name, (value, unit) in values.items()
    }
    return replace(
        base,
        name=f"{base.name}-measured",
        sources={**base.sources, **sources},
        **{name: value for name, (value, _) in values.items()},
    )
