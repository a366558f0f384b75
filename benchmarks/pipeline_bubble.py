"""Stages that sleep instead of computing: the bubble of a real run beside the one that `time_schedule` foretells."""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from hybrid.contracts.schedule_timing import time_schedule
from hybrid.weight_gradients import WeightGradients

__all__ = ["measure_bubbles"]

# Long beside the milliseconds that a message to a sleeping process takes on a busy machine.
_FORWARD_SECONDS, _BACKWARD_SECONDS = 0.1, 0.2
# More than what travels inside a message's header.
_WIDTH = 1024

_spans: list[tuple[float, float]] = []


def _sleep(seconds: float) -> None:
    started = time.monotonic()
    time.sleep(seconds)
    _spans.append((started, time.monotonic()))


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, share: float, node: Any) -> torch.Tensor:
        ctx.share, ctx.node = share, node
        _sleep(_FORWARD_SECONDS * share)
        return value + weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, share, left = gradients[0], ctx.share, WeightGradients.current()
        if left is None:
            _sleep(_BACKWARD_SECONDS * share)
            return gradient, gradient.sum(0), None, None

        def second_half() -> torch.Tensor:
            _sleep(_BACKWARD_SECONDS * share / 2)
            return gradient.sum(0)

        left.add(ctx.node, second_half)
        _sleep(_BACKWARD_SECONDS * share / 2)
        return gradient, None, None, None


class Sleeper(nn.Module):
    """A layer that takes a fixed time either way; `share` of a stage's."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.weight = nn.Parameter(torch.zeros(_WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        node = torch.autograd.graph.get_gradient_edge(self.weight).node if torch.is_grad_enabled() else None
        result: torch.Tensor = _Sleeps.apply(value, self.weight, self.share, node)
        return result


def measure_bubbles(micro_batches: int, *, steps: int) -> None:
    """Print, for each schedule, the idle part of a step over all ranks. *Collective.*"""
    rows = [_measure(name, micro_batches, steps) for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")]
    if dist.get_rank() != 0:
        return
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{dist.get_world_size()} ranks, {micro_batches} micro-batches, {steps} steps; load {load}")
    print(f"{'mode':12} {'step ms':>8} {'foretold':>8} {'bubble %':>8} {'foretold':>8} {'points off':>10}")
    for row in rows:
        print(
            f"{row['mode']:12} {row['step_ms']:8.1f} {row['expected_step_ms']:8.1f} {100 * row['bubble']:8.2f} "
            f"{100 * row['expected_bubble']:8.2f} {100 * (row['bubble'] - row['expected_bubble']):10.2f}"
        )
    print(json.dumps(rows))


def _measure(name: str, micro_batches: int, steps: int) -> dict[str, Any]:
    num_ranks, virtual = dist.get_world_size(), 2 if name in {"interleaved", "zbv"} else 1
    strategy: Any = hybrid.DistributedStrategy()
    strategy.pipeline = True
    strategy.pipeline_configs = {
        "degree": num_ranks,
        "accumulate_steps": micro_batches,
        "schedule": name,
        "virtual_stages": virtual,
        "split": "uniform",
    }
    layers = nn.Sequential(*(Sleeper(1 / virtual) for _ in range(num_ranks * virtual)))
    optimizer: Any = torch.optim.SGD(layers.parameters(), lr=0.1)
    model: Any = hybrid.distributed_model(layers, strategy=strategy)
    optimizer = hybrid.distributed_optimizer(optimizer)
    batch = torch.zeros(micro_batches, _WIDTH), torch.ones(micro_batches, _WIDTH)
    schedule = model.hybrid_runtime.stages.schedule
    expected = time_schedule(
        schedule, forward_seconds=_FORWARD_SECONDS / virtual, backward_seconds=_BACKWARD_SECONDS / virtual
    )
    bubbles, seconds = [], []
    for step in range(steps + 1):
        dist.barrier()
        _spans.clear()
        model.train_batch(batch, optimizer, loss_fn=functional.mse_loss)
        everyone: list[Any] = [None] * num_ranks
        dist.all_gather_object(everyone, list(_spans))
        if step == 0:
            continue
        # The clock is the machine's, the same for all processes.
        spans = [span for rank in everyone for span in rank]
        total = max(end for _, end in spans) - min(start for start, _ in spans)
        bubbles.append(1 - sum(end - start for start, end in spans) / (num_ranks * total))
        seconds.append(total)
    hybrid.shutdown()
    return {
        "mode": name,
        "bubble": statistics.median(bubbles),
        "expected_bubble": expected.bubble_fraction,
        "step_ms": statistics.median(seconds) * 1e3,
        "expected_step_ms": expected.total_seconds * 1e3,
    }
