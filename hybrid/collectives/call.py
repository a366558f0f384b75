"""One collective call, described."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import torch

from hybrid.collectives.group import Group
from hybrid.errors import CollectiveError

__all__ = ["HISTORY", "Call", "CallState", "amid", "describe_history", "first_sentence"]


class CallState(Enum):
    """How far a call has come; its buffers are held until it is DONE or FAILED."""

    IN_FLIGHT = "in flight"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """What one rank asked for. Only `state` and `ended` change after the launch."""

    op: str
    group: Group
    buffer: torch.Tensor | None
    """Flat view of the caller's buffer; dropped when the call ends."""
    bounds: tuple[int, ...] = ()
    """Shard boundaries in elements (reduce_scatter, all_gather), else empty."""
    reduction: str = ""
    """"sum", "max", "min", or empty where nothing is added."""
    source: int = -1
    """Group index of the sender of a broadcast."""
    out: torch.Tensor | None = None
    """Where a reduce_scatter puts the sum of the own range, an all_reduce that of all; None: into the buffer."""
    given_up: bool = False
    """The caller writes to no other rank's range of the buffer again, not even after `wait`."""
    tag: int = 0
    control: bool = False
    dtype: torch.dtype = field(init=False)
    num_elements: int = field(init=False)
    num_bytes: int = field(init=False)
    launched: float = field(init=False)
    ended: float | None = None
    state: CallState = CallState.IN_FLIGHT

    def __post_init__(self) -> None:
        assert self.buffer is not None
        self.dtype = self.buffer.dtype
        self.num_elements = self.buffer.numel()
        self.num_bytes = self.num_elements * self.buffer.element_size()
        self.launched = time.monotonic()

    def end(self, state: CallState) -> None:
        self.state = state
        self.ended = time.monotonic()
        self.buffer = self.out = None

    def describe(self) -> str:
        """`reduce_scatter over dp_shard (ranks 0, 1), 4096 bytes of float32, tag 3`."""
        ranks = ", ".join(map(str, self.group.ranks))
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op} over {self.group.axis} (ranks {ranks}), {self.num_bytes} bytes of {dtype}, tag {self.tag}"


# The last collectives of this process, always on: a rank that fails prints what led up to it. Appending to
# a bounded deque is all it costs.
HISTORY: deque[Call] = deque(maxlen=16)


def describe_history() -> str:
    """One line for each of the last calls, oldest first."""
    now = time.monotonic()
    lines = []
    for call in HISTORY:
        took = "" if call.ended is None else f" after {call.ended - call.launched:.3f} s"
        lines.append(f"  {call.describe()}: launched {now - call.launched:.3f} s ago, {call.state.value}{took}")
    return "\n".join(lines)


def amid(error: CollectiveError, work: str) -> CollectiveError:
    """The same error, its first line followed by the work that the collective was part of."""
    head, line_break, history = str(error).partition("\n")
    return CollectiveError(f"{head}; while {work}{line_break}{history}")


def first_sentence(text: str) -> str:
    """gloo's message without the place in its source and its advice."""
    text = text.splitlines()[0].split(" This is typically")[0].rstrip(". ") if text else ""
    return text.split("] ", 1)[-1] if text.startswith("[") else text
