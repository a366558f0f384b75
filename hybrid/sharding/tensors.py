"""Facts about tensors: which are inside whatever a module returns, how they lie in memory, who else sees it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hybrid import shims

__all__ = ["HELD_ONCE", "own_strides", "owns_its_memory", "same_bits", "tensors_in"]


def _references_of_a_local() -> int:
    value = object()
    return sys.getrefcount(value)


HELD_ONCE = _references_of_a_local()
"""What `sys.getrefcount` says of an object that one local variable holds."""


def tensors_in(value: Any, *, all_of_them: bool = False) -> Iterator[torch.Tensor]:
    """Every tensor that has a gradient to come, in dicts, lists, tuples, sets, dataclasses and plain objects.

    With `all_of_them`, those without one as well. Each tensor once; objects are looked into once, so cycles end.
    """
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if id(item) in seen or item is None or isinstance(item, str | bytes | int | float | complex | bool):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if all_of_them or item.requires_grad:
                yield item
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(item)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            stack.extend(getattr(item, field.name, None) for field in dataclasses.fields(item))
        elif not callable(item) and hasattr(item, "__dict__"):
            stack.extend(vars(item).values())


def own_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's strides if its elements fill a contiguous range of memory, else those of a contiguous tensor.

    A flat view with these strides keeps channels-last and transposed weights as they are.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    if parameter.numel() == 0 or span == parameter.numel():
        return parameter.stride()
    strides: list[int] = []
    step = 1
    for size in reversed(parameter.shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def owns_its_memory(tensor: torch.Tensor) -> bool:
    """Whether no other tensor sees any of the memory of this one, and it lies in all of it.

    Autograd may give two parameters gradients over the same memory (views of what came from above), and under
    `create_graph` one that its graph goes on with.
    """
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or torch.is_grad_enabled():
        return False
    fills = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return fills and shims.is_sole_user_of_memory(tensor)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two flat tensors of one dtype and length hold the same bits; in words, which is as fast as memory is."""
    wide = torch.int64.itemsize
    tensors = (one, other)
    if one.nbytes % wide == 0 and all(t.storage_offset() * t.element_size() % wide == 0 for t in tensors):
        one, other = (t.view(torch.int64) for t in tensors)
    return torch.equal(one, other)
