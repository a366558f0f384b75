"""Times of short work on machines that are noisy and shared: windows, medians, and how far apart the windows were.

A machine with fewer cores than ranks gives each of them a part of a core, in slices of some milliseconds. So all ranks
measure at the same time, each window is longer than many slices, and what counts is the mean within a window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from hybrid.collectives import ops
from hybrid.collectives.group import Group

__all__ = ["Clock", "Timed", "spread_of"]

# What has taken this long so far is a machine too busy or too slow for so many windows: two are left of them.
_LATE_SECONDS = 75.0
_FEWEST_WINDOWS = 2
# On a device that works behind the host's back: so much work between two looks at the clock.
_CHUNK_SECONDS = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Of one call; `spread` as in `contracts/measurements.py`."""

    seconds: float
    spread: float


def spread_of(values: Sequence[float]) -> float:
    """From the 10th to the 90th percentile, over the median."""
    ordered = sorted(values)
    last = len(ordered) - 1
    low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
    return (high - low) / median(ordered)


class Clock:
    """Times work on all ranks of a world at once.

    Args:
        world: the ranks.
        device: of this one.
        window_seconds, num_windows: see `Effort`.
    """

    def __init__(self, world: Group, device: torch.device, *, window_seconds: float, num_windows: int) -> None:
        self._world = world
        self._device = device
        self._window_seconds = window_seconds
        self._num_windows = num_windows
        self._started = time.monotonic()

    @property
    def _is_late(self) -> bool:
        return time.monotonic() - self._started > _LATE_SECONDS

    def synchronize(self) -> None:
        """All that was launched is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def alone(self, work: Callable[[], object]) -> Timed:
        """Of work that waits for no other rank; every rank does it at the same time. All ranks call this alike."""
        work()
        ops.barrier(group=self._world)
        once = self._seconds(work, 1)
        chunk = 1
        if self._device.type == "cuda":
            chunk = max(1, int(_CHUNK_SECONDS / once))
        windows = []
        for _ in range(min(self._num_windows, _FEWEST_WINDOWS) if self._is_late else self._num_windows):
            started, count, now = time.perf_counter(), 0, 0.0
            while now < self._window_seconds:
                for _ in range(chunk):
                    work()
                self.synchronize()
                count += chunk
                now = time.perf_counter() - started
            windows.append(now / count)
        return self._agreed(windows)

    def together(self, work: Callable[[], object]) -> Timed:
        """Of work in which all ranks meet: each does it as often. All ranks call this alike."""
        work()
        ops.barrier(group=self._world)
        told = ops.all_gather_object((self._seconds(work, 2), self._is_late), group=self._world)
        count = max(1, int(self._window_seconds / max(seconds for seconds, _ in told)))
        windows = []
        for _ in range(min(self._num_windows, _FEWEST_WINDOWS) if any(late for _, late in told) else self._num_windows):
            ops.barrier(group=self._world)
            windows.append(self._seconds(work, count))
        return self._agreed(windows)

    def _seconds(self, work: Callable[[], object], count: int) -> float:
        self.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            work()
        self.synchronize()
        return (time.perf_counter() - started) / count

    def _agreed(self, windows: list[float]) -> Timed:
        """The windows of all ranks as one set, the same everywhere."""
        everywhere = [value for values in ops.all_gather_object(windows, group=self._world) for value in values]
        return Timed(seconds=median(everywhere), spread=spread_of(everywhere))
