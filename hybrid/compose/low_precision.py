"""Mixed precision as part of the whole: forwards that cast, and the parameters that become low precision."""

from __future__ import annotations

import torch
from torch import nn

from hybrid.compose.pipeline import Stages, known_here
from hybrid.mesh import Mesh
from hybrid.precision.casting import autocasting, compute_dtypes, install_casts
from hybrid.strategy import ResolvedStrategy

__all__ = ["install_precision"]


def install_precision(
    model: nn.Module, resolved: ResolvedStrategy, mesh: Mesh, stages: Stages | None
) -> dict[str, torch.dtype]:
    """Wrap forwards; returns the parameters that become low precision, with their dtype (level O2)."""
    amp = resolved.amp
    assert amp is not None
    dtype: torch.dtype = getattr(torch, amp.dtype)
    custom_fp32 = known_here(amp.custom_fp32, model, stages)
    low = compute_dtypes(model, dtype=dtype, custom_fp32=custom_fp32)
    install_casts(model, custom_fp32=custom_fp32, norms=amp.level == "O2")
    # Between the chunks of a pipeline a value crosses as it is; the last one's output is the model's.
    is_output = None if stages is None else stages.staged.runs_last_chunk
    model.forward = autocasting(model, dtype=dtype, device_type=mesh.device.type, is_output=is_output)
    if amp.level == "O1":
        return {}
    for fqn, parameter in model.named_parameters():
        if fqn in low and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)  # has no master, at any stage
    return low if stages is None else {stages.whole.first[fqn]: lower for fqn, lower in low.items()}
