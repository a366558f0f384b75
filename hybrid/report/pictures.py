"""Pictures as SVG: a schedule on the clock, stacked bars, points, devices in their domains.

Whatever can be pointed at carries `data-tip`, which the page shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hybrid.contracts.schedule import ActionKind
from hybrid.contracts.schedule_timing import TimedAction, Timeline
from hybrid.report.svg import NUM_COLORS, WIDTH, box, frame, label, line, svg
from hybrid.units import format_bytes, format_seconds

__all__ = ["Bar", "Point", "Stretch", "bars", "devices", "gantt", "lanes", "legend", "part_names", "points"]

_LEFT = 90
_LANE = 22
_MOST_ACTIONS = 12_000  # about a megabyte of SVG
_MOST_DEVICES = 4096
_KIND_COLORS = {ActionKind.F: 0, ActionKind.B: 1, ActionKind.I: 1, ActionKind.W: 2}
_KIND_NAMES = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "gradients of inputs",
    ActionKind.W: "gradients of weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A row: parts one behind the other; where they are given an interval, and a limit."""

    label: str
    parts: Mapping[str, float]
    low: float | None = None
    high: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Of a lane: what goes on from one moment to another."""

    start_seconds: float
    end_seconds: float
    color: int
    tip: str
    text: str = ""
    """Written on it where there is room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A layout by memory and time."""

    x_bytes: float
    y_seconds: float
    tip: str
    fits: bool
    is_best: bool = False


def gantt(timeline: Timeline) -> tuple[Markup, str]:
    """(a row of actions per rank, caption)."""
    ranks = timeline.timed
    shown = max(1, _MOST_ACTIONS // max(1, len(ranks)))
    picture = lanes([(f"rank {rank}", [_action(timed) for timed in order[:shown]]) for rank, order in enumerate(ranks)])
    kinds = list(dict.fromkeys(timed.action.kind for order in ranks for timed in order[:shown]))
    cut = "" if all(len(order) <= shown for order in ranks) else f"; the first {shown} actions of each rank"
    named = ", ".join(_KIND_NAMES[kind] for kind in kinds)
    caption = (
        f"{named[:1].upper()}{named[1:]} of each micro-batch; gaps are the bubble, "
        f"{timeline.bubble_fraction:.1%} of {format_seconds(timeline.total_seconds)}{cut}."
    )
    return picture, caption


def _action(timed: TimedAction) -> Stretch:
    action, seconds = timed.action, timed.end_seconds - timed.start_seconds
    tip = (
        f"{action}: {_KIND_NAMES[action.kind]}, chunk {action.chunk}, micro-batch {action.micro_batch}\n"
        f"rank {timed.rank}, from {format_seconds(timed.start_seconds)}, for {format_seconds(seconds)}"
    )
    return Stretch(
        start_seconds=timed.start_seconds,
        end_seconds=timed.end_seconds,
        color=_KIND_COLORS[action.kind],
        tip=tip,
        text=str(action.micro_batch),
    )


def lanes(rows: Sequence[tuple[str, Sequence[Stretch]]]) -> Markup:
    """(name, its stretches) one below the other on one clock, which begins at 0."""
    end = max((stretch.end_seconds for _, row in rows for stretch in row), default=0.0) or 1.0
    scale = (WIDTH - _LEFT) / end
    parts = []
    for place, (name, row) in enumerate(rows):
        parts.append(label(0, place * _LANE + 15, name))
        parts += [_stretch(stretch, place * _LANE, scale) for stretch in row]
    return svg(parts, len(rows) * _LANE + 4)


def _stretch(stretch: Stretch, top: float, scale: float) -> Markup:
    left = _LEFT + stretch.start_seconds * scale
    width = max(0.5, (stretch.end_seconds - stretch.start_seconds) * scale - 1)
    drawn = box(left, top + 2, width, 18, f"c{stretch.color % NUM_COLORS}", stretch.tip)
    if not stretch.text or width < 9 * len(stretch.text):
        return drawn
    return drawn + label(left + width / 2, top + 15, stretch.text, anchor="middle", look="on")


def bars(rows: Sequence[Bar], *, show: Callable[[float], str] = format_bytes) -> Markup:
    """Stacked bars; what is added to the parts as an interval, the limit as a line.

    Args:
        rows: from top to bottom.
        show: a value as text.
    """
    row_height = 26
    names = part_names(rows)
    scale = (WIDTH - _LEFT - 10) / (max(_end(row) for row in rows) or 1.0)
    drawn = []
    for place, row in enumerate(rows):
        top, left = place * row_height, float(_LEFT)
        drawn.append(label(0, top + 17, row.label))
        for name, size in row.parts.items():
            if size <= 0:
                continue
            tip = f"{row.label}: {name} {show(size)}"
            drawn.append(box(left, top + 3, size * scale, 20, f"c{names.index(name) % NUM_COLORS}", tip))
            left += size * scale
        if row.low is not None and row.high is not None:
            start, length = _LEFT + row.low * scale, max(1.0, (row.high - row.low) * scale)
            tip = f"{row.label}: on the device {show(row.low)} to {show(row.high)}"
            drawn.append(line(f"M{start:.1f} {top + 13} h{length:.1f} m0 -5 v10", "best", tip))
        if row.limit is not None:
            path = f"M{_LEFT + row.limit * scale:.1f} {top} v{row_height}"
            drawn.append(line(path, "limit", f"limit {show(row.limit)}"))
    return svg(drawn, len(rows) * row_height + 4)


def _end(row: Bar) -> float:
    return max(row.limit or 0.0, row.high or 0.0, sum(row.parts.values()))


def part_names(rows: Sequence[Bar]) -> list[str]:
    """All parts, in the order of their colours."""
    return list(dict.fromkeys(name for row in rows for name, size in row.parts.items() if size > 0))


def legend(names: Sequence[str]) -> Markup:
    """Colours of the parts of bars."""
    spans = (
        Markup('<span><svg width="11" height="11"><rect width="11" height="11" class="c{}"/></svg> {}</span>').format(
            number % NUM_COLORS, name
        )
        for number, name in enumerate(names)
    )
    return Markup('<p class="legend">{}</p>').format(Markup("").join(spans))


def points(found: Sequence[Point]) -> Markup:
    """Time against memory; rings for what does not fit. The axes begin below the least values, not at zero."""
    height, bottom = 340, 300
    across = _Scale([point.x_bytes / 2**30 for point in found], start=_LEFT, end=WIDTH - 10)
    up = _Scale([point.y_seconds for point in found], start=bottom, end=20)
    drawn = [Markup('<path class="axis" fill="none" d="M{0} 8 V{1} H{2}"/>').format(_LEFT, bottom, WIDTH)]
    for value in across.ticks():
        drawn.append(label(across(value), bottom + 16, f"{value:g} GiB", anchor="middle"))
    for value in up.ticks():
        y = up(value)
        drawn.append(label(_LEFT - 6, y + 4, format_seconds(value), anchor="end"))
        drawn.append(Markup('<path class="axis" d="M{} {:.1f} H{}" opacity="0.4"/>').format(_LEFT, y, WIDTH))
    drawn.append(label(WIDTH, bottom + 34, "memory that a device needs", anchor="end"))
    drawn.append(label(_LEFT + 6, 14, "seconds per step"))
    for point in sorted(found, key=lambda one: one.is_best):
        x, y = across(point.x_bytes / 2**30), up(point.y_seconds)
        look = ("c0 best" if point.is_best else "c0") if point.fits else "over"
        drawn.append(
            Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}" class="{}" tabindex="0" data-tip="{}"/>').format(
                x, y, 7 if point.is_best else 5, look, point.tip
            )
        )
    return svg(drawn, height)


def devices(domains: Sequence[Sequence[tuple[str, int]]], tips: Mapping[str, str]) -> tuple[Markup, str]:
    """(domains as frames of squares, caption); each device is (name, colour). At most so many are drawn."""
    size, gap = 15, 10
    across = max(1, min(WIDTH // (size + 1), max(len(one) for one in domains)))
    per_row = max(1, (WIDTH + gap) // (across * (size + 1) + gap + 6))
    drawn, left, top, row_height, count = [], 0, 0, 0, 0
    for place, domain in enumerate(domains):
        if count + len(domain) > _MOST_DEVICES and place:
            break
        if place and place % per_row == 0:
            left, top, row_height = 0, top + row_height, 0
        lines = math.ceil(len(domain) / across)
        row_height = max(row_height, lines * (size + 1) + gap + 6)
        drawn.append(frame(left, top, across * (size + 1) + 5, lines * (size + 1) + 5))
        for index, (name, color) in enumerate(domain):
            x, y = left + 3 + index % across * (size + 1), top + 3 + index // across * (size + 1)
            drawn.append(box(x, y, size, size, f"c{color % NUM_COLORS}", tips[name]))
        count += len(domain)
        left += across * (size + 1) + gap + 6
    total = sum(map(len, domains))
    return svg(drawn, top + row_height), "" if count == total else f"The first {count} of {total} devices."


class _Scale:
    """Values to places, with a little room at both ends."""

    def __init__(self, values: Sequence[float], *, start: float, end: float) -> None:
        low, high = min(values), max(values)
        room = 0.08 * (high - low) or 0.1 * high or 1.0
        self._low, self._high = max(0.0, low - room), high + room
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) / (self._high - self._low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Two to six round values."""
        step = 10 ** math.floor(math.log10((self._high - self._low) / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if (self._high - self._low) / (step * factor) <= 6)
        first = math.ceil(self._low / step)
        return [step * number for number in range(first, int(self._high / step) + 1)]
