"""`train_batch` with those who watch: a profile, callbacks. Without any it is `train_step.train_batch` alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hybrid.compose.runtime import Runtime
from hybrid.compose.train_step import StepResult, train_batch

__all__ = ["watched_train_batch"]


def watched_train_batch(
    model: nn.Module, runtime: Runtime, batch: Any, optimizer: torch.optim.Optimizer | None, **options: Any
) -> StepResult:
    """As `train_batch`; the options are its own."""
    profiling, callbacks = runtime.profiling, runtime.step_callbacks
    # Before the schedule moves on: a record has the rates of its own step.
    lr = tuple(group.get("lr", 0.0) for group in optimizer.param_groups) if callbacks and optimizer else ()
    if profiling is None:
        result = train_batch(model, runtime, batch, optimizer, **options)
    else:
        with profiling.step():
            result = train_batch(model, runtime, batch, optimizer, **options)
    if callbacks and options.get("step", True):
        callbacks.tell(runtime, result, lr)
    if profiling is not None:
        profiling.after_step(runtime, tokens=result.totals[3])
    return result
