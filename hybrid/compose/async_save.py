"""One save at a time beside the training: copies of the tensors, and the thread that writes them."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hybrid.checkpoint.held import Region
from hybrid.compose import context

__all__ = ["AsyncSave", "finish", "staged", "start"]


class AsyncSave:
    """A save that is being written."""

    def __init__(self, write: Callable[[], Path], *, step: int) -> None:
        self.step = step
        self._write = write
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=f"hybrid-save-{step}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._path = self._write()
        except BaseException as error:
            self._error = error

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
    """Begin to write; `finish` must have been called before."""
    assert not _running
    save = AsyncSave(write, step=step)
    _running.append(save)
    return save


def finish() -> None:
    """Wait for the save under way. Raises what it failed with, if nobody has seen that yet."""
    if not _running:
        return
    save = _running.pop()
    error = save.untold_error()
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
        copy.copy_(region.tensor.detach())
        kept[key] = copy
        found.append(replace(region, tensor=copy))
    _copies.clear()
    _copies.update(kept)
    return found


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
