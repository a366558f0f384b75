"""A script that left its job and started another a few dozen times was told that its own port was in use.

Each start opened the store anew, while the old one might still be closing; and every start left process groups behind,
with their sockets. Now a process meets at the store that it has, and lets go of its groups when it leaves.
"""

from __future__ import annotations

import gc
import os
import socket

import torch
from torch import nn

import hybrid
from tests.ranks import run_environments

ROUNDS = 12


def starts() -> tuple[int, int]:
    """Open descriptors after the fourth round and after the last."""
    counts = []
    for _ in range(ROUNDS):
        model = hybrid.distributed_model(nn.Linear(4, 1), hybrid.DistributedStrategy(timeout_seconds=20))
        model(torch.ones(2, 4)).sum().backward()
        hybrid.shutdown()
        del model
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[3], counts[-1]


def test_a_process_may_leave_and_start_many_times() -> None:
    """Protects notebooks and sweeps that train one strategy after another in one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environments = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for rank in range(2)
    ]
    for report in run_environments(starts, environments):
        assert not report.failed, report
        early, late = report.value
        assert late <= early + 2, (early, late)
