"""The layout that the planner finds for the demo's model on this machine's own CPUs: `hybrid demo --layout auto`."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from hybrid.planner.plan import Plans

__all__ = ["plan_demo"]

_SIZE = 512  # rows and columns of the product that is timed
_ROUNDS = 8


def plan_demo(num_processes: int, batch: int) -> Plans:
    """Plans for so many ranks and sequences per step, on the rate and the memory that each rank has of this machine.

    Raises:
        PlanError: nothing fits into this machine's memory, or the batch does not divide over any layout.
    """
    import torch  # here and below: the rest of `hybrid demo` starts without it

    from hybrid.contracts.cluster import parse_cluster
    from hybrid.demo.gpt import DEMO_LENGTH, GPT
    from hybrid.planner.plan import plan

    with torch.device("meta"):
        model = GPT(max_length=DEMO_LENGTH)
    sample = torch.zeros(1, DEMO_LENGTH, dtype=torch.long)
    share = min(1.0, (os.cpu_count() or 1) / num_processes)  # of a core
    cluster = parse_cluster(f"1x{num_processes}xcpu").with_device(
        flops={"fp32": share * _flops_per_second()},
        memory_bytes=psutil.virtual_memory().available / num_processes,
    )
    # The layout with a pipeline is `--layout 3d`.
    return plan(model, cluster, global_batch_size=batch, sample=sample, precision="fp32", fixed={"pp": 1})


def _flops_per_second() -> float:
    """Of one core, as torch multiplies matrices on it: the best of a few products."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix = torch.ones(_SIZE, _SIZE)
        best = float("inf")
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            matrix @ matrix
            best = min(best, time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return 2 * _SIZE**3 / best
