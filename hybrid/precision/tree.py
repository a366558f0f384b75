"""Apply a function to every tensor of whatever a module takes or returns, keeping the containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["map_leaves", "map_tensors"]


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of the containers with mapped tensors; other objects are the same objects."""
    return map_leaves(value, torch.Tensor, function)


def map_leaves(value: Any, kind: type[Any], function: Callable[[Any], Any]) -> Any:
    """A copy of the containers with the objects of this kind mapped; other objects are the same objects."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        named: Any = value
        return _with_attributes(named._make(map_leaves(item, kind, function) for item in value), value)
    if isinstance(value, list | tuple):
        return _with_attributes(_made(value, [map_leaves(item, kind, function) for item in value]), value)
    if type(value) is dict:
        return {key: map_leaves(item, kind, function) for key, item in value.items()}
    if isinstance(value, Mapping):
        changed = {key: map_leaves(item, kind, function) for key, item in value.items()}
        return _changed_mapping(value, changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _changed(value, kind, function)
    return value


def _made(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """A list or tuple of this class: its constructor, which may do anything with what it gets, is not called."""
    cls: Any = type(value)
    if cls is list or cls is tuple:
        return cls(items)
    if isinstance(value, tuple):
        try:
            return tuple.__new__(cls, items)
        except TypeError:  # made in C, as torch.Size
            return cls(items)
    made = copy.copy(value)
    list.__setitem__(made, slice(None), items)
    return made


def _changed_mapping(value: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """A mapping may be of a class with its own constructor (a model output): copy it, then replace the values."""
    try:
        mapped: Any = copy.copy(value)
        for key, new in changed.items():
            if new is not value[key]:
                mapped[key] = new
        return mapped
    except TypeError:  # its constructor wants its fields, or nobody may write to it
        pass
    try:
        return type(value)(**changed)
    except TypeError:
        made: Any = type(value)
        return made(changed)


def _with_attributes(mapped: Any, value: Any) -> Any:
    """A list or tuple of a class of its own may carry attributes."""
    if getattr(value, "__dict__", None):
        vars(mapped).update(vars(value))
    return mapped


def _changed(value: Any, kind: type[Any], function: Callable[[Any], Any]) -> Any:
    """A copy of a dataclass with mapped fields, whatever its constructor takes or does, frozen or not."""
    try:
        new = copy.copy(value)
    except dataclasses.FrozenInstanceError:  # slots written by hand, which copy sets one by one
        new = object.__new__(type(value))
        state: Any = object.__getstate__(value)
        for name, item in state[1].items():
            object.__setattr__(new, name, item)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(new, field.name, map_leaves(getattr(value, field.name), kind, function))
    return new
