"""This machine, as far as the time of a training step depends on it: its name, processor, cores and memory."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from hybrid.units import format_bytes

__all__ = ["ThisMachine", "problem_of_ranks", "this_machine"]

_LEAST_RANK_BYTES = 200 * 2**20
"""Of a process with torch and this library, that it shares with no other, before it has a model."""
_MOST_RANKS_PER_CORE = 64
"""More than cores is slow and of use (layouts are tried so); with this many, starting alone takes minutes."""


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


def problem_of_ranks(name: str, number: int) -> str | None:
    """Why so many ranks cannot be started on this machine; None: they may be."""
    machine = this_machine()
    by_memory = max(1, int(machine.memory_bytes // _LEAST_RANK_BYTES))
    by_cores = _MOST_RANKS_PER_CORE * machine.cores
    if number <= min(by_memory, by_cores):
        return None
    if by_memory <= by_cores:
        return (
            f"{name} is {number}: each takes more than {format_bytes(_LEAST_RANK_BYTES)}, and of memory "
            f"{format_bytes(machine.memory_bytes)} are free here; at most {by_memory}"
        )
    cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    return (
        f"{name} is {number}: this process may use {cores}, and {_MOST_RANKS_PER_CORE} ranks each; at most {by_cores}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "hardware")))
    return next(names, "") or platform.processor() or platform.machine()
