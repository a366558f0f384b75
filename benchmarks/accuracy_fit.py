"""Fits constants of `hybrid/planner/data/software.yaml` on the fit part of the published runs.

Shared constants stand in the set that others extend, so one value serves all data sets of that software. The search is
Nelder and Mead's simplex on the logarithms of the constants, reflected at their bounds; what is minimised is the mean
over data sets of the mean absolute logarithm of predicted to measured seconds: large errors count linearly, so that
outliers of a measurement do not steer it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import yaml

from benchmarks.accuracy_rows import Point
from hybrid.planner.cost import step_time
from hybrid.planner.software import Software, software_of

__all__ = ["Overrides", "Parameter", "fitted", "loss_of", "predicted_seconds", "software_with"]

# A constant that the points say nothing about stays where it was: the whole way between its bounds costs 5 % of error.
_PRIOR = 0.05

Overrides = Mapping[tuple[str, str], float]
"""(set, constant) -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One constant that may move, between bounds that its meaning gives."""

    software: str
    constant: str
    low: float
    high: float

    @property
    def key(self) -> tuple[str, str]:
        return self.software, self.constant

    def value(self, place: float) -> float:
        """`place` runs over the reals; one period is twice the way from `low` to `high`, there and back."""
        share = abs((place + 1.0) % 2.0 - 1.0)
        return self.low * (self.high / self.low) ** share

    def place(self, value: float) -> float:
        share = math.log(max(value, 1e-30) / self.low) / math.log(self.high / self.low)
        return min(max(share, 0.02), 0.98)


def predicted_seconds(point: Point, software: Software | None = None) -> float:
    """Of the layout that ran; of the fastest where the source leaves some of it open."""
    job = replace(point.job, software=software) if software is not None else point.job
    return min(step_time(job, candidate).total_seconds for candidate in point.candidates)


def software_with(name: str, overrides: Overrides) -> Software:
    """The set of this name, with other values for some of its own and inherited constants."""
    sets = _sets()
    chain = [name]
    while parent := sets[chain[-1]].get("extends"):
        chain.append(parent)
    values: dict[str, float] = {}
    for link in reversed(chain):
        values |= {constant: float(entry["value"]) for constant, entry in sets[link].items() if constant != "extends"}
        values |= {constant: value for (owner, constant), value in overrides.items() if owner == link}
    known = {item.name for item in fields(Software)}
    assert values.keys() <= known, values.keys() - known
    return replace(software_of(name), **values)


@cache
def _sets() -> dict[str, dict[str, Any]]:
    text = files("hybrid.planner").joinpath("data/software.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def loss_of(points: Sequence[Point], overrides: Overrides) -> float:
    """Each data set counts alike, whatever its number of points."""
    sets: dict[str, list[float]] = {}
    chosen: dict[str, Software] = {}
    for point in points:
        name = str(point.job.software)
        if name not in chosen:
            chosen[name] = software_with(name, overrides)
        error = abs(math.log(predicted_seconds(point, chosen[name]) / point.seconds))
        sets.setdefault(point.dataset, []).append(error)
    return sum(sum(errors) / len(errors) for errors in sets.values()) / len(sets)


def fitted(
    points: Sequence[Point], parameters: Sequence[Parameter], given: Overrides, *, evaluations: int
) -> dict[tuple[str, str], float]:
    """Values of the parameters with the least loss on these points; other constants as `given` or in the file."""
    start = [p.place(getattr(software_with(p.software, given), p.constant)) for p in parameters]

    def loss(place: np.ndarray) -> float:
        values = {p.key: p.value(x) for p, x in zip(parameters, place, strict=True)}
        return loss_of(points, {**given, **values}) + _PRIOR * float(np.sum((place - start) ** 2))

    best = _simplex(loss, np.array(start), evaluations=evaluations)
    return {p.key: p.value(float(x)) for p, x in zip(parameters, best, strict=True)}


def _simplex(loss: Callable[[np.ndarray], float], start: np.ndarray, *, evaluations: int) -> np.ndarray:
    """Nelder and Mead, The Computer Journal 7 (1965) 308."""
    corners = [start] + [start + 0.2 * np.eye(len(start))[i] for i in range(len(start))]
    ranked = sorted((loss(corner), tuple(corner)) for corner in corners)
    used = len(ranked)
    while used < evaluations and ranked[-1][0] - ranked[0][0] > 1e-5:
        centre = np.mean([corner for _, corner in ranked[:-1]], axis=0)
        worst = np.array(ranked[-1][1])

        def tried(
            step: float, centre: np.ndarray = centre, worst: np.ndarray = worst
        ) -> tuple[float, tuple[float, ...]]:
            corner = centre + step * (centre - worst)
            return loss(corner), tuple(corner)

        new = tried(1.0)
        used += 1
        if new[0] < ranked[0][0]:
            new = min(new, tried(2.0))
            used += 1
        elif new[0] >= ranked[-2][0]:
            new = min(new, tried(-0.5))
            used += 1
        if new[0] < ranked[-1][0]:
            ranked = sorted([*ranked[:-1], new])
            continue
        best = np.array(ranked[0][1])
        shrunk = [best + 0.5 * (np.array(corner) - best) for _, corner in ranked[1:]]
        ranked = sorted([ranked[0], *((loss(corner), tuple(corner)) for corner in shrunk)])
        used += len(shrunk)
    return np.array(ranked[0][1])
