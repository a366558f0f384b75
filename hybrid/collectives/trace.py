"""What the collectives of this process carried, and how long it waited for them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid.collectives.call import Call

__all__ = ["CallRecord", "Recording", "Totals", "apart", "is_on", "record_call", "sent_bytes", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One completed collective."""

    op: str
    axis: str
    payload_bytes: int
    """Bytes of the caller's buffer (of the ranges within the bounds, where there are bounds)."""
    sent_bytes: int
    """Bytes this rank must send by the operation's own formula, whatever the algorithm did."""
    seconds: float
    """From the launch to the end of `wait`: communication and whatever was computed meanwhile."""
    wait_seconds: float
    """The part of it that this process spent blocked in `wait`."""
    control: bool
    """Counters, sizes, barriers: traffic that no formula of the training state predicts."""
    step: int
    """How many times `mark_step` had been called when it ended."""
    ended: float = 0.0
    """When, in seconds of `time.monotonic`."""


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over the collectives of one operation on one axis."""

    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0

    def add(self, record: CallRecord) -> None:
        self.calls += 1
        self.payload_bytes += record.payload_bytes
        self.sent_bytes += record.sent_bytes
        self.seconds += record.seconds
        self.wait_seconds += record.wait_seconds


class Recording:
    """The collectives that ended on this process while the trace was on."""

    def __init__(self) -> None:
        self.calls: list[CallRecord] = []
        self.num_steps = 0

    def mark_step(self) -> None:
        """What follows belongs to the next step."""
        self.num_steps += 1

    def totals(self, *, step: int | None = None, control: bool = False) -> dict[str, dict[str, Totals]]:
        """axis -> operation -> sums, of one step or of all; the training state's traffic, or the control's."""
        sums: dict[str, dict[str, Totals]] = {}
        for record in self.calls:
            if record.control is control and step in (None, record.step):
                sums.setdefault(record.axis, {}).setdefault(record.op, Totals()).add(record)
        return sums

    def sent_bytes(self, *, step: int | None = None, control: bool = False) -> int:
        """Bytes sent by this rank over all axes and operations."""
        by_axis = self.totals(step=step, control=control).values()
        return sum(totals.sent_bytes for by_op in by_axis for totals in by_op.values())

    def table(self) -> str:
        """The totals as text, control traffic last."""
        header = ("axis", "collective", "calls", "payload bytes", "sent bytes", "wait seconds")
        rows = [header]
        for control in (False, True):
            for axis, by_op in self.totals(control=control).items():
                for op, sums in by_op.items():
                    name = f"{op} (control)" if control else op
                    numbers = (f"{sums.calls:,}", f"{sums.payload_bytes:,}", f"{sums.sent_bytes:,}")
                    rows.append((axis, name, *numbers, f"{sums.wait_seconds:.3f}"))
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        return "\n".join(_line(row, widths) for row in rows)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.ljust(width) if column < 2 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


# The recordings that are switched on; nested ones all receive each call.
_active: list[Recording] = []


@contextmanager
def trace() -> Iterator[Recording]:
    """Record the collectives of this process while the block runs.

    >>> with hybrid.trace() as recording:
    ...     model.train_batch(batch, optimizer)
    ...     recording.mark_step()
    >>> print(recording.table())
    """
    recording = Recording()
    _active.append(recording)
    try:
        yield recording
    finally:
        _active.remove(recording)


# One entry for each `apart` that is entered.
_apart: list[None] = []


@contextmanager
def apart() -> Iterator[None]:
    """Inside, all traffic counts as control: it is none of the training state's."""
    _apart.append(None)
    try:
        yield
    finally:
        _apart.pop()


def is_on() -> bool:
    return bool(_active)


def record_call(call: Call, *, wait_seconds: float) -> None:
    """Add a completed call to every recording that is on."""
    itemsize = call.dtype.itemsize
    payload_bytes = (call.bounds[-1] - call.bounds[0]) * itemsize if call.bounds else call.num_bytes
    ended = time.monotonic() if call.ended is None else call.ended
    for recording in _active:
        recording.calls.append(
            CallRecord(
                op=call.op,
                axis=call.group.axis,
                payload_bytes=payload_bytes,
                sent_bytes=sent_bytes(
                    call.op,
                    num_bytes=payload_bytes,
                    size=call.group.size,
                    rank=call.group.rank,
                    bounds_bytes=tuple(bound * itemsize for bound in call.bounds),
                ),
                seconds=ended - call.launched,
                wait_seconds=wait_seconds,
                control=call.control or bool(_apart),
                step=recording.num_steps,
                ended=ended,
            )
        )


def sent_bytes(op: str, *, num_bytes: int, size: int, rank: int, bounds_bytes: Sequence[int] = ()) -> int:
    """Bytes that one rank sends at least, by the operation alone (ring bound), B bytes and N ranks.

    all_reduce 2 (N-1)/N B; reduce_scatter all but the own range; all_gather the own range N-1 times;
    send B; broadcast (N-1)/N B, the mean over the ranks of N-1 messages. Fractions of a byte are cut off.
    """
    if op == "all_reduce":
        return 2 * (size - 1) * num_bytes // size
    if op == "send":
        return num_bytes
    if op == "broadcast":
        return (size - 1) * num_bytes // size
    own_bytes = bounds_bytes[rank + 1] - bounds_bytes[rank]
    if op == "reduce_scatter":
        return num_bytes - own_bytes
    assert op == "all_gather", op
    return own_bytes * (size - 1)
