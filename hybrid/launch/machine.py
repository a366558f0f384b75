"""This machine, as far as the time of a training step depends on it: its name, processor, cores and memory."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["ThisMachine", "this_machine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThisMachine:
    """Args:
    host: name.
    processor: model, as the system calls it.
    cores: that this process may use.
    memory_bytes: free, of the host.
    load: processes that wanted a core in the last minute, on average.
    """

    host: str
    processor: str
    cores: int
    memory_bytes: int
    load: float


def this_machine() -> ThisMachine:
    """As it is now."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThisMachine(
        host=socket.gethostname(),
        processor=_processor(),
        cores=cores,
        memory_bytes=psutil.virtual_memory().available,
        load=os.getloadavg()[0],
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "hardware")))
    return next(names, "") or platform.processor() or platform.machine()
