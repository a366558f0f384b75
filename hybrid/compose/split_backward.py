"""Prepares a model for schedules that split the backward: attention that can put off the gradients of its weights."""

from __future__ import annotations

from torch import nn

from hybrid.collectives.ops import Group
from hybrid.tensor.attention import ParallelMultiheadAttention

__all__ = ["split_backward"]


def split_backward(model: nn.Module, group: Group) -> None:
    """Let attention projections leave the gradients of their weights to W, as linear layers do.

    What is cut over the tp ranks does so by itself. torch's own attention hands its weights to one function that does
    not; as one cut over `group`, whose only rank holds all heads, it does.
    """
    if group.size == 1:
        for module in list(model.modules()):
            if type(module) is nn.MultiheadAttention and "forward" not in vars(module):
                ParallelMultiheadAttention.adopt(module, group=group)
