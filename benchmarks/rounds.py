"""Several ways to train, measured in interleaved rounds of one run.

A round runs a few steps of each mode, in an order that rotates; ratios are taken within the round, so a slow spell
of the machine falls on both sides.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

__all__ = ["Mode", "interval", "launch", "rank_or_none", "ratios", "run_rounds"]


@dataclass(slots=True)
class Mode:
    """One way to train, and what was measured of it."""

    step: Callable[[int], float]
    """Number of the step -> its loss."""
    live_bytes: Callable[[], int] = lambda: 0
    prepare: Callable[[], None] = lambda: None
    """Before the steps of a round; `finish` comes after them. Neither is measured."""
    finish: Callable[[], None] = lambda: None
    wall_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def rank_or_none() -> int | None:
    """This process's rank; None in the process that is to start the ranks."""
    return int(os.environ["RANK"]) if "RANK" in os.environ else None


def launch(module: str, *, num_ranks: int) -> int:
    """Run this command line once per rank, with one thread each; returns the exit status."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, "-m", *launcher, "-m", module, *sys.argv[1:]]
    return subprocess.call(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def run_rounds(modes: Mapping[str, Mode], *, rounds: int, steps: int) -> None:
    """Fill in what is measured. *Collective.*"""
    names = list(modes)
    done = 0
    for round_number in range(-1, rounds):  # round -1 warms up
        shift = round_number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            mode = modes[name]
            mode.prepare()
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for step in range(steps):
                mode.losses.append(mode.step(done + step))
            dist.barrier()
            if round_number >= 0:
                mode.wall_seconds.append((time.perf_counter() - wall) / steps)
                mode.cpu_seconds.append((time.process_time() - cpu) / steps)
            mode.finish()
        done += steps


def ratios(mode: Mode, base: Mode) -> list[float]:
    """Wall time of one mode by that of another, round by round."""
    return [own / other for own, other in zip(mode.wall_seconds, base.wall_seconds, strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]
