"""Pictures as SVG: a schedule on the clock, stacked bars, points, devices in their domains.

Whatever can be pointed at carries `data-tip`, which the page shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hybrid.contracts.schedule import ActionKind
from hybrid.contracts.schedule_timing import TimedAction, Timeline
from hybrid.units import format_bytes, format_seconds

__all__ = ["Bar", "Point", "bars", "devices", "gantt", "legend", "points"]

_WIDTH, _LEFT = 1080, 90
_MOST_ACTIONS = 12_000  # about a megabyte of SVG
_MOST_DEVICES = 4096
_NUM_COLORS = 8
_KIND_COLORS = {ActionKind.F: 0, ActionKind.B: 1, ActionKind.I: 1, ActionKind.W: 2}
_KIND_NAMES = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "gradients of inputs",
    ActionKind.W: "gradients of weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A row: parts in bytes one behind the other, then an interval, and a limit."""

    label: str
    parts: Mapping[str, float]
    low: float
    high: float
    limit: float


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
    row_height, ranks = 22, timeline.timed
    shown = max(1, _MOST_ACTIONS // max(1, len(ranks)))
    end = max((order[:shown][-1].end_seconds for order in ranks if order), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT) / end
    parts = []
    for rank, order in enumerate(ranks):
        parts.append(_text(0, rank * row_height + 15, f"rank {rank}"))
        parts += [_action(timed, rank * row_height, scale) for timed in order[:shown]]
    kinds = list(dict.fromkeys(timed.action.kind for order in ranks for timed in order[:shown]))
    cut = "" if all(len(order) <= shown for order in ranks) else f"; the first {shown} actions of each rank"
    caption = (
        f"{', '.join(_KIND_NAMES[kind] for kind in kinds)} of each micro-batch; gaps are the bubble, "
        f"{timeline.bubble_fraction:.1%} of {format_seconds(timeline.total_seconds)}{cut}."
    )
    return _svg(parts, len(ranks) * row_height + 4), caption


def _action(timed: TimedAction, top: float, scale: float) -> Markup:
    action, seconds = timed.action, timed.end_seconds - timed.start_seconds
    tip = (
        f"{action}: {_KIND_NAMES[action.kind]}, chunk {action.chunk}, micro-batch {action.micro_batch}\n"
        f"rank {timed.rank}, "
        f"from {format_seconds(timed.start_seconds)}, for {format_seconds(seconds)}"
    )
    width = max(0.5, seconds * scale - 1)
    box = _rect(_LEFT + timed.start_seconds * scale, top + 2, width, 18, f"c{_KIND_COLORS[action.kind]}", tip)
    if width < 9 * len(str(action.micro_batch)):
        return box
    label = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="middle" pointer-events="none">{}</text>').format(
        _LEFT + timed.start_seconds * scale + width / 2, top + 15, action.micro_batch
    )
    return box + label


def bars(rows: Sequence[Bar]) -> Markup:
    """Stacked bars with the limit as a line, and what is added to the parts as an interval."""
    row_height = 26
    names = part_names(rows)
    most = max(max(row.limit, row.high, sum(row.parts.values())) for row in rows)
    scale = (_WIDTH - _LEFT - 10) / most
    drawn = []
    for place, row in enumerate(rows):
        top, left = place * row_height, float(_LEFT)
        drawn.append(_text(0, top + 17, row.label))
        for name, size in row.parts.items():
            if size <= 0:
                continue
            tip = f"{row.label}: {name} {format_bytes(size)}"
            drawn.append(_rect(left, top + 3, size * scale, 20, f"c{names.index(name) % _NUM_COLORS}", tip))
            left += size * scale
        low, high = (_LEFT + value * scale for value in (row.low, row.high))
        drawn.append(
            Markup('<path class="best" fill="none" data-tip="{}" d="M{:.1f} {} h{:.1f} m0 -5 v10"/>').format(
                f"{row.label}: on the device {format_bytes(row.low)} to {format_bytes(row.high)}",
                low,
                top + 13,
                max(1.0, high - low),
            )
        )
        x = _LEFT + row.limit * scale
        drawn.append(
            Markup('<path class="limit" fill="none" data-tip="{}" d="M{:.1f} {} v{}"/>').format(
                f"limit {format_bytes(row.limit)}", x, top, row_height
            )
        )
    return _svg(drawn, len(rows) * row_height + 4)


def part_names(rows: Sequence[Bar]) -> list[str]:
    """All parts, in the order of their colours."""
    return list(dict.fromkeys(name for row in rows for name, size in row.parts.items() if size > 0))


def legend(names: Sequence[str]) -> Markup:
    """Colours of the parts of bars."""
    spans = (
        Markup('<span><svg width="11" height="11"><rect width="11" height="11" class="c{}"/></svg> {}</span>').format(
            number % _NUM_COLORS, name
        )
        for number, name in enumerate(names)
    )
    return Markup('<p class="legend">{}</p>').format(Markup("").join(spans))


def points(found: Sequence[Point]) -> Markup:
    """Time against memory; rings for what does not fit. The axes begin below the least values, not at zero."""
    height, bottom = 340, 300
    across = _Scale([point.x_bytes for point in found], start=_LEFT, end=_WIDTH - 10)
    up = _Scale([point.y_seconds for point in found], start=bottom, end=20)
    drawn = [Markup('<path class="axis" fill="none" d="M{0} 8 V{1} H{2}"/>').format(_LEFT, bottom, _WIDTH)]
    for value in across.ticks():
        drawn.append(_text(across(value), bottom + 16, f"{value / 1e9:g} GB", anchor="middle"))
    for value in up.ticks():
        y = up(value)
        drawn.append(_text(_LEFT - 6, y + 4, format_seconds(value), anchor="end"))
        drawn.append(Markup('<path class="axis" d="M{} {:.1f} H{}" opacity="0.4"/>').format(_LEFT, y, _WIDTH))
    drawn.append(_text(_WIDTH, bottom + 34, "memory that a device needs", anchor="end"))
    drawn.append(_text(_LEFT + 6, 14, "seconds per step"))
    for point in sorted(found, key=lambda one: one.is_best):
        x, y = across(point.x_bytes), up(point.y_seconds)
        look = ("c0 best" if point.is_best else "c0") if point.fits else "over"
        drawn.append(
            Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}" class="{}" tabindex="0" data-tip="{}"/>').format(
                x, y, 7 if point.is_best else 5, look, point.tip
            )
        )
    return _svg(drawn, height)


def devices(domains: Sequence[Sequence[tuple[str, int]]], tips: Mapping[str, str]) -> tuple[Markup, str]:
    """(domains as frames of squares, caption); each device is (name, colour). At most so many are drawn."""
    size, gap = 15, 10
    across = max(1, min(_WIDTH // (size + 1), max(len(one) for one in domains)))
    per_row = max(1, (_WIDTH + gap) // (across * (size + 1) + gap + 6))
    drawn, left, top, row_height, count = [], 0, 0, 0, 0
    for place, domain in enumerate(domains):
        if count + len(domain) > _MOST_DEVICES and place:
            break
        if place and place % per_row == 0:
            left, top = 0, top + row_height
        lines = math.ceil(len(domain) / across)
        row_height = lines * (size + 1) + gap + 6
        frame = Markup('<rect x="{}" y="{}" width="{}" height="{}" rx="3" fill="none" class="axis"/>')
        drawn.append(frame.format(left, top, across * (size + 1) + 5, lines * (size + 1) + 5))
        for index, (name, color) in enumerate(domain):
            x, y = left + 3 + index % across * (size + 1), top + 3 + index // across * (size + 1)
            drawn.append(_rect(x, y, size, size, f"c{color % _NUM_COLORS}", tips[name]))
        count += len(domain)
        left += across * (size + 1) + gap + 6
    total = sum(map(len, domains))
    return _svg(drawn, top + row_height), "" if count == total else f"The first {count} of {total} devices."


# ---------------------------------------------------------------- parts


def _svg(parts: Iterable[Markup], height: float) -> Markup:
    return Markup('<svg viewBox="0 0 {} {:.0f}" width="{}" role="img">{}</svg>').format(
        _WIDTH, height, _WIDTH, Markup("").join(parts)
    )


def _rect(x: float, y: float, width: float, height: float, look: str, tip: str) -> Markup:
    return Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" class="{}" data-tip="{}"/>').format(
        x, y, max(0.5, width), height, look, tip
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


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
