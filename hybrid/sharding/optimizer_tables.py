"""What an optimizer keeps for each parameter beside `state`, where the engine can neither cut nor find it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["OwnTable", "find_own_table"]

_OF_TORCH = frozenset({"state", "param_groups", "defaults"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTable:
    """An attribute with something for each parameter.

    by_place: whether a parameter is found in it by its place among the others; else by the parameter itself.
    """

    attribute: str
    by_place: bool


def find_own_table(optimizer: torch.optim.Optimizer) -> OwnTable | None:
    """The first such attribute. Lists of `param_groups` themselves are none: while it steps they hold the slices."""
    groups = optimizer.param_groups
    alike = [shapes for group in groups if len(shapes := [tuple(p.shape) for p in group["params"]]) > 1]
    known = {id(p) for group in groups for p in group["params"]}
    own_lists = {id(groups), *(id(group) for group in groups), *(id(group["params"]) for group in groups)}
    for attribute, value in vars(optimizer).items():
        if attribute not in _OF_TORCH:
            by_place = _by_place(value, known, own_lists, alike, depth=3)
            if by_place is not None:
                return OwnTable(attribute=attribute, by_place=by_place)
    return None


def _by_place(
    value: Any, known: set[int], own_lists: set[int], alike: list[list[tuple[int, ...]]], *, depth: int
) -> bool | None:
    if isinstance(value, torch.Tensor):
        return False if id(value) in known else None
    if depth == 0 or id(value) in own_lists:
        return None
    if isinstance(value, Mapping):
        if any(id(key) in known or (type(key) is int and key in known) for key in value):
            return False
        items = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        items = list(value)
        places = [tuple(item.shape) for item in items if isinstance(item, torch.Tensor) and id(item) not in known]
        if any(_comes_in_order(shapes, places) for shapes in alike):
            return True
    else:
        return None
    found = (_by_place(item, known, own_lists, alike, depth=depth - 1) for item in items)
    return next((by_place for by_place in found if by_place is not None), None)


def _comes_in_order(shapes: list[tuple[int, ...]], among: list[tuple[int, ...]]) -> bool:
    """Whether these come in this order among others: those of a pipeline's other stages may lie between them."""
    rest = iter(among)
    return all(shape in rest for shape in shapes)
