"""A profiler that stops while messages are under way.

Receives for the headers of later collectives are always posted, so some outlive whatever profiler runs when they are
posted. Each kept an open record in the profiler's memory, and wrote its end there when it was completed or freed: a
rank died in a garbage collection some steps after `torch.profiler` had stopped, with -6 or -11 and no message.
"""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import hybrid
from tests.ranks import run_ranks


def profiled_by_hand() -> list[bool]:
    strategy = hybrid.DistributedStrategy(sharding=True, sharding_configs={"stage": 3})
    model = hybrid.distributed_model(nn.Sequential(*(nn.Linear(17, 17) for _ in range(4))), strategy=strategy)
    optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    batch = (torch.randn(4, 17), torch.randn(4, 17))
    messages = []
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            model.train_batch(batch, optimizer, loss_fn=nn.functional.mse_loss)
        messages.append(any(event.name.startswith("gloo:") for event in profiler.events()))
        del profiler
        gc.collect()
        model.train_batch(batch, optimizer, loss_fn=nn.functional.mse_loss)
        gc.collect()
    return messages


def test_messages_outlive_a_profiler() -> None:
    """Protects whoever profiles a training with torch's own profiler: messages leave no record, and no rank dies."""
    assert run_ranks(profiled_by_hand, 2) == [[False, False]] * 2
