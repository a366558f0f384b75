"""What a pipeline's rank does in a step, heard from its ranges: when, for how long, and what its forwards keep."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hybrid.collectives.ranges import RangeKind, set_listener
from hybrid.collectives.trace import Recording
from hybrid.demo.kept_memory import KeptMemory
from hybrid.demo.progress import Stepped

__all__ = ["HeardActions", "KeptByForwards", "heard", "sent_by_axis"]


class HeardActions:
    """Takes the time of each action of one step, in the thread that made it.

    An action is busy but for what it waits for messages of other stages; whatever else it waits for (ranks that share
    its layers, reductions) is its own work. Time on a processor is that of the thread: what an action would take where
    no other process wants the same core.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._depth = 0  # of ranges of communication within each other
        self._waited = 0.0
        self._begun: float | None = None
        self._ended = 0.0
        self._busy = 0.0
        self._cpu: dict[str, list[float]] = {}

    @contextmanager
    def range(self, name: str, kind: RangeKind, axis: str, op: str) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            yield
        elif kind in {RangeKind.FORWARD, RangeKind.BACKWARD}:
            with self._action(name):
                yield
        elif kind is RangeKind.COMMUNICATION:
            with self._communication(is_between_stages=axis.startswith("pp_")):
                yield
        else:
            yield

    @contextmanager
    def _action(self, name: str) -> Iterator[None]:
        begun, on_processor, self._waited = time.monotonic(), time.thread_time(), 0.0
        yield
        self._cpu.setdefault(_kind_and_chunk(name), []).append(time.thread_time() - on_processor)
        self._ended = time.monotonic()
        self._busy += self._ended - begun - self._waited
        self._begun = begun if self._begun is None else self._begun

    @contextmanager
    def _communication(self, *, is_between_stages: bool) -> Iterator[None]:
        begun = time.monotonic()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if is_between_stages and not self._depth:
                self._waited += time.monotonic() - begun

    def stepped(self, *, rank: int, sent_bytes: Mapping[str, int]) -> Stepped:
        """The step, which had at least one action."""
        assert self._begun is not None
        return Stepped(
            rank=rank,
            begun=self._begun,
            ended=self._ended,
            busy_seconds=self._busy,
            cpu_seconds={name: sum(values) / len(values) for name, values in self._cpu.items()},
            sent_bytes=dict(sent_bytes),
        )


class KeptByForwards:
    """The most that one forward of a step keeps for backward, on this rank's part of the model."""

    def __init__(self) -> None:
        self.kept_bytes = 0

    @contextmanager
    def range(self, name: str, kind: RangeKind, axis: str, op: str) -> Iterator[None]:
        if kind is not RangeKind.FORWARD:
            yield
            return
        with KeptMemory() as memory:
            yield
        self.kept_bytes = max(self.kept_bytes, memory.num_bytes())


@contextmanager
def heard(listener: HeardActions | KeptByForwards) -> Iterator[None]:
    """Let it hear of all ranges inside."""
    set_listener(listener)
    try:
        yield
    finally:
        set_listener(None)


def sent_by_axis(recording: Recording) -> dict[str, int]:
    """`tp`, `pp`, `tied`, `dp` -> bytes, named as `planner/axis_bytes.py` names them; other axes by their own name."""
    found: dict[str, int] = {}
    for axis, by_op in recording.totals().items():
        name = axis
        if axis.startswith("pp_"):  # of either direction
            name = "pp"
        elif axis == "pp" or axis.startswith("pp:"):  # the stages that hold the same weight
            name = "tied"
        elif axis.startswith("dp_"):
            name = "dp"
        found[name] = found.get(name, 0) + sum(totals.sent_bytes for totals in by_op.values())
    return found


def _kind_and_chunk(name: str) -> str:
    """`forward F1.3` -> `F1`."""
    return name.rpartition(" ")[2].partition(".")[0]
