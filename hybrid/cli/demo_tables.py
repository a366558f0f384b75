"""What `hybrid demo` shows of a model that is cut into stages: where it is cut, what each axis carries, the bubble."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from hybrid.contracts.layout import Layout as RankLayout
from hybrid.contracts.schedule_choice import schedule_name
from hybrid.contracts.schedule_timing import time_schedule
from hybrid.demo.progress import Layout, Stepped
from hybrid.strategy import ResolvedStrategy
from hybrid.units import format_bytes

__all__ = ["bubble_text", "layout_name", "rank_map", "stage_split", "traffic_table"]

# Axis, as `planner/axis_bytes.py` names them -> what travels.
_TRAFFIC = {
    "tp": ("tp", "sums inside layers"),
    "pp": ("pp", "activations on, gradients back"),
    "tied": ("pp", "gradients of tied weights"),
    "dp": ("dp", "gradients and parameters"),
}
_LEFT_OUT = ("ranks", "classes")  # of the table of `hybrid explain`: the rank map has the first
_BACKWARD_AS_FORWARDS = 2.0  # of equal stages, in theory


def layout_name(layout: RankLayout) -> str:
    """`pp 2 × dp_shard 2 × tp 2`, outermost first."""
    return " × ".join(f"{axis.name} {axis.size}" for axis in layout.axes if axis.size > 1)


def rank_map(layout: RankLayout) -> Table:
    """A line for each stage and data-parallel coordinate, a column for each tensor-parallel one."""
    size, ranks = layout.degree("tp"), range(layout.world_size)
    outer = [axis.name for axis in layout.axes if axis.size > 1 and axis.name != "tp"]
    table = Table(title="Rank map", title_justify="left", box=None, pad_edge=False)
    for axis in outer:
        table.add_column("stage" if axis == "pp" else axis, justify="right")
    for index in range(size):
        table.add_column(f"tp {index}", justify="right")
    lines: dict[tuple[int, ...], list[str]] = {}
    for rank in ranks:
        place = layout.coordinate(rank)
        lines.setdefault(tuple(place[axis] for axis in outer), []).append(str(rank))
    for coordinates, held in sorted(lines.items()):
        table.add_row(*map(str, coordinates), *held)
    return table


def stage_split(told: Layout) -> Iterator[RenderableType]:
    """The table of `hybrid explain`, narrow, and what it says below."""
    table = Table(title=escape(told.title[:1].upper() + told.title[1:]), title_justify="left", box=None, pad_edge=False)
    shown = [index for index, name in enumerate(told.header) if name not in _LEFT_OUT]
    for index in shown:
        table.add_column(told.header[index], no_wrap=True)
    for line in told.stages:
        table.add_row(*(escape(line[index]) for index in shown))
    yield table
    yield from (f"note: {escape(remark)}" for remark in told.remarks)


def traffic_table(told: Layout | None, steps: Mapping[int, Sequence[Stepped]]) -> Table:
    """Bytes of the last step by axis, all ranks together, beside what the planner says of this strategy."""
    counted = Counter[str]()
    for own in steps.values():
        counted.update(own[-1].sent_bytes)
    predicted = {} if told is None else told.predicted_bytes
    table = Table(title="All ranks together send in a step", title_justify="left")
    for name in ("axis", "what"):
        table.add_column(name)
    for name in ("predicted", "counted", "ratio"):
        table.add_column(name, justify="right")
    for key in [*_TRAFFIC, *(axis for axis in counted if axis not in _TRAFFIC)]:
        if counted[key] or predicted.get(key):
            axis, what = _TRAFFIC.get(key, (key, ""))
            expected = predicted.get(key)
            ratio = f"{counted[key] / expected:.2%}" if expected else ""
            table.add_row(axis, what, _bytes(expected), _bytes(counted[key]), ratio)
    return table


def _bytes(number: float | None) -> str:
    return "not known" if number is None else f"{format_bytes(round(number))}"


def bubble_text(resolved: ResolvedStrategy, steps: Mapping[int, Sequence[Stepped]]) -> str:
    """In theory, by the timer with what the actions took, and as it was; a sentence each."""
    pipeline = resolved.pipeline
    assert pipeline is not None
    schedule = pipeline.order(resolved.accumulate_steps)
    equal = time_schedule(schedule, forward_seconds=1.0, backward_seconds=_BACKWARD_AS_FORWARDS).bubble_fraction
    own = _costs(steps, schedule.num_chunks)
    timed = time_schedule(
        schedule,
        forward_seconds=own["F"],
        backward_seconds=own["B"],
        input_seconds=own["I"],
        weight_seconds=own["W"],
    ).bubble_fraction
    cores = os.cpu_count() or 1
    shared = (
        f" ({resolved.world_size} ranks share {cores} cores, and others compute while one waits)"
        if cores < resolved.world_size
        else ""
    )
    return (
        f"Bubble of {schedule_name(pipeline.schedule)} with {resolved.accumulate_steps} micro-batches: {equal:.1%} in "
        f"theory, with stages of equal cost; {timed:.1%} by the timer, with the processor time that each action took "
        f"here; measured {_measured(steps):.1%} of the steps' time{shared}."
    )


def _costs(steps: Mapping[int, Sequence[Stepped]], num_chunks: int) -> dict[str, list[float]]:
    """Kind of an action -> seconds on a processor by chunk, mean of the ranks and steps; 0 where there is none."""
    found: dict[str, list[float]] = {}
    for own in steps.values():
        for step in own:
            for name, seconds in step.cpu_seconds.items():
                found.setdefault(name, []).append(seconds)
    chunks = range(num_chunks)
    return {kind: [fmean(found.get(f"{kind}{chunk}", [0.0])) for chunk in chunks] for kind in ("F", "B", "I", "W")}


def _measured(steps: Mapping[int, Sequence[Stepped]]) -> float:
    """The part of the time between the first and the last action of a step in which ranks are in none."""
    idle = []
    for together in zip(*steps.values(), strict=True):
        span = max(step.ended for step in together) - min(step.begun for step in together)
        idle.append(1 - fmean(step.busy_seconds for step in together) / span)
    return fmean(idle)
