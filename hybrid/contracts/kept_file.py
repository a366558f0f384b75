"""Files that several processes may read, change and replace: a lock while one of them does, and never half a file."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["locked", "replace_text"]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Others that want the lock of this file wait until the block has ended; the kernel frees it when a process dies.

    The lock is a file of its own, `.NAME.lock`, which stays: the file itself is replaced, and a lock on it with it.

    Raises:
        OSError: the folder cannot be written, or knows no locks.
    """
    with path.with_name(f".{path.name}.lock").open("a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def replace_text(path: Path, text: str) -> None:
    """As a whole or not at all; what is aside while it is written has a name of its own in each process.

    Raises:
        OSError: it cannot be written.
    """
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
    number, aside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".new", dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(aside, mode)
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
