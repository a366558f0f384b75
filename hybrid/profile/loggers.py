"""Two step callbacks that write: a CSV file, and event files for TensorBoard.

    model.add_step_callback(hybrid.CsvLogger("loss.csv", every=10))

Rank 0 writes. Only the steps that are written are read, so the others wait for no device.
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from importlib import import_module
from pathlib import Path
from typing import Any

from hybrid.errors import HybridError
from hybrid.profile.step_record import StepRecord

__all__ = ["CsvLogger", "TensorBoardLogger"]


def _values(record: StepRecord) -> dict[str, float | int]:
    """Read from the device, here and nowhere else. A norm that is not there and an lr of no group are left out."""
    values: dict[str, float | int] = {"loss": float(record.loss)}
    if record.grad_norm is not None:
        values["grad_norm"] = float(record.grad_norm)
    if record.lr:
        values["lr"] = float(record.lr[0])
    values |= {"tokens": record.tokens, "seconds": record.seconds, "skipped": int(record.skipped)}
    values["memory_bytes"] = sum(size for name, size in record.memory_bytes.items() if name != "peak")
    return values


class _Every(ABC):
    """Which steps, and on which rank."""

    def __init__(self, every: int) -> None:
        if every < 1:
            raise HybridError(f"every is {every}; expected 1 (each step) or more")
        self._every = every

    def __call__(self, record: StepRecord) -> None:
        if record.rank == 0 and record.step % self._every == 0:
            self._write(record.step, _values(record))

    @abstractmethod
    def _write(self, step: int, values: dict[str, float | int]) -> None:
        """Keep what one step has to tell."""


class CsvLogger(_Every):
    """One line per step: step, loss, grad_norm, lr (of the first group), tokens, seconds, skipped, memory_bytes.

    An existing file goes on, if it has these columns.

    Args:
        path: of the file; its folder is made.
        every: the steps that this number divides.
    """

    COLUMNS = ("step", "loss", "grad_norm", "lr", "tokens", "seconds", "skipped", "memory_bytes")

    def __init__(self, path: str | Path, *, every: int = 1) -> None:
        super().__init__(every)
        self._path = Path(path)
        self._begun = False

    def _write(self, step: int, values: dict[str, float | int]) -> None:
        if not self._begun:
            self._begin()
        with self._path.open("a", encoding="utf-8", newline="") as file:  # whole lines, whenever the run ends
            csv.DictWriter(file, self.COLUMNS, restval="").writerow({"step": step, **values})

    def _begin(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size > 0:
            with self._path.open(encoding="utf-8", newline="") as file:
                found = tuple(next(csv.reader(file), ()))
            if found != self.COLUMNS:
                raise HybridError(
                    f"{self._path} exists with the columns {', '.join(found)}; CsvLogger writes "
                    f"{', '.join(self.COLUMNS)}: give another file"
                )
        else:
            with self._path.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerow(self.COLUMNS)
        self._begun = True


class TensorBoardLogger(_Every):
    """Scalars `train/loss`, `train/grad_norm` and others, of `torch.utils.tensorboard`.

    Args:
        directory: for the event files.
        every: the steps that this number divides.

    Raises:
        HybridError: the package `tensorboard` is not there; on every rank, before anything is trained.
    """

    def __init__(self, directory: str | Path, *, every: int = 1) -> None:
        super().__init__(every)
        self._directory = Path(directory)
        self._writer: Any = None
        try:
            self._make_writer = import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError as error:
            raise HybridError(
                "TensorBoardLogger needs the package tensorboard, which hybrid does not install: pip install "
                f"tensorboard, or use hybrid.CsvLogger ({error})"
            ) from error

    def _write(self, step: int, values: dict[str, float | int]) -> None:
        if self._writer is None:
            self._writer = self._make_writer(log_dir=str(self._directory))
        for name, value in values.items():
            self._writer.add_scalar(f"train/{name}", value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file; a later step opens another."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
