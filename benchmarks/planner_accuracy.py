"""Step times that the planner foretells beside published runs: `python -m benchmarks.planner_accuracy`.

One table per data set: the rows that constants were fitted on, the rows held out, another simulator's errors on the
same rows where it has published them, and whether layouts of one model on one machine come out in the right order.
At the end what the project wants of them and of memory, line by line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.accuracy_fit import predicted_seconds
from benchmarks.accuracy_metrics import Errors, errors_of, spearman
from benchmarks.accuracy_refit import leave_one_out, refit
from benchmarks.accuracy_rivals import rival_errors
from benchmarks.accuracy_rows import SETTINGS, Point, datasets, points
from benchmarks.accuracy_targets import memory_targets, target_table, time_targets

__all__ = ["Result", "result_of"]

# Fewer layouts than this have no order worth the name.
_LEAST_CELL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One data set.

    Args:
        dataset: its key.
        all, fit, held: errors over all rows, over those that constants were fitted on, over the others.
        rivals: name -> errors of another simulator on those of the same rows that it has predicted.
        own_on_rivals: our errors on those rows.
        rank_correlation: mean over cells of Spearman's correlation of predicted and measured seconds; None without.
        num_cells: model, machine, batch with at least 3 layouts.
        gain_difference: largest difference, in points of percent, between the predicted and the measured gain of
            sharding inside nodes over sharding over all devices; None where no rows tell.
    """

    dataset: str
    all: Errors
    fit: Errors | None
    held: Errors | None
    rivals: dict[str, Errors]
    own_on_rivals: Errors | None
    rank_correlation: float | None
    num_cells: int
    gain_difference: float | None


def result_of(dataset: str) -> Result:
    """Predict every row of one data set."""
    rows = points(dataset)
    predicted = [predicted_seconds(row) for row in rows]
    pairs = [(p, row.seconds) for p, row in zip(predicted, rows, strict=True)]
    whole = errors_of(pairs)
    assert whole is not None
    rivals, compared = rival_errors(dataset, rows)
    orders = list(_orders(rows, predicted))
    return Result(
        dataset=dataset,
        all=whole,
        fit=errors_of([pair for pair, row in zip(pairs, rows, strict=True) if row.is_fit]),
        held=errors_of([pair for pair, row in zip(pairs, rows, strict=True) if not row.is_fit]),
        rivals=rivals,
        own_on_rivals=errors_of([pair for pair, row in zip(pairs, rows, strict=True) if row.id in compared]),
        rank_correlation=sum(orders) / len(orders) if orders else None,
        num_cells=len(orders),
        gain_difference=max((abs(p - m) for p, m in sharding_gains(rows, predicted)), default=None),
    )


def _orders(rows: Sequence[Point], predicted: Sequence[float]) -> Iterator[float]:
    cells: dict[str, list[tuple[float, float]]] = {}
    for row, seconds in zip(rows, predicted, strict=True):
        cells.setdefault(row.cell, []).append((seconds, row.seconds))
    for pairs in cells.values():
        if len(pairs) >= _LEAST_CELL:
            yield spearman([p for p, _ in pairs], [m for _, m in pairs])


def sharding_gains(rows: Sequence[Point], predicted: Sequence[float]) -> list[tuple[float, float]]:
    """(predicted, measured) percent of throughput that ZeRO-1 inside a node has over ZeRO-1 over all devices."""
    runs: dict[tuple[object, ...], dict[bool, tuple[float, float]]] = {}
    for row, seconds in zip(rows, predicted, strict=True):
        layout = row.candidates[0]
        if row.dataset != "internevo" or layout.dp * layout.tp <= row.job.cluster.domain_size:
            continue
        key = (layout.tp, layout.dp, layout.micro_batch_size, layout.num_micro_batches, layout.recompute)
        runs.setdefault(key, {})[layout.dp_replicate == 1] = (seconds, row.seconds)
    return [
        (100 * (run[True][0] / run[False][0] - 1), 100 * (run[True][1] / run[False][1] - 1))
        for run in runs.values()
        if len(run) == 2
    ]


# ---------------------------------------------------------------- what is printed


def _table(result: Result) -> Table:
    setting = SETTINGS[result.dataset]
    table = Table(title=f"{setting.title}  (constants: {setting.software})", title_justify="left")
    for name in ("rows", "points", "median %", "p90 %", "worst %", "bias %"):
        table.add_column(name, justify="left" if name == "rows" else "right")
    named = [("all", result.all), (f"fit: {setting.fit}", result.fit), ("held out", result.held)]
    if result.rivals:
        named.append(("those of the next rows", result.own_on_rivals))
        named += list(result.rivals.items())
    for name, errors in named:
        if errors is not None and not (name == "held out" and result.fit is None):
            numbers = (errors.median, errors.p90, errors.worst)
            table.add_row(name, str(errors.count), *(f"{n:.1f}" for n in numbers), f"{errors.bias:+.1f}")
    return table


def _notes(result: Result) -> Iterator[str]:
    if result.rank_correlation is not None and result.num_cells:
        yield f"order of layouts (Spearman, mean of {result.num_cells} cells): {result.rank_correlation:.3f}"
    if result.gain_difference is not None:
        yield f"gain of sharding inside nodes: within {result.gain_difference:.1f} points of the measured one"


def _print_rows(console: Console, dataset: str) -> None:
    table = Table(title=SETTINGS[dataset].title)
    for name in ("id", "layout", "part", "measured s", "predicted s", "error %", "rival %"):
        table.add_column(name, justify="left" if name in {"id", "layout", "part"} else "right")
    for row in points(dataset):
        seconds = predicted_seconds(row)
        rival = f"{100 * (row.rival_seconds / row.seconds - 1):+.1f}" if row.rival_seconds else ""
        cells = (f"{row.seconds:.4g}", f"{seconds:.4g}", f"{100 * (seconds / row.seconds - 1):+.1f}", rival)
        table.add_row(row.id, row.candidates[0].label, "fit" if row.is_fit else "held", *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object instead of tables")
    parser.add_argument("--rows", metavar="DATASET", choices=datasets(), help="every row of one data set")
    parser.add_argument("--fit", action="store_true", help="fit the constants again and print them")
    parser.add_argument("--leave-one-out", action="store_true", help="fit shared constants without each data set")
    arguments = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 120)
    if arguments.rows:
        _print_rows(console, arguments.rows)
        return
    if arguments.fit:
        refit(console)
        return
    if arguments.leave_one_out:
        leave_one_out(console)
        return
    results = [result_of(dataset) for dataset in datasets()]
    if arguments.json:
        console.print_json(json.dumps([asdict(result) for result in results]))
        return
    for result in results:
        console.print(_table(result))
        for note in _notes(result):
            console.print(note)
        console.print()
    console.print(target_table([*time_targets(results), *memory_targets()]))


if __name__ == "__main__":
    main()
