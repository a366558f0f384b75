"""Sequence parallel: between the layers each tp rank holds a part of the sequence.

    first block's entry     own slice                                backward: all-gather
    attention, mlp entry    all-gather (or in the column layer)      backward: reduce-scatter
    row-parallel layer      reduce-scatter (in the layer)            backward: all-gather
    last block's exit       all-gather                               backward: own slice

The activation that is cut is the first tensor among a module's arguments, and its output or the first of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hybrid import shims
from hybrid.collectives.autograd import gather_from, scatter_to
from hybrid.collectives.group import Group
from hybrid.errors import ModelError
from hybrid.tensor.linear import check_sequence
from hybrid.tensor.region import CutRegion

__all__ = [
    "SequenceState",
    "expect_cut",
    "first_activation",
    "gather_at_entry",
    "gather_at_exit",
    "refuse_partial_outputs",
    "scatter_at_entry",
]

# Names of the activation where it is given by keyword.
_NAMES = ("hidden_states", "x", "src", "tgt", "input", "inputs", "query")


def gather_at_entry(module: nn.Module, name: str, *, group: Group, dim: int) -> None:
    """The module sees the whole sequence; the gradients of all ranks for it are summed."""

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        return gather_from(tensor, group=group, dim=dim, partial=True)

    module.register_forward_pre_hook(_on_activation(name, gather), with_kwargs=True)


class SequenceState:
    """Whether the activations of a stack of blocks are cut at the moment."""

    def __init__(self) -> None:
        self.is_cut = False
        self.last = ""

    def check_whole(self) -> None:
        """Raises ModelError: a forward ended between two blocks."""
        if self.is_cut:
            raise ModelError(
                f"sequence parallel: the forward ended with its activations cut, after block {self.last!r}; the last "
                "block of the list makes them whole. Call the blocks in their order and the last of them, or set "
                "sequence_parallel to False"
            )


def scatter_at_entry(
    block: nn.Module, name: str, *, group: Group, dim: int, region: CutRegion, state: SequenceState
) -> None:
    """Cut the sequence where the first block begins."""

    def scatter(tensor: torch.Tensor) -> torch.Tensor:
        if not shims.in_backward():
            if state.is_cut:
                raise ModelError(
                    f"sequence parallel: block {name!r}, the first of its list, was called again before the last one "
                    "had made the sequence whole; call the blocks once each, in their order, or set sequence_parallel "
                    "to False"
                )
            state.is_cut, state.last = True, name
        check_sequence(tensor, dim, group)
        if block.training:
            region.enter(tensor.device)
        return scatter_to(tensor, group=group, dim=dim)

    block.register_forward_pre_hook(_on_activation(name, scatter), with_kwargs=True, prepend=True)


def expect_cut(block: nn.Module, name: str, *, state: SequenceState) -> None:
    """A block after the first one works on a part of the sequence: it must have been cut by then."""

    def check(module: nn.Module, args: Any) -> None:
        if shims.in_backward():
            return
        if not state.is_cut:
            raise ModelError(
                f"sequence parallel: block {name!r} was called before the first block of its list, which cuts the "
                "sequence; call the blocks in their order, the first one always, or set sequence_parallel to False"
            )
        state.last = name

    block.register_forward_pre_hook(check, prepend=True)


def gather_at_exit(
    block: nn.Module, name: str, *, group: Group, dim: int, region: CutRegion, state: SequenceState
) -> None:
    """Make the sequence whole where the last block ends."""

    def gather(module: nn.Module, args: Any, output: Any) -> Any:
        if not shims.in_backward():
            state.is_cut = False
        region.leave()

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            return gather_from(tensor, group=group, dim=dim, partial=False)

        if isinstance(output, torch.Tensor):
            return whole(output)
        if type(output) in (tuple, list) and output and isinstance(output[0], torch.Tensor):
            return type(output)([whole(output[0]), *output[1:]])
        raise ModelError(
            f"sequence parallel: block {name!r} returns a {type(output).__name__}, and its activation cannot be told; "
            "return a tensor, or a tuple whose first item it is, or set sequence_parallel to False"
        )

    block.register_forward_hook(gather)


def refuse_partial_outputs(model: nn.Module, *, sequence_parallel: bool) -> None:
    """What a model collects inside its layers would be a part of the heads or the sequence, and nothing would tell."""
    refused = {"output_attentions": "this rank's heads only; leave it out, or run the plain model"}
    if sequence_parallel:
        refused["output_hidden_states"] = "a part of each sequence; leave it out, or set sequence_parallel to False"

    def check(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        for name, what in refused.items():
            asked = kwargs.get(name)
            if asked is None:
                asked = getattr(getattr(module, "config", None), name, False)
            if asked:
                raise ModelError(f"{name} under tensor parallel would return {what}")

    model.register_forward_pre_hook(check, with_kwargs=True)


def first_activation(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The activation among a module's arguments: the first, or the one by a usual name; None: it cannot be told."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0]
    return next((kwargs[key] for key in _NAMES if isinstance(kwargs.get(key), torch.Tensor)), None)


def _on_activation(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A pre-hook that replaces the activation among the arguments."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args and isinstance(args[0], torch.Tensor):
            return (change(args[0]), *args[1:]), kwargs
        for key in _NAMES:
            if isinstance(kwargs.get(key), torch.Tensor):
                return args, {**kwargs, key: change(kwargs[key])}
        raise ModelError(
            f"sequence parallel: module {name!r} was called without an activation that could be told: give it first, "
            f"or by one of the names {', '.join(_NAMES)}; or set sequence_parallel to False"
        )

    return hook
