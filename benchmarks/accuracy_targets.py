"""What the project wants of its predictions, beside what they are: one line per bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.accuracy_memory import memory_errors, sources
from benchmarks.accuracy_rows import SETTINGS

if TYPE_CHECKING:
    from benchmarks.planner_accuracy import Result

__all__ = ["Target", "memory_targets", "target_table", "time_targets"]

# Of published runs, in percent: the 90th percentile of the error in time, by how much memory may be told too low, in
# which share of the runs; points by which the gain of sharding inside a node may be missed; the least correlation of
# ranks.
_P90, _UNDER_SHARE, _GAIN_POINTS, _CORRELATION = 25.0, 5.0, 10.0, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Args:
    dataset: key of `SETTINGS` or of `accuracy_memory`.
    what: that is bounded.
    bound, found: in its unit.
    is_least: `found` must not be below `bound`, where otherwise it must not be above.
    """

    dataset: str
    what: str
    bound: float
    found: float
    is_least: bool = False

    @property
    def holds(self) -> bool:
        return self.found >= self.bound if self.is_least else self.found <= self.bound


def time_targets(results: Sequence[Result]) -> Iterator[Target]:
    """Of step times; the order of layouts per data set and over all cells of all of them."""
    for result in results:
        limit = SETTINGS[result.dataset].limit
        if limit is not None:
            yield Target(dataset=result.dataset, what="time, median %", bound=limit, found=result.all.median)
        if SETTINGS[result.dataset].is_bounded:
            yield Target(dataset=result.dataset, what="time, p90 %", bound=_P90, found=result.all.p90)
        if result.gain_difference is not None:
            yield Target(
                dataset=result.dataset, what="gain inside nodes, points", bound=_GAIN_POINTS,
                found=result.gain_difference,
            )  # fmt: skip
    ordered = {
        result.dataset: (result.rank_correlation, result.num_cells)
        for result in results
        if result.rank_correlation is not None and SETTINGS[result.dataset].is_bounded
    }
    if len(ordered) > 1:
        ordered["all"] = _mean(ordered)
    for dataset, (correlation, num_cells) in ordered.items():
        yield Target(
            dataset=dataset, what=f"order of layouts, {num_cells} cells", bound=_CORRELATION, found=correlation,
            is_least=True,
        )  # fmt: skip


def memory_targets() -> Iterator[Target]:
    """Of memory: the median error, and the share of runs that are told more than 5 % too little."""
    for dataset, source in sources().items():
        errors, under = memory_errors(dataset)
        assert errors is not None
        yield Target(dataset=dataset, what="memory, median %", bound=source.limit, found=errors.median)
        yield Target(dataset=dataset, what="memory, % of runs too low", bound=_UNDER_SHARE, found=100 * under)


def target_table(targets: Sequence[Target]) -> Table:
    """All bounds; those that do not hold are marked."""
    table = Table(title="Bounds", title_justify="left")
    for name in ("data set", "what", "bound", "found", ""):
        table.add_column(name, justify="left" if name in {"data set", "what", ""} else "right")
    for one in targets:
        digits = 2 if one.is_least else 1
        sign = "≥" if one.is_least else "≤"
        mark = "" if one.holds else "missed"
        table.add_row(one.dataset, one.what, f"{sign} {one.bound:g}", f"{one.found:.{digits}f}", mark)
    return table


def _mean(ordered: Mapping[str, tuple[float, int]]) -> tuple[float, int]:
    count = sum(num_cells for _, num_cells in ordered.values())
    return sum(correlation * num_cells for correlation, num_cells in ordered.values()) / count, count
