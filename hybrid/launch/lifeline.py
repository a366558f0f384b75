"""A process that ends when its parent does, however the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(signal_number: signal.Signals, *, parent: int) -> None:
    """Ask the kernel to send `signal_number` to this process when process `parent` is gone.

    A launcher that is killed outright cannot end its ranks itself; without this they would stay as orphans,
    on the devices. Linux only; elsewhere it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent:  # it went before the kernel was asked
        os.kill(os.getpid(), signal_number)
