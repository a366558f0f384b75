"""What crosses the cuts of a pipeline, and back: what a rank of a dry run receives from stages that are not there."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hybrid.collectives.group import Group
from hybrid.compose.own_forward import inputs_and_labels
from hybrid.compose.runtime import Runtime
from hybrid.dry.batch import Batch
from hybrid.pipeline.boundary import Crossing, put_together, take_apart
from hybrid.pipeline.own_forward import OwnForwardModel

__all__ = ["Crossings", "find_crossings"]


@dataclass(frozen=True, slots=True)
class _Value:
    """One tensor that crosses."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def new(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Crossings:
    """By chunk: what comes into it from the one before."""

    into: Mapping[int, tuple[Crossing, tuple[_Value, ...]]]

    def receive(self, group: Group, key: Hashable) -> tuple[Any, list[torch.Tensor]]:
        """An `Inbox`: activations come forward as they are, gradients back for each tensor that wants one."""
        assert isinstance(key, tuple)
        crossing, values = self.into[key[0]]
        if group.axis == "pp_forward":
            return crossing, [value.new() for value in values]
        wanted = crossing.wants_gradient
        return wanted, [value.new() for value, is_wanted in zip(values, wanted, strict=True) if is_wanted]


def find_crossings(runtime: Runtime, batch: Batch) -> Crossings:
    """One micro-batch through all chunks of a model whose rank has all of them.

    Args:
        runtime: of the wrapped model.
        batch: its sample is a micro-batch.
    """
    assert runtime.stages is not None
    staged = runtime.stages.staged
    into: dict[int, tuple[Crossing, tuple[_Value, ...]]] = {}
    value = batch.sample
    inside: AbstractContextManager[None] = nullcontext()
    if isinstance(staged, OwnForwardModel):
        inputs, _ = inputs_and_labels((batch.sample, None), has_loss_fn=True)
        inside = staged.batch([inputs], seed=0)
    with inside:
        for chunk in range(staged.num_chunks - 1):
            crossing, tensors = take_apart(staged.run_chunk(chunk, 0, value))
            values = tuple(_Value(tuple(one.shape), one.stride(), one.dtype) for one in tensors)
            into[chunk + 1] = (crossing, values)
            entered = [
                made.requires_grad_().clone() if wants_gradient else made
                for made, wants_gradient in zip((v.new() for v in values), crossing.wants_gradient, strict=True)
            ]
            value = put_together(crossing, entered)
    return Crossings(into)
