"""Collectives on NCCL, by torch's own operations.

No stream is named here: NCCL runs on its own stream, which starts after the work that the current stream has
been given at the launch, and `wait` makes the current stream (not the host) wait for it. Buffers are kept by
the call until then, so that no `record_stream` is needed.

NCCL knows no complex numbers, and of 16-bit numbers the floating ones only: sums of complex numbers go as those of
their parts, and what is only moved goes as bytes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist

from hybrid.collectives.call import Call

__all__ = ["Native"]

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Native:
    """A call given to torch. Uneven shards go one by one: reduce to, or broadcast from, their owner."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._works = _launch(call)

    def finish(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        call = self._call
        if call.out is not None and not _is_even(call):
            assert call.buffer is not None
            call.out.copy_(call.buffer[call.bounds[call.group.rank] : call.bounds[call.group.rank + 1]])


def _is_even(call: Call) -> bool:
    return len({end - start for start, end in pairwise(call.bounds)}) == 1


def _launch(call: Call) -> list[dist.Work]:
    group, process_group = call.group, call.group.process_group
    buffer, out, bounds = _known(call)
    if call.op == "all_reduce":
        reduction = _REDUCTIONS[call.reduction]
        return [_work(dist.all_reduce(buffer, op=reduction, group=process_group, async_op=True))]
    if call.op == "broadcast":
        return [_work(dist.broadcast(buffer, group=process_group, async_op=True, group_src=call.source))]
    shards = [buffer[start:end] for start, end in pairwise(bounds)]
    own = shards[group.rank]
    if _is_even(call):
        whole = buffer[bounds[0] : bounds[-1]]
        if call.op == "reduce_scatter":
            into = own if out is None else out
            return [_work(dist.reduce_scatter_single(into, whole, group=process_group, async_op=True))]
        return [_work(dist.all_gather_single(whole, own, group=process_group, async_op=True))]
    works = []
    for index, shard in enumerate(shards):
        if not shard.numel():
            continue
        if call.op == "reduce_scatter":
            works.append(_work(dist.reduce(shard, group=process_group, async_op=True, group_dst=index)))
        else:
            works.append(_work(dist.broadcast(shard, group=process_group, async_op=True, group_src=index)))
    return works


def _known(call: Call) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
    """Buffer, out and bounds of a call, as elements of a type that NCCL knows."""
    buffer, out = call.buffer, call.out
    assert buffer is not None
    if call.op in ("broadcast", "all_gather"):
        if buffer.dtype.is_floating_point:
            return buffer, out, list(call.bounds)
        return buffer.view(torch.uint8), out, [bound * buffer.element_size() for bound in call.bounds]
    if not buffer.is_complex():
        return buffer, out, list(call.bounds)
    parts = None if out is None else torch.view_as_real(out).view(-1)
    return torch.view_as_real(buffer).view(-1), parts, [2 * bound for bound in call.bounds]


def _work(work: dist.Work | torch.Tensor | None) -> dist.Work:
    return cast(dist.Work, work)
