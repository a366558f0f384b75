"""What crosses from one chunk to the next: any tree of tensors, numbers and None, taken apart and put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybrid.precision.tree import map_leaves, map_tensors

__all__ = ["Crossing", "put_together", "take_apart"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for the tensor with this number."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value without its tensors; `wants_gradient` tells which of them are part of a graph where they come from."""

    tree: Any
    wants_gradient: tuple[bool, ...]


def take_apart(value: Any) -> tuple[Crossing, list[torch.Tensor]]:
    """The containers, and the tensors in them; one that stands in several places is one tensor."""
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}

    def place(tensor: torch.Tensor) -> _Place:
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return _Place(numbers[id(tensor)])

    tree = map_tensors(value, place)
    return Crossing(tree=tree, wants_gradient=tuple(t.requires_grad for t in tensors)), tensors


def put_together(crossing: Crossing, tensors: Sequence[torch.Tensor]) -> Any:
    """The value with these tensors in it."""
    return map_leaves(crossing.tree, _Place, lambda place: tensors[place.number])
