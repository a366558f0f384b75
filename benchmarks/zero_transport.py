"""FSDP2 on the exchange of `hybrid.collectives`: what its engine is worth without gloo's own collectives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybrid.collectives import ops

__all__ = ["use_our_exchange"]


class _Work(dist.Work):
    """A handle of ours, as FSDP2 waits for it."""

    def __init__(self, handle: ops.Handle) -> None:
        super().__init__()
        self._handle = handle

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._handle.wait()
        return True


class _Exchange:
    """What both collectives share: memory as FSDP2 allocates it by default, and the group."""

    def __init__(self, group: ops.Group) -> None:
        self._group = group
        self._tags = itertools.count()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Exchange):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """`input_tensor` is this rank's part of `output_tensor` already, where FSDP2 has copied it."""
        bounds = ops.even_bounds(output_tensor.numel(), self._group.size)
        own = output_tensor[bounds[self._group.rank] : bounds[self._group.rank + 1]]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        handle = ops.all_gather(output_tensor, bounds=bounds, group=self._group)
        if async_op:
            return _Work(handle)
        handle.wait()
        return None


class _ReduceScatter(_Exchange):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """`input_tensor` is FSDP2's own copy of the gradients; it is not read again."""
        bounds = ops.even_bounds(input_tensor.numel(), self._group.size)
        ops.reduce_scatter(input_tensor, bounds=bounds, group=self._group).wait()
        own = input_tensor[bounds[self._group.rank] : bounds[self._group.rank + 1]]
        if op == dist.ReduceOp.AVG:
            torch.div(own, self._group.size, out=output_tensor)
        else:
            assert op == dist.ReduceOp.SUM, op
            output_tensor.copy_(own)
        return None


def use_our_exchange(model: nn.Module, modules: Sequence[Any]) -> None:
    """Give each of these modules, to which `fully_shard` was applied, the exchange over the whole world."""
    group = ops.Group(
        process_group=dist.group.WORLD,
        ranks=tuple(range(dist.get_world_size())),
        rank=dist.get_rank(),
        axis="dp_shard",
    )
    for module in modules:
        module.set_custom_all_gather(_AllGather(group))
        module.set_custom_reduce_scatter(_ReduceScatter(group))
