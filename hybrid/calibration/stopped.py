"""A run of ranks for a measurement: its folder, and what becomes of it when it is stopped from outside."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path

from hybrid.errors import PlanError
from hybrid.launch.run import RunOutcome

__all__ = ["raise_if_stopped", "run_folder"]

_ROOM_BYTES = 1 << 20
"""For logs, progress and results of all ranks."""


def run_folder(prefix: str) -> Path:
    """A new one for logs and results, on a disk that has room for them.

    Raises:
        PlanError: it cannot be made, or there is no room.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise PlanError(
            f"no folder can be made in TMPDIR for the ranks ({error.strerror}); set another TMPDIR"
        ) from None
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < _ROOM_BYTES:
        shutil.rmtree(folder, ignore_errors=True)
        raise PlanError(
            f"{folder.parent} has {free_bytes:,} bytes left, and the ranks write their results there, up to "
            f"{_ROOM_BYTES:,}: make room, or set another TMPDIR"
        )
    return folder


def raise_if_stopped(outcome: RunOutcome, folder: Path) -> None:
    """As if the signal had come to this process alone: the run has taken it, and ended its ranks.

    Args:
        folder: of the run, in which nothing is left to read.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        SystemExit: any other signal, with 128 and its number.
    """
    if outcome.failure is not None or outcome.exit_code <= 128:
        return
    shutil.rmtree(folder, ignore_errors=True)
    # The message names the folder of the logs, which is gone.
    if outcome.exit_code == 128 + signal.SIGINT:
        raise KeyboardInterrupt(outcome.message.partition("; logs: ")[0])
    raise SystemExit(outcome.exit_code)
