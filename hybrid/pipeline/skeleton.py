"""A copy of a model whose parameters have shapes and no memory, to be run for what its forward does."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

# The class has no public home in torch 2.13; this is a public module that has it.
from torch.fx.passes.fake_tensor_prop import FakeTensorMode

from hybrid.errors import ModelError

__all__ = ["FakeTensorMode", "fake_like", "is_fake", "on_cpu", "skeleton_of"]


def skeleton_of(model: nn.Module, fakes: FakeTensorMode, *, units: Sequence[str]) -> nn.Module:
    """The copy. Buffers outside units keep their values: a forward may decide by them.

    Raises:
        ModelError: something in the model cannot be copied.
    """
    inside = {id(buffer) for name in units for buffer in model.get_submodule(name).buffers()}
    replaced: dict[int, object] = {}
    for parameter in model.parameters():
        replaced[id(parameter)] = nn.Parameter(fake_like(parameter, fakes), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.is_meta or id(buffer) in inside:
            replaced[id(buffer)] = fake_like(buffer, fakes)
    try:
        skeleton = copy.deepcopy(model, replaced)
    except Exception as error:
        raise ModelError(
            f"a pipeline of a {type(model).__name__} needs a copy of it without memory, to see what its forward does, "
            f"and it cannot be copied ({type(error).__name__}: {error}). Write it as a hybrid.PipelineLayer, or set "
            "pipeline_configs.degree = 1"
        ) from error
    for buffer in skeleton.buffers():  # those that are kept lie where the rest is
        if buffer.device.type not in {"cpu", "meta"}:
            buffer.data = buffer.data.cpu()
    return skeleton


def fake_like(tensor: torch.Tensor, fakes: FakeTensorMode, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of the same shape, strides and type (or `dtype`) without memory, on the CPU."""
    with fakes:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values."""
    return hasattr(tensor, "fake_mode")


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """An input with its values on the CPU; with zeros, if it has none."""
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.detach().cpu()
