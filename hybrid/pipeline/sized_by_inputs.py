"""Operations outside units whose result is as large as the model's inputs say, while what is in it is not known.

x[mask], x.masked_select(mask)     as many elements as the mask chooses
pack_padded_sequence(x, lengths)   as many steps as the lengths add up to
ctc_loss(x, labels)                as its labels
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybrid.pipeline.skeleton import FakeTensorMode, fake_like, is_fake
from hybrid.precision.tree import map_tensors

__all__ = ["run_on_zeros", "wants_values", "with_known_masks"]

_INDEX = torch.ops.aten.index.Tensor
_SELECT = torch.ops.aten.masked_select.default
# They tell none of the values that they want: what comes out is as large for zeros.
_ON_ZEROS = ("_ctc_loss", "_pack_padded_sequence")
# torch's for an operation on tensors without values that would have to look at them.
_WANTED = ("DynamicOutputShapeException", "DataDependentOutputException")


def with_known_masks(
    func: Any, args: tuple[Any, ...], *, is_known: Callable[[torch.Tensor], bool]
) -> tuple[Any, tuple[Any, ...]]:
    """The operation, or one with indices in the place of masks that are known.

    Args:
        is_known: whether a tensor has the values that it has in every forward with these inputs.
    """
    if func is _SELECT and is_known(args[1]):
        value, mask = args
        shape = torch.broadcast_shapes(value.shape, mask.shape)
        return _INDEX, (value.expand(shape), list(mask.expand(shape).nonzero(as_tuple=True)))
    if func is not _INDEX or not any(map(_is_mask, args[1])):
        return func, args
    indices: list[torch.Tensor | None] = []
    for index in args[1]:
        if _is_mask(index) and is_known(index):
            indices += index.nonzero(as_tuple=True)
        else:
            indices.append(index)
    return func, (args[0], indices)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in {torch.bool, torch.uint8}


def run_on_zeros(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], fakes: FakeTensorMode
) -> tuple[Any, bool]:
    """(what an operation gives, whether it is one of those that run on zeros). Sizes among the results are real."""
    if name not in _ON_ZEROS:
        return None, False
    real: Sequence[Any] = [
        map_tensors(value, lambda t: torch.zeros(t.shape, dtype=t.dtype) if is_fake(t) else t)
        for value in (args, kwargs)
    ]
    output = func(*real[0], **real[1])
    return map_tensors(output, lambda t: fake_like(t, fakes) if t.is_floating_point() else t), True


def wants_values(error: Exception) -> bool:
    """Whether an operation failed since it would have had to look at values."""
    return type(error).__name__ in _WANTED
