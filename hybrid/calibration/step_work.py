"""What `train_batch` takes beside the model: a model of a few numbers, with one micro-batch and with several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from hybrid.calibration.clock import Clock
from hybrid.compose import context
from hybrid.compose.model import distributed_model
from hybrid.compose.optimizer import distributed_optimizer
from hybrid.contracts.measurements import CollectivePoint, Launch, StepCosts
from hybrid.strategy import DistributedStrategy

__all__ = ["step_costs"]

_WIDTH = 16
_KERNELS = 4  # two linear layers, an activation function, a loss
_MICRO_BATCHES = 5


def step_costs(
    clock: Clock, launch: Launch, all_reduce: Sequence[CollectivePoint], *, timeout_seconds: float
) -> StepCosts:
    """Of a step of this library, without what the planner counts apart.

    Args:
        launch: what a kernel of the model costs.
        all_reduce: of the world, for the reduction of its gradients.
    """
    one, one_spread = _step_seconds(clock, 1, timeout_seconds=timeout_seconds)
    several, several_spread = _step_seconds(clock, _MICRO_BATCHES, timeout_seconds=timeout_seconds)
    micro_batch = max(0.0, (several - one) / (_MICRO_BATCHES - 1))
    kernels = _KERNELS * launch.forward_seconds * (1 + launch.backward_factor)
    reduction = min((point.seconds for point in all_reduce), default=0.0)
    return StepCosts(
        step_seconds=max(0.0, one - micro_batch - reduction),
        micro_batch_seconds=max(0.0, micro_batch - kernels) / 2,
        spread=max(one_spread, several_spread),
    )


def _step_seconds(clock: Clock, num_micro_batches: int, *, timeout_seconds: float) -> tuple[float, float]:
    strategy = DistributedStrategy({"accumulate_steps": num_micro_batches, "timeout_seconds": timeout_seconds})
    model = distributed_model(
        nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _WIDTH)), strategy=strategy
    )
    try:
        optimizer = distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
        device = next(model.parameters()).device
        batch = (
            torch.zeros(num_micro_batches, _WIDTH, device=device),
            torch.zeros(num_micro_batches, _WIDTH, device=device),
        )
        timed = clock.together(lambda: model.train_batch(batch, optimizer, loss_fn=functional.mse_loss))
        return timed.seconds, timed.spread
    finally:
        context.shutdown()
