"""The sum of one buffer per rank, always added in rank order.

Adding in one order makes a sum depend on the values alone: not on the algorithm that carried them, the
number of elements, the place of an element in its bucket, or the time at which a message came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

__all__ = ["combine"]

_LOW_PRECISION = (torch.bfloat16, torch.float16)
# Sums that have to be kept somewhere meanwhile are, in this many elements: small enough for the L2 cache.
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

    There is at least one other. The others are only read, and `out` may be one of them. bfloat16 and float16 are added
    in float32 and rounded once.
    """
    target = own if out is None else out
    if own.numel() == 0:
        return
    parts = {**others, rank: own}
    ordered = [parts[index] for index in sorted(parts)]
    if reduction == "sum" and own.dtype in _LOW_PRECISION:
        _combine_in_blocks(target, ordered, _PAIRWISE["sum"], dtype=torch.float32)
    elif len(ordered) == 2:
        _PAIRWISE[reduction](*ordered, out=target)
    else:
        _combine_in_blocks(target, ordered, _PAIRWISE[reduction], dtype=own.dtype)


def _combine_in_blocks(
    target: torch.Tensor,
    ordered: Sequence[torch.Tensor],
    pairwise: Callable[..., torch.Tensor],
    *,
    dtype: torch.dtype,
) -> None:
    accumulator = torch.empty(min(target.numel(), _BLOCK_ELEMENTS), dtype=dtype)
    for start in range(0, target.numel(), _BLOCK_ELEMENTS):
        end = min(start + _BLOCK_ELEMENTS, target.numel())
        block = accumulator[: end - start]
        block.copy_(ordered[0][start:end])
        for part in ordered[1:]:
            pairwise(block, part[start:end], out=block)
        target[start:end].copy_(block)
