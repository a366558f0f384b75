"""What crosses from one chunk to the next: any tree of tensors, numbers and None, taken apart and put together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid import shims
from hybrid.errors import ModelError
from hybrid.precision.tree import map_leaves, map_tensors

__all__ = [
    "Crossing",
    "check_tensors",
    "full_cache",
    "memories_of",
    "put_together",
    "take_apart",
    "with_own_memory",
]


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
    wants_gradient = tuple(tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors)
    return Crossing(tree=tree, wants_gradient=wants_gradient), tensors


def put_together(crossing: Crossing, tensors: Sequence[torch.Tensor]) -> Any:
    """The value with these tensors in it."""
    return map_leaves(crossing.tree, _Place, lambda place: tensors[place.number])


# -- before a value is sent ----------------------------------------------------------------------------------------


def full_cache(unit: str, name: str, length: int) -> str:
    """Why a cache of a unit cannot be left out."""
    return (
        f"{unit!r} is given a cache of {length} positions ({name}): what other calls put into a cache does not travel "
        "from stage to stage of a pipeline. Train without one (model.config.use_cache = False); if the split names a "
        "module in a block, whose parts fill the cache one for the other, name the block"
    )


def check_tensors(value: Any, *, layer: str) -> None:
    """Raises ModelError: a tensor that is more than its elements, and could not arrive as what it is."""

    def check(tensor: torch.Tensor) -> torch.Tensor:
        kind, way = "", ""
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            kind, way = f"a tensor with layout {tensor.layout}", "dense ones (.to_dense())"
            if tensor.is_quantized:
                kind, way = "a quantised tensor", "its codes and scales as tensors of their own"
        elif type(tensor) is not torch.Tensor and not isinstance(tensor, nn.Parameter):
            kind, way = f"a {type(tensor).__name__}", "plain tensors (.as_subclass(torch.Tensor), where that will do)"
        if kind:
            raise ModelError(
                f"layer {layer!r} returns {kind}, and its output goes on to another stage of the pipeline: only the "
                f"elements of dense, plain tensors cross there. Return {way}, or cut the model elsewhere "
                "(pipeline_configs.split)"
            )
        return tensor

    map_tensors(value, check)


def with_own_memory(value: Any, *, given: AbstractSet[int], is_batch: bool, model: nn.Module) -> Any:
    """The value, with copies of tensors in memory that others may write to or free while it is being sent.

    That an operation has just made a tensor is seen from the tensor alone, so an activation costs nothing.

    Args:
        given: memories of what came into the chunk.
        is_batch: whether that was the caller's batch; else it was received, and belongs to nobody.
        model: whose state others are.
    """
    copies: dict[int, torch.Tensor] = {}
    state: list[AbstractSet[int]] = []

    def is_shared(tensor: torch.Tensor) -> bool:
        if shims.is_new_result(tensor):
            return False
        memory = shims.memory_of(tensor)
        if memory in given:
            return is_batch
        if not state:
            state.append(_memories_of_state(model))
        return memory in state[0]

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_inference() and not is_shared(tensor):  # later writes to an inference tensor are not seen
            return tensor
        if id(tensor) not in copies:  # one that stands in several places stays one
            copies[id(tensor)] = tensor.clone()
        return copies[id(tensor)]

    return map_tensors(value, own)


def memories_of(value: Any) -> set[int]:
    """Where the tensors of a value lie."""
    found: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided:
            found.add(shims.memory_of(tensor))
        return tensor

    map_tensors(value, note)
    return found


# Of the containers in which modules keep tensors, their own dicts of parameters and buffers among them.
_HOLDERS = frozenset({dict, OrderedDict, list, tuple})


def _memories_of_state(model: nn.Module) -> set[int]:
    """Where parameters, buffers and other tensors lie that modules keep as attributes."""
    found: set[int] = set()
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor):
                items: Iterable[Any] = (value,)
            elif type(value) in _HOLDERS and value:
                items = value.values() if isinstance(value, dict) else value
            else:
                continue
            found.update(
                shims.memory_of(item)
                for item in items
                if isinstance(item, torch.Tensor) and item.layout == torch.strided
            )
    return found
