"""Other tensors in the places of a model's buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

__all__ = ["replace_buffers"]


def replace_buffers(model: nn.Module, others: Mapping[int, torch.Tensor]) -> None:
    """Put `others` (id of a buffer -> what takes its place) wherever modules have those buffers, under any name."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) in others:
                setattr(module, name, others[id(buffer)])
        for name, value in list(vars(module).items()):
            if id(value) in others:  # a second, plain name for a buffer
                setattr(module, name, others[id(value)])
