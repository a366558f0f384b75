"""Forward and backward of one layer beside Korthikanti et al., table 4."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.accuracy_rows import DATA, points
from hybrid.planner.cost import unit_seconds

__all__ = ["LayerTime", "layer_times"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """One experiment: (predicted, measured) milliseconds of a forward and of a backward with what it recomputes."""

    experiment: str
    forward: tuple[float, float]
    backward: tuple[float, float]


def layer_times() -> Iterator[LayerTime]:
    """In the order of the table."""
    run = next(point for point in points("korthikanti") if "22B" in point.id)
    with (DATA / "accuracy_layers.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            layout = replace(run.candidates[0], recompute=row["recompute"], sequence_parallel=row["sp"] == "1")
            seconds = unit_seconds(run.job, layout)[run.job.model.blocks[0].name]
            yield LayerTime(
                experiment=row["experiment"],
                forward=(1e3 * seconds.forward.total, float(row["forward_ms"])),
                backward=(1e3 * seconds.backward_total, float(row["backward_ms"])),
            )
