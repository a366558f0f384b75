"""Objects of classes that nobody can walk through, which would carry tensors past everybody."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hybrid.collectives.point_to_point import as_sent
from hybrid.errors import ModelError
from hybrid.pipeline.skeleton import is_fake
from hybrid.precision.tree import map_tensors

__all__ = ["check_objects", "why_it_stays"]


def check_objects(unit: str, value: Any, what: str) -> None:
    """Raises ModelError: tensors in an object that nobody can walk through."""
    for found in _objects(value):
        if any(isinstance(item, torch.Tensor) and is_fake(item) for item in _held_by(found)):
            raise ModelError(
                f"{unit!r} {what} a {type(found).__name__} that holds tensors: what is in an object of a class of its "
                "own cannot be followed from stage to stage. Make the class a dataclass, or pass tensors in dicts, "
                "lists and tuples"
            )


def why_it_stays(value: Any) -> str:
    """Why what a unit returns cannot go on to another stage, beside its tensors; "" if it can."""
    kinds = (torch.Tensor, type(None), bool, int, float)
    items = value if type(value) in (tuple, list) else value.values() if type(value) is dict else (value,)
    if all(isinstance(item, kinds) for item in items):
        return ""
    try:
        as_sent(map_tensors(value, lambda tensor: None), to="other stages of the pipeline")
    except ModelError as error:
        return str(error)
    return ""


def _objects(value: Any) -> list[Any]:
    found: list[Any] = []

    def walk(item: Any) -> None:
        if isinstance(item, torch.Tensor | str | bytes | int | float | complex | type | torch.dtype | torch.device):
            return
        if isinstance(item, Mapping):
            for one in item.values():
                walk(one)
        elif isinstance(item, list | tuple):
            for one in item:
                walk(one)
        elif item is not None and not hasattr(type(item), "__dataclass_fields__"):
            found.append(item)

    walk(value)
    return found


def _held_by(thing: Any, depth: int = 2) -> Iterator[Any]:
    slots = (name for cls in type(thing).__mro__ for name in _names(vars(cls).get("__slots__", ())))
    held = [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in slots)]
    held += thing if isinstance(thing, deque | set | frozenset) else ()
    for item in held:
        for one in item if isinstance(item, list | tuple) else item.values() if isinstance(item, dict) else (item,):
            yield one
            if depth > 1 and not isinstance(one, torch.Tensor | nn.Module | type):
                yield from _held_by(one, depth - 1)


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots
