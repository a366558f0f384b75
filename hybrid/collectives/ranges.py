"""Named ranges of a training step: who forwards, who waits, for what.

The floors below `compose` say what they do, and do not know who listens: nobody, as a rule, and then a range is one
comparison. While a step is profiled the listener takes the time and puts the names into torch's trace.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Protocol

__all__ = ["Listener", "RangeKind", "get_listener", "named_range", "set_listener", "waiting"]


class RangeKind(Enum):
    """To what the time within a range counts; of ranges within ranges the innermost that is not PLAIN."""

    PLAIN = "as what is around it"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication"


class Listener(Protocol):
    """Who hears of ranges."""

    def range(self, name: str, kind: RangeKind, axis: str, op: str) -> AbstractContextManager[object]:
        """What is entered for one range; `axis` and `op` are empty but for COMMUNICATION."""
        ...


_NOTHING = nullcontext()
# At most one; a list, so that there is one object for the process to change.
_listeners: list[Listener] = []


def set_listener(listener: Listener | None) -> None:
    """Tell `listener` of all later ranges of this process; None for nobody."""
    _listeners[:] = [] if listener is None else [listener]


def get_listener() -> Listener | None:
    """Who listens, if anybody."""
    return _listeners[0] if _listeners else None


def named_range(name: str, detail: object = "", kind: RangeKind = RangeKind.PLAIN) -> AbstractContextManager[object]:
    """A range `name detail`; put together only if somebody listens.

    >>> with named_range("reduce bucket", bucket.index):
    ...     ops.reduce_scatter(...)
    """
    if not _listeners:
        return _NOTHING
    return _listeners[0].range(name if detail == "" else f"{name} {detail}", kind, "", "")


def waiting(op: str, axis: str) -> AbstractContextManager[object]:
    """The range in which this process launches a collective or a message on an axis, or is blocked in it."""
    if not _listeners:
        return _NOTHING
    return _listeners[0].range(f"{op} {axis}", RangeKind.COMMUNICATION, axis, op)
