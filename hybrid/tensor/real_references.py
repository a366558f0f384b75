"""What a copy of a block still shares with the block itself: code that calls its layers, not those of the copy."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["real_reference"]

# What every module has, hooks among them: they are not copied.
_OF_TORCH = frozenset(vars(nn.Module()))


def real_reference(structure: nn.Module, model: nn.Module) -> str | None:
    """Of a copy of a part of `model`: where it reaches modules, parameters or buffers of the model itself.

    Functions and weak references are not copied with what holds them, and a class may say that it is its own copy.
    """
    real = {id(one) for one in (*model.modules(), *model.parameters(), *model.buffers())}
    for name, module in structure.named_modules():
        if id(module) in real:
            return name or "it"
    for name, tensor in (*structure.named_parameters(), *structure.named_buffers()):
        if id(tensor) in real:
            return name
    for name, module in structure.named_modules():
        for key, value in list(vars(module).items()):
            if key not in _OF_TORCH and _reaches(value, real):
                return ".".join(filter(None, (name, key)))
    return None


def _reaches(value: Any, real: set[int]) -> bool:
    seen: set[int] = set()
    kept = [value]  # alive, so that no id comes twice
    for one in kept:
        if id(one) in real:
            return True
        if id(one) not in seen:
            seen.add(id(one))
            kept += _held(one)
    return False


def _held(value: Any) -> Iterator[Any]:
    """What a container holds, or what a function has at hand."""
    match value:
        case nn.Module():
            yield from value.modules()
            yield from value.parameters()
        case torch.Tensor() | type():
            return
        case Mapping():
            yield from value.values()
        case list() | tuple() | set() | frozenset():
            yield from value
        case functools.partial():
            yield from (value.func, *value.args, *value.keywords.values())
        case types.MethodType():
            yield from (value.__self__, value.__func__)
        case types.BuiltinMethodType():
            yield value.__self__
        case weakref.ReferenceType():
            yield value()
        case types.FunctionType():
            yield from value.__defaults__ or ()
            yield from (value.__kwdefaults__ or {}).values()
            for cell in value.__closure__ or ():
                try:
                    yield cell.cell_contents
                except ValueError:  # nothing in it yet
                    continue
        case _:
            return
