"""One measurement at a time on a machine: two at once would each store the figures of a machine that is in use."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hybrid.errors import PlanError

__all__ = ["measuring_alone"]

_NAME = "hybrid-measuring.lock"


@contextmanager
def measuring_alone() -> Iterator[None]:
    """Inside, no other process of this machine measures; the kernel frees the lock when a process dies.

    Raises:
        PlanError: another one does.
    """
    path = Path(tempfile.gettempdir()) / _NAME
    try:
        number = _opened(path)
    except OSError as error:
        raise PlanError(
            f"{path} cannot be opened ({error.strerror}), by which measurements of one machine know of each other; set "
            "TMPDIR to a folder that can be written"
        ) from None
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            who = os.pread(number, 32, 0).decode(errors="replace").strip()
            raise PlanError(
                f"another calibration or measured plan runs on this machine (process {who or 'of another user'}), and "
                "each would measure what the other leaves of it: begin when it has ended"
            ) from None
        with suppress(OSError):  # of another user, or no room: the name of the process is for people
            os.ftruncate(number, 0)
            os.pwrite(number, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(number)


def _opened(path: Path) -> int:
    """To be read and written where it is ours, else to be read: enough for a lock."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
