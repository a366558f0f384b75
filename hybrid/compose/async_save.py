"""One save at a time beside the training: copies of the tensors, and the thread that writes them."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hybrid.checkpoint.held import Region
from hybrid.compose import context

__all__ = ["AsyncSave", "ended", "finish", "staged", "start"]

_HEAD_START_SECONDS = 0.01


class AsyncSave:
    """A save that is being written."""

    def __init__(self, write: Callable[[], Path], *, step: int) -> None:
        self.step = step
        self._write: Callable[[], Path] | None = write
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=f"hybrid-save-{step}")
        self._thread.start()

    def _run(self) -> None:
        assert self._write is not None
        # The first thing is a plan, made in Python: the training that goes on would wait for the interpreter.
        time.sleep(_HEAD_START_SECONDS)
        try:
            self._path = self._write()
        except BaseException as error:
            self._error = error
        finally:
            self._write = None  # whoever keeps this object does not keep the model

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """The folder of the checkpoint, once it is complete.

        Raises:
            CheckpointError, CollectiveError: it failed; no checkpoint was made, earlier ones stand.
        """
        self._thread.join()
        self._told = True
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def untold_error(self) -> BaseException | None:
        """The error that nobody has seen yet, once it is over."""
        self._thread.join()
        return None if self._told else self._error


# The save under way, and the memory of copies, kept for the next one. One process is in one job.
_running: list[AsyncSave] = []
_copies: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}


def start(write: Callable[[], Path], *, step: int) -> AsyncSave:
    """Begin to write; the save before must have ended."""
    assert not _running
    save = AsyncSave(write, step=step)
    _running.append(save)
    return save


def ended() -> BaseException | None:
    """Wait for the save under way. What it failed with, if nobody has seen that yet: the caller tells it."""
    return _running.pop().untold_error() if _running else None


def finish() -> None:
    """Wait for the save under way. Raises what it failed with, if nobody has seen that yet."""
    error = ended()
    if error is not None:
        raise error


def staged(regions: Sequence[Region]) -> list[Region]:
    """The same regions with copies of their tensors on the host, in memory that is used again by the next save."""
    kept: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    found = []
    for region in regions:
        key = (region.name, region.offsets)
        copy = _copies.get(key)
        if copy is None or copy.shape != region.tensor.shape or copy.dtype != region.dtype:
            copy = torch.empty(region.sizes, dtype=region.dtype)
        _copy(region.tensor.detach(), copy)
        kept[key] = copy
        found.append(replace(region, tensor=copy))
    _copies.clear()
    _copies.update(kept)
    return found


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """As `target.copy_(source)`, which on the host is slower than the C library's copy: by a tenth, and up to twice."""
    is_bitwise = source.is_cpu and source.dtype == target.dtype and not source.is_conj() and not source.is_neg()
    if is_bitwise and source.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


def _at_exit() -> None:
    """A save that failed, and that nobody asked about, must not look like success."""
    try:
        finish()
    except BaseException as error:
        print(f"hybrid: the last async save failed: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


atexit.register(_at_exit)
context.before_shutdown(finish)
