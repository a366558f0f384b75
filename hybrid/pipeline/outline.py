"""What a unit returned, without its tensors: enough to return the like of it where the unit does not run.

A tensor is known by its path in the output: "" if it is the output, "0" the first of a tuple, "past.1" and so on; one
that stands in several places by the first of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from hybrid.precision.tree import map_leaves, map_tensors

__all__ = ["Given", "Outline", "Returned", "leaf_of", "map_with_paths", "outline_of", "tensors_by_path"]


class Given(NamedTuple):
    """Stands for a tensor that the unit returned as it was given it."""

    path: str
    """In its arguments."""


class Returned(NamedTuple):
    """Stands for a tensor that the unit made."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Outline:
    """The containers of an output, with `Given` and `Returned` in the places of tensors.

    Not itself a container, so that nothing that walks through values walks into it.
    """

    __slots__ = ("tree",)

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def filled(self, returned: Callable[[Returned], Any], given: Callable[[str], Any]) -> Any:
        """The output again: with what these give for the tensors in it."""

        def fill(leaf: Given | Returned) -> Any:
            return given(leaf.path) if isinstance(leaf, Given) else returned(leaf)

        return map_leaves(self.tree, _LEAVES, fill)


_LEAVES: Any = (Given, Returned)


def outline_of(
    output: Any, passes: Mapping[str, str], known: dict[Returned, Returned]
) -> tuple[Outline, dict[str, torch.Tensor]]:
    """The outline, and the tensors that the unit made, by path.

    Args:
        passes: path of an output -> path of the input that it is.
        known: equal leaves become one object, which travels once in a message of many.
    """
    made: dict[str, torch.Tensor] = {}

    def place(path: str, tensor: torch.Tensor) -> Given | Returned:
        if path in passes:
            return Given(passes[path])
        made[path] = tensor
        return leaf_of(path, tensor, known)

    return Outline(map_with_paths(output, place)), made


def leaf_of(path: str, tensor: torch.Tensor, known: dict[Returned, Returned]) -> Returned:
    """What stands for a tensor in an outline; `known` as there."""
    leaf = Returned(path, tuple(tensor.shape), tensor.dtype)
    return known.setdefault(leaf, leaf)


def map_with_paths(value: Any, function: Callable[[str, torch.Tensor], Any]) -> Any:
    """As `map_tensors`; the function gets the first path of the tensor as well."""
    if isinstance(value, torch.Tensor):
        return function("", value)
    paths, first = _paths(value, ""), dict[int, str]()

    def mapped(tensor: torch.Tensor) -> Any:
        path = first.setdefault(id(tensor), next(paths))
        return function(path, tensor)

    return map_tensors(value, mapped)


def tensors_by_path(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the arguments of a call, under all of their paths: "0" or the name, and so on."""
    found: dict[str, torch.Tensor] = {}
    for key, value in (*enumerate(args), *kwargs.items()):
        _collect(value, str(key), found)
    return found


def _collect(value: Any, path: str, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[path] = value
    else:
        for key, item in _items(value):
            _collect(item, f"{path}.{key}", found)


def _paths(value: Any, path: str) -> Iterator[str]:
    """Of all tensors in a value, in the order in which `map_tensors` comes to them."""
    if isinstance(value, torch.Tensor):
        yield path
    else:
        for key, item in _items(value):
            yield from _paths(item, f"{path}.{key}" if path else str(key))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, Mapping):
        yield from value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name))
