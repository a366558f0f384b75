"""A timeline as lines of a terminal: rows are pipeline ranks, columns are time.

Wide: each action shows its micro-batch (and chunk, where a rank has several) over its whole length.
Compact: one letter per column, F B I W or a dot, each column the same stretch of time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from rich.text import Text

from hybrid.contracts.schedule import Action, ActionKind
from hybrid.contracts.schedule_timing import TimedAction, Timeline
from hybrid.units import format_seconds

__all__ = ["draw", "legend"]

MIN_COLUMNS = 8
MAX_SLOTS = 10_000
IDLE = "."
FILL = "-"
# First and second of a rank's chunks, third and fourth, and so on: chunks in turn differ in shade.
STYLES = {
    ActionKind.F: ("black on blue", "black on bright_blue"),
    ActionKind.B: ("black on green", "black on bright_green"),
    ActionKind.I: ("black on cyan", "black on bright_cyan"),
    ActionKind.W: ("black on magenta", "black on bright_magenta"),
}
WORDS = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "gradients of inputs",
    ActionKind.W: "gradients of weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """How time becomes characters."""

    num_columns: int
    """Of the whole step: slots if wide, else letters."""
    cell: int
    """Characters per slot; 0 says compact."""


def draw(timeline: Timeline, *, width: int) -> list[Text]:
    """One line per rank, at most `width` characters wide where that is 20 or more."""
    label = len(_label(timeline.schedule.num_stages - 1))
    scale = _scale(timeline, width=width)
    lines = []
    for rank, order in enumerate(timeline.timed):
        line = Text(_label(rank).ljust(label), no_wrap=True, overflow="ignore")
        (_draw_wide if scale.cell else _draw_compact)(line, order, timeline, scale)
        lines.append(line)
    return lines


def legend(timeline: Timeline, *, width: int) -> str:
    """What the letters mean, and how long a column is."""
    schedule, scale = timeline.schedule, _scale(timeline, width=width)
    used = {action.kind for order in schedule.actions for action in order}
    letters = ", ".join(f"{kind.letter} {WORDS[kind]}" for kind in ActionKind if kind in used)
    if scale.cell:
        example = "F0.1: chunk 0, micro-batch 1" if schedule.virtual_stages > 1 else "F1: micro-batch 1"
        return f"{letters}, {IDLE} idle; {example}"
    return f"{letters}, {IDLE} idle; one column is {format_seconds(timeline.total_seconds / scale.num_columns)}"


def _label(rank: int) -> str:
    return f"rank {rank}  "


def _scale(timeline: Timeline, *, width: int) -> _Scale:
    """Slots are the longest stretch of which every time is a multiple; wide if their actions' names have room."""
    room = max(MIN_COLUMNS, width - len(_label(timeline.schedule.num_stages - 1)))
    total = timeline.total_seconds
    actions = [timed for order in timeline.timed for timed in order]
    times = {
        Fraction(seconds / total).limit_denominator(MAX_SLOTS) if total else Fraction(0)
        for timed in actions
        for seconds in (timed.start_seconds, timed.end_seconds)
    }
    num_slots = math.lcm(*(time.denominator for time in times))  # the end of the step is one of the times: it is 1
    if num_slots > room:
        return _Scale(num_columns=room, cell=0)
    lengths = [
        _slot(timed.end_seconds, timeline, num_slots) - _slot(timed.start_seconds, timeline, num_slots)
        for timed in actions
    ]
    longest_name = max(len(_name(timed.action, timeline)) for timed in actions)
    cell = -(-(longest_name + 1) // min(filter(None, lengths), default=1))
    return _Scale(num_columns=num_slots, cell=cell if num_slots * cell <= room else 0)


def _slot(seconds: float, timeline: Timeline, num_slots: int) -> int:
    total = timeline.total_seconds
    return round(seconds / total * num_slots) if total else 0


def _name(action: Action, timeline: Timeline) -> str:
    return str(action) if timeline.schedule.virtual_stages > 1 else f"{action.kind.letter}{action.micro_batch}"


def _style(action: Action, timeline: Timeline) -> str:
    return STYLES[action.kind][action.chunk // timeline.schedule.num_stages % 2]


def _draw_wide(line: Text, order: tuple[TimedAction, ...], timeline: Timeline, scale: _Scale) -> None:
    at = 0
    for timed in order:
        start = _slot(timed.start_seconds, timeline, scale.num_columns)
        end = _slot(timed.end_seconds, timeline, scale.num_columns)
        line.append(f"{IDLE:<{scale.cell}}" * (start - at), style="dim")
        if end > start:
            name = _name(timed.action, timeline).ljust((end - start) * scale.cell - 1, FILL)
            line.append(name, _style(timed.action, timeline))
            line.append(" ")
        at = end
    line.append(f"{IDLE:<{scale.cell}}" * (scale.num_columns - at), style="dim")
    line.rstrip()


def _draw_compact(line: Text, order: tuple[TimedAction, ...], timeline: Timeline, scale: _Scale) -> None:
    for action in _columns(order, timeline.total_seconds, scale.num_columns):
        if action is None:
            line.append(IDLE, style="dim")
        else:
            line.append(action.kind.letter, style=_style(action, timeline))


def _columns(order: tuple[TimedAction, ...], total_seconds: float, num_columns: int) -> Iterator[Action | None]:
    """For each of the equal columns what fills most of it; None is idle."""
    edges = [total_seconds * column / num_columns for column in range(num_columns + 1)]
    first = 0
    for left, right in pairwise(edges):
        while first < len(order) and order[first].end_seconds <= left:
            first += 1
        shares: dict[Action | None, float] = {None: right - left}
        for timed in order[first:]:
            if timed.start_seconds >= right:
                break
            share = min(right, timed.end_seconds) - max(left, timed.start_seconds)
            shares[timed.action] = share
            shares[None] -= share
        yield max(shares, key=lambda action: shares[action])
