"""`distributed_scaler`: Fleet's call, kept for scripts that make it."""

from __future__ import annotations

import torch

from hybrid.errors import OptimizerError

__all__ = ["distributed_scaler"]


def distributed_scaler(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """Check a scaler and return it. A plain `GradScaler` needs no rewriting here.

    A distributed optimizer's gradients are unscaled in the shards, and whether one overflowed is decided for the
    world, whenever the scaler asks; so all ranks skip alike and keep the same scale.

    Raises:
        OptimizerError: not a `torch.amp.GradScaler`.
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        raise OptimizerError(f"distributed_scaler needs a torch.amp.GradScaler, got {type(scaler).__name__}")
    return scaler
