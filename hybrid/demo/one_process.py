"""The demo's training in one plain process: what every layout has to give."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader

from hybrid.data.sampler import DistributedBatchSampler
from hybrid.demo.corpus import ByteWindows
from hybrid.demo.gpt import GPT

__all__ = ["plain_losses"]

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def plain_losses(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    train_set: ByteWindows,
    *,
    batch: int,
    steps: int,
    max_norm: float | None,
    loss_fn: LossFunction,
) -> list[float]:
    """The losses of the first steps, in nats per byte.

    Args:
        batch: sequences per step, those of all data-parallel ranks; the sampler takes them in the same order.
    """
    sampler = DistributedBatchSampler(train_set, batch, num_replicas=1, rank=0, shuffle=True, drop_last=True, seed=0)
    losses = []
    for inputs, labels in _some(DataLoader(train_set, batch_sampler=sampler, generator=torch.Generator()), steps):
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), labels)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


Batch = tuple[torch.Tensor, torch.Tensor]


def _some(loader: DataLoader[Batch], count: int) -> Iterator[Batch]:
    """The first batches, epoch after epoch."""
    while True:
        for batch in loader:
            if not count:
                return
            yield batch
            count -= 1
        if not count:
            return
