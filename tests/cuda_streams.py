"""Streams of a stand-in for CUDA: which work is known to come after which, and what was used without knowing.

Every stream, and the host, has a clock for each of them: the number of its pieces of work that are over before
anything it does from now on. Waiting joins clocks. Each storage remembers who used which of its bytes when, so that a
use by one stream of what another has written (or a write where another still reads) without a wait in between is a
`Race`, as is memory that goes back to the allocator while another stream may still be using it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["HOST", "Event", "Held", "Race", "Stream", "Use", "range_of"]


class Race(AssertionError):
    """Two uses of one memory, in an order that nothing makes certain."""


class Worker:
    """Somebody who does one thing after the other: a stream or the host."""

    _count = 0

    def __init__(self, name: str) -> None:
        Worker._count += 1
        self.number, self.name, self.time = Worker._count, name, 0
        self.known: dict[int, int] = {}

    def join(self, clock: dict[int, int]) -> None:
        for number, time in clock.items():
            if self.known.get(number, 0) < time:
                self.known[number] = time

    def clock(self) -> dict[int, int]:
        return {**self.known, self.number: self.time}

    def knows(self, number: int, time: int) -> bool:
        return number == self.number or self.known.get(number, 0) >= time


HOST = Worker("the host")


class Stream(Worker):
    """As `torch.cuda.Stream`: its work comes after what the host has waited for, and what it was told to wait for."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "", index: int | None = None) -> None:
        index = torch.cuda.current_device() if device is None and index is None else index
        self.device_index: int = torch.device(device).index or 0 if index is None else index
        super().__init__(name or f"stream {Worker._count + 1} of cuda:{self.device_index}")
        self.priority = priority

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    @property
    def cuda_stream(self) -> int:
        return self.number

    def begin(self) -> None:
        """A piece of work is given to it."""
        self.join(HOST.known)
        self.time += 1

    def wait_stream(self, stream: Stream) -> None:
        self.join(stream.clock())

    def wait_event(self, event: Event) -> None:
        self.join(event.at)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        HOST.join(self.clock())

    def query(self) -> bool:
        return True


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing, self.at = enable_timing, {}  # type: tuple[bool, dict[int, int]]

    def record(self, stream: Stream | None = None) -> None:
        self.at = (torch.cuda.current_stream() if stream is None else stream).clock()  # type: ignore[assignment]

    def wait(self, stream: Stream | None = None) -> None:
        (torch.cuda.current_stream() if stream is None else stream).wait_event(self)  # type: ignore[arg-type]

    def synchronize(self) -> None:
        HOST.join(self.at)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return 1.0


@dataclass(slots=True)
class Use:
    """Of the bytes from `start` to `end` of a storage."""

    start: int
    end: int
    worker: Worker
    time: int
    writes: bool
    what: str


@dataclass
class Held:
    """What hangs on a storage: where it would lie, and who has used it how."""

    device: torch.device | None
    """None: the host's memory."""
    owner: Stream | None
    """The stream that was current when it was allocated: its next allocation may take the memory."""
    found: list[str]
    """Where races go that are seen when nobody can raise."""
    pinned: bool = False
    num_bytes: int = 0
    uses: list[Use] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)

    def use(self, worker: Worker, span: tuple[int, int], *, writes: bool, what: str) -> None:
        start, end = span
        kept = []
        for use in self.uses:
            if use.end <= start or end <= use.start:
                kept.append(use)
            elif not worker.knows(use.worker.number, use.time):
                if use.writes or writes:
                    raise Race(
                        f"{what} by {worker.name} {'writes' if writes else 'reads'} bytes {max(start, use.start)} to "
                        f"{min(end, use.end)} of a storage of {self.device or 'the host'} that {use.what} by "
                        f"{use.worker.name} {'writes' if use.writes else 'reads'}, and does not wait for it"
                    )
                kept.append(use)
            elif not (start <= use.start and use.end <= end and (writes or not use.writes)):
                kept.append(use)
        self.uses = [*kept, Use(start, end, worker, worker.time, writes, what)]

    def free(self) -> None:
        """Back to the allocator, which gives it to the next who asks on the stream of the owner."""
        if self.owner is not None:
            for use in self.uses:
                if use.worker.number in self.recorded or HOST.knows(use.worker.number, use.time):
                    continue
                if not self.owner.knows(use.worker.number, use.time):
                    self.found.append(
                        f"memory of {self.device} goes back to {self.owner.name} while {use.what} by {use.worker.name} "
                        "may still use it"
                    )
        self.uses = []

    def __del__(self) -> None:
        self.free()


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage between the first and the last of a tensor's elements."""
    if not tensor.numel():
        return 0, 0
    size = tensor.element_size()
    first = tensor.storage_offset()
    last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (last + 1) * size


def joined(workers: Iterable[Worker]) -> dict[int, int]:
    clock: dict[int, int] = {}
    for worker in workers:
        for number, time in worker.clock().items():
            clock[number] = max(clock.get(number, 0), time)
    return clock
