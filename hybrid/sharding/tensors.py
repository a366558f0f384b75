"""Facts about tensors: which are inside whatever a module returns, how they lie in memory, who else sees it."""

from __future__ import annotations

import dataclasses
import gc
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from hybrid import shims

__all__ = ["HELD_ONCE", "attribute_tensors", "carried", "own_strides", "owns_its_memory", "same_bits", "tensors_in"]


def _references_of_a_local() -> int:
    value = object()
    return sys.getrefcount(value)


HELD_ONCE = _references_of_a_local()
"""What `sys.getrefcount` says of an object that one local variable holds."""


def tensors_in(value: Any, *, all_of_them: bool = False) -> Iterator[torch.Tensor]:
    """Every tensor that has a gradient to come, in containers and objects of any kind, also in what a function holds.

    With `all_of_them`, those without one as well. Each tensor once; objects are looked into once, so cycles end. What
    a generator would give is not asked for. Of a module what it keeps beside its parameters, buffers and children.
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
            stack.extend(key for key in item if isinstance(key, torch.Tensor))
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(item)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            stack.extend(getattr(item, field.name, None) for field in dataclasses.fields(item))
        elif isinstance(item, torch.nn.Module):
            kept = (value for value in vars(item).values() if isinstance(value, torch.Tensor))
            stack.extend(tensor for tensor in kept if tensor.grad_fn is not None)
        elif isinstance(item, types.FunctionType):
            stack += [item.__closure__, item.__defaults__, item.__kwdefaults__]
        elif not isinstance(item, type | types.ModuleType | types.CodeType):
            # What the garbage collector would follow: attributes, slots, items, what an iterator is still to give.
            stack += gc.get_referents(item)


def attribute_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Tensors with a graph that modules keep as attributes (an auxiliary loss): backward may start from them."""
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is torch.Tensor:
                if value.grad_fn is not None:
                    yield value
            elif type(value) in (list, tuple, dict) and not name.startswith("_"):
                yield from (t for t in tensors_in(value) if t.grad_fn is not None)


def carried(values: Iterable[Any]) -> Mapping[int, torch.Tensor]:
    """By id, the tensors with a gradient to come that lie in containers and objects among these values.

    It does not keep them alive.
    """
    carriers = [value for value in values if not (value is None or isinstance(value, torch.Tensor | int | float | str))]
    found: Iterable[torch.Tensor] = tensors_in(carriers) if carriers else ()
    return weakref.WeakValueDictionary({id(tensor): tensor for tensor in found}) if carriers else {}


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
