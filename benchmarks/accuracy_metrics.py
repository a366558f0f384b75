"""How far predictions are from measurements: errors, order, gains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Errors", "errors_of", "percentile", "spearman"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """In percent of the measurement.

    Args:
        count: of points.
        median, p90, worst: of the absolute error.
        bias: median of the signed error: above 0 is predicted slower than measured.
    """

    count: int
    median: float
    p90: float
    worst: float
    bias: float


def errors_of(pairs: Sequence[tuple[float, float]]) -> Errors | None:
    """`pairs`: (predicted, measured); None without any."""
    if not pairs:
        return None
    signed = [100.0 * (predicted / measured - 1.0) for predicted, measured in pairs]
    sizes = [abs(error) for error in signed]
    return Errors(
        count=len(pairs), median=median(sizes), p90=percentile(sizes, 90), worst=max(sizes), bias=median(signed)
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks; equal values share the mean of their ranks. 0 where one side does not vary."""
    one, two = _ranks(first), _ranks(second)
    mean = (len(one) - 1) / 2
    both = sum((a - mean) * (b - mean) for a, b in zip(one, two, strict=True))
    spread = math.sqrt(sum((a - mean) ** 2 for a in one) * sum((b - mean) ** 2 for b in two))
    return both / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or values[order[end]] != values[order[start]]:
            for place in range(start, end):
                ranks[order[place]] = (start + end - 1) / 2
            start = end
    return ranks
