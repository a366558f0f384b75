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
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(item, kind, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_leaves(item, kind, function) for item in value)
    if isinstance(value, Mapping):
        # A mapping may be of a class with its own constructor (a model output): copy it, then replace the values.
        changed = {key: map_leaves(item, kind, function) for key, item in value.items()}
        try:
            mapped = copy.copy(value)
        except TypeError:  # its constructor wants its fields
            return type(value)(**changed)
        for key, new in changed.items():
            if new is not value[key]:
                mapped[key] = new  # type: ignore[index]
        return mapped
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            f.name: map_leaves(getattr(value, f.name), kind, function) for f in dataclasses.fields(value) if f.init
        }
        return dataclasses.replace(value, **changes)
    return value
