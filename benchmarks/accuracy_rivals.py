"""Other simulators' predictions of the same runs."""

from __future__ import annotations

import csv
from collections.abc import Sequence

from benchmarks.accuracy_metrics import Errors, errors_of
from benchmarks.accuracy_rows import DATA, Point

__all__ = ["rival_errors"]

_NAMES = {"korthikanti": "Calculon", "simumax": "SimuMax"}


def rival_errors(dataset: str, rows: Sequence[Point]) -> tuple[dict[str, Errors], frozenset[str]]:
    """Errors by simulator, and the rows (ids) that they have predicted."""
    if dataset == "sailor":
        return _sailor(rows)
    pairs = {row.id: (row.rival_seconds, row.seconds) for row in rows if row.rival_seconds}
    errors = errors_of(list(pairs.values()))
    return ({_NAMES[dataset]: errors} if errors else {}), frozenset(pairs)


def _sailor(rows: Sequence[Point]) -> tuple[dict[str, Errors], frozenset[str]]:
    """Sailor's own, and its authors' re-implementations of the others."""
    with (DATA / "accuracy_rivals.csv").open(encoding="utf-8") as file:
        records = list(csv.DictReader(line for line in file if not line.startswith("#")))
    pairs: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        pairs.setdefault(record["simulator"], []).append((float(record["predicted_seconds"]), float(record["seconds"])))
    found = {name: errors_of(listed) for name, listed in pairs.items()}
    return {name: errors for name, errors in found.items() if errors}, frozenset(row.id for row in rows)
