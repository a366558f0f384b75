"""What a training rank tells the command that started it, as lines of JSON in the log folder; no torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from hybrid.launch.variables import LOG_DIR_VARIABLE

__all__ = [
    "Event",
    "Finished",
    "Layout",
    "Memory",
    "ProgressReader",
    "ProgressWriter",
    "Started",
    "StepDone",
    "Stepped",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Rank 0, before the first step."""

    num_parameters: int
    train_bytes: int
    held_out_bytes: int
    held_out_loss: float  # nats per byte


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """Rank 0, after each step."""

    step: int  # from 1
    loss: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Each rank, now and then: live bytes of the training state, and of the whole process."""

    rank: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int | None  # that one forward keeps for backward; at the end only
    resident_bytes: int
    host_bytes: int = 0  # of the training state, in host memory: not among the others

    @property
    def state_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Rank 0, at the end."""

    held_out_loss: float
    sent_bytes: int  # by rank 0 in one step
    plain_activation_bytes: int  # that a forward of the plain model keeps, on a micro-batch of rank 0
    train_seconds: float
    losses: list[float] = field(default_factory=list)  # of the first steps, where they are compared
    plain_losses: list[float] = field(default_factory=list)  # of one process on the same batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Rank 0, before the first step of a model that is cut into stages: what `hybrid explain` says of it."""

    title: str
    header: list[str]
    stages: list[list[str]]
    remarks: list[str]
    predicted_bytes: dict[str, float]  # axis -> bytes that all ranks together send in a step; empty if not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """Each rank of a pipeline, of one step: when its actions ran, and what it sent."""

    rank: int
    begun: float  # seconds of time.monotonic, which all processes of a machine share
    ended: float
    busy_seconds: float  # in actions, without waiting for messages of other stages
    cpu_seconds: dict[str, float]  # kind and chunk of an action, such as F0 -> mean time on a processor
    sent_bytes: dict[str, int]  # by axis


Event = Started | StepDone | Memory | Layout | Stepped | Finished
_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Started, StepDone, Memory, Layout, Stepped, Finished)
}


class ProgressWriter:
    """Appends events of one rank; without a log folder (a plain torchrun) it does nothing."""

    def __init__(self, *, rank: int) -> None:
        log_dir = os.environ.get(LOG_DIR_VARIABLE)
        self._file: IO[str] | None = None
        if log_dir:
            self._file = _path(Path(log_dir), rank).open("w", encoding="utf-8", buffering=1)

    def write(self, event: Event) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": type(event).__name__, **asdict(event)}) + "\n")


class ProgressReader:
    """Reads the events that all ranks have written since the last look."""

    def __init__(self, *, num_ranks: int) -> None:
        self._positions = [0] * num_ranks

    def new_events(self, log_dir: Path) -> list[Event]:
        events: list[Event] = []
        for rank, position in enumerate(self._positions):
            path = _path(log_dir, rank)
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(position)
                lines = file.read()
            whole = lines[: lines.rfind(b"\n") + 1]  # a line may be half written
            self._positions[rank] += len(whole)
            for line in whole.splitlines():
                fields = json.loads(line)
                events.append(_KINDS[fields.pop("kind")](**fields))
        return events


def _path(log_dir: Path, rank: int) -> Path:
    return log_dir / f"progress{rank}.jsonl"
