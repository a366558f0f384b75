"""The sum of one buffer per rank, always added in rank order.

Adding in one order makes a sum depend on the values alone: not on the algorithm that carried them, the
number of elements, the place of an element in its bucket, or the time at which a message came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

__all__ = ["combine"]

_LOW_PRECISION = (torch.bfloat16, torch.float16)
# Low-precision sums pass through an fp32 accumulator of this many elements, small enough for the L2 cache.
_BLOCK_ELEMENTS = 1 << 15

_PAIRWISE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def combine(
    own: torch.Tensor,
    others: Mapping[int, torch.Tensor],
    *,
    rank: int,
    reduction: str,
    out: torch.Tensor | None = None,
) -> None:
    """`out` (by default `own`) becomes x0 + x1 + ... + xn-1, where `own` is x[rank] and the others are given by rank.

    There is at least one other. `others` may be overwritten, and `out` may be the first of them. bfloat16 and float16
    are added in float32 and rounded once.
    """
    target = own if out is None else out
    if own.numel() == 0:
        return
    if reduction == "sum" and own.dtype in _LOW_PRECISION:
        _sum_in_float32(target, {**others, rank: own})
        return
    pairwise = _PAIRWISE[reduction]
    before = [others[index] for index in sorted(others) if index < rank]
    if before:
        # x0 + ... + x[rank-1] in the first one's memory, then + own: addition of two numbers commutes.
        for part in before[1:]:
            pairwise(before[0], part, out=before[0])
        pairwise(own, before[0], out=target)
        own = target
    for index in sorted(others):
        if index > rank:
            pairwise(own, others[index], out=target)
            own = target


def _sum_in_float32(target: torch.Tensor, parts: Mapping[int, torch.Tensor]) -> None:
    ordered = [parts[index] for index in sorted(parts)]
    accumulator = torch.empty(min(target.numel(), _BLOCK_ELEMENTS), dtype=torch.float32)
    for start in range(0, target.numel(), _BLOCK_ELEMENTS):
        end = min(start + _BLOCK_ELEMENTS, target.numel())
        block = accumulator[: end - start]
        block.copy_(ordered[0][start:end])
        for part in ordered[1:]:
            block.add_(part[start:end])
        target[start:end].copy_(block)
