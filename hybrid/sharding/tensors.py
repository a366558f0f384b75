"""The tensors inside whatever a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["tensors_in"]


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
