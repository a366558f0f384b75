"""The time of one thread, divided by what it does: each moment counts to the innermost range that has a kind.

step ──────────────────────────────────────────────────────────────────────
   forward ─────────────  backward ────────────────────   optimizer ─────
                             reduce_scatter ─  (wait) ──     all_gather ─
►  forward                backward  communication  back.   opt.  comm.   other
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from hybrid.collectives.ranges import RangeKind

__all__ = ["Interval", "StepClock", "covered_seconds"]

Interval = tuple[float, float]
_Key = tuple[RangeKind, str, str]
_STEP: _Key = (RangeKind.PLAIN, "", "")


class StepClock:
    """Hears where ranges begin and end, in the thread that made it; of others it takes no notice.

    by_step: of each step (kind, axis, operation) -> time; PLAIN is the rest.
    blocked: axis -> the intervals in which this thread launched communication on it or waited for it.
    stretches: of the last step what it was doing, one after the other: (kind, axis, operation), from when, to when.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._thread = threading.get_ident()
        self._stack: list[_Key] = []
        self._last = 0.0
        self._begun = 0.0
        self._ended: float | None = None
        self.step_seconds: list[float] = []
        self.between_seconds: list[float] = []
        self.by_step: list[dict[_Key, float]] = []
        self.blocked: dict[str, list[Interval]] = {}
        self.stretches: list[tuple[_Key, float, float]] = []

    def begin_step(self) -> None:
        self._begun = self._last = self._now()
        if self._ended is not None:
            self.between_seconds.append(self._begun - self._ended)
        self._stack = [_STEP]
        self.by_step.append({})
        self.stretches = []

    def end_step(self) -> None:
        self._count()
        self._stack = []
        self._ended = self._last
        self.step_seconds.append(self._last - self._begun)

    def enter(self, kind: RangeKind, axis: str = "", op: str = "") -> None:
        if not self._is_heard():
            return
        self._count()
        self._stack.append(self._stack[-1] if kind is RangeKind.PLAIN else (kind, axis, op))

    def leave(self) -> None:
        if not self._is_heard():
            return
        self._count()
        self._stack.pop()

    def of_kind(self, kind: RangeKind) -> float:
        """Seconds of a kind in all steps, over all axes."""
        return sum(seconds for step in self.by_step for (found, _, _), seconds in step.items() if found is kind)

    def communication(self) -> dict[tuple[str, str], tuple[float, ...]]:
        """(axis, operation) -> time by step."""
        keys = [key for step in self.by_step for key in step if key[0] is RangeKind.COMMUNICATION]
        return {key[1:]: tuple(step.get(key, 0.0) for step in self.by_step) for key in dict.fromkeys(keys)}

    def _is_heard(self) -> bool:
        return bool(self._stack) and threading.get_ident() == self._thread

    def _count(self) -> None:
        key, now = self._stack[-1], self._now()
        seconds = self.by_step[-1]
        seconds[key] = seconds.get(key, 0.0) + now - self._last
        if key[0] is RangeKind.COMMUNICATION:
            self.blocked.setdefault(key[1], []).append((self._last, now))
        if self.stretches and self.stretches[-1][0] == key:
            self.stretches[-1] = (key, self.stretches[-1][1], now)
        elif now > self._last:
            self.stretches.append((key, self._last, now))
        self._last = now


def covered_seconds(intervals: Iterable[Interval], *, within: Interval | None = None) -> float:
    """The length of the union of intervals, cut to `within`."""
    first, last = within or (float("-inf"), float("inf"))
    total, end = 0.0, float("-inf")
    for start, stop in sorted((max(start, first), min(stop, last)) for start, stop in intervals):
        if stop > max(start, end):
            total += stop - max(start, end)
            end = stop
    return total
