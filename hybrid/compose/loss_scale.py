"""Loss scaling in train_batch: gradients unscaled on every rank, one decision for the world, one scale on all ranks.

`GradScaler` looks at the gradients of one rank's optimizer. A stage of a pipeline may have none, in this step or ever,
and would neither take part in the decision nor be able to update its scale. So the decision is made here, over all
gradients, and told to each rank's scaler as what it found.
"""

from __future__ import annotations

import torch
from torch import nn

from hybrid.collectives import ops
from hybrid.compose.runtime import Runtime

__all__ = ["record_overflow", "unscale_gradients"]


def unscale_gradients(runtime: Runtime, scaler: torch.amp.GradScaler) -> bool:
    """Divide all settled gradients by the loss scale; returns whether one of them is not finite. *Collective.*"""
    device = runtime.engine.device
    inverse = torch.tensor(1.0 / scaler.get_scale(), dtype=torch.float64, device=device).float()
    overflow = torch.zeros(1, dtype=torch.float64, device=device)
    for bucket in runtime.engine.buckets:
        if bucket.settled is None:
            continue
        for view in bucket.own_views(bucket.settled):
            overflow += (~torch.isfinite(view)).any().to(device)
            view.mul_(inverse.to(view.device))
    ops.all_reduce(overflow, group=runtime.mesh.world, op="max", control=True).wait()
    return bool(overflow.item() > 0)


def record_overflow(scaler: torch.amp.GradScaler, *, overflow: bool, device: torch.device) -> None:
    """Let a scaler go on as if it had found this in its optimizer's gradients: its next scale."""
    scaler.scale(torch.zeros((), device=device))  # on a rank that had no loss it has not begun
    probe = nn.Parameter(torch.zeros(1, device=device))
    probe.grad = torch.full((1,), float("inf") if overflow else 0.0, device=device)
    scaler.unscale_(torch.optim.SGD([probe], lr=0.0))
    scaler.update()
