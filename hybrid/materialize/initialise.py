"""Runs a model's own initialisation.

    1. every module's `reset_parameters()` (or `_reset_parameters()`), children before their parents and in the order
       of registration: the order in which the modules of a plain model are built
    2. when a module that has an `_init_weights(module)` is reached, that for every module in it that has not had it
       (the custom of transformers and others, whose constructors end so)
    3. a model without any such method, but with an `init_weights()`: that

A tied parameter takes its values from the first module that holds it, as in a plain model whose head is given the
weight of its embedding; what the others draw for it is thrown away. What a constructor does beside these (a
parameter drawn there, a constant buffer) cannot be run again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from hybrid.errors import ModelError
from hybrid.materialize.writing import Target, Writing

__all__ = ["initialise", "meta_attributes"]

_RESETS = ("reset_parameters", "_reset_parameters")


def initialise(model: nn.Module, targets: Iterable[Target], *, order: Literal["replay", "by_name"], seed: int) -> None:
    """Give every target its values.

    Args:
        model: the one that `targets` are parameters and buffers of.
        targets: see `Target`.
        order: see `Writing`.
        seed: for `by_name`.

    Raises:
        ModelError: a parameter or buffer that no initialisation writes, all of them named; one that is written in part.
    """
    waiting = list(targets)
    owners = {id(target.tensor): model.get_submodule(target.fqn.rpartition(".")[0]) for target in waiting}
    writing = Writing(waiting, order=order, seed=seed)
    with torch.no_grad():
        with writing:
            done: set[int] = set()
            for module in _children_first(model):
                for name in _RESETS:
                    reset = getattr(module, name, None)
                    if callable(reset):
                        writing.muted = _held_elsewhere_first(module, owners)
                        reset()
                        break
                init_weights = getattr(module, "_init_weights", None)
                if callable(init_weights) and _required_arguments(init_weights) == 1:
                    for inner in _children_first(module):
                        if id(inner) not in done:
                            done.add(id(inner))
                            writing.muted = _held_elsewhere_first(inner, owners)
                            init_weights(inner)
            writing.muted = frozenset()
            whole = getattr(model, "init_weights", None)
            if not done and callable(whole) and not _required_arguments(whole):
                whole()
        writing.finish()  # outside, so that keeping the last one is not taken for a use
    left = [target for target in waiting if not target.is_written and target.stand_in.numel() > 0]
    if left:
        raise ModelError(_uninitialised(model, left))


def meta_attributes(model: nn.Module) -> list[str]:
    """Tensors on the meta device that are neither parameters nor buffers: nothing gives them values."""
    return [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]


def _children_first(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _held_elsewhere_first(module: nn.Module, owners: Mapping[int, nn.Module]) -> frozenset[int]:
    """Ids of the module's own parameters that another module holds first."""
    own = (id(parameter) for parameter in module.parameters(recurse=False))
    return frozenset(key for key in own if owners.get(key, module) is not module)


def _required_arguments(function: Any) -> int:
    return sum(
        parameter.default is inspect.Parameter.empty
        and parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for parameter in inspect.signature(function).parameters.values()
    )


def _uninitialised(model: nn.Module, left: list[Target]) -> str:
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    lines = []
    for target in left:
        kind = "buffer" if target.fqn in buffers else "parameter"
        owner = model.get_submodule(target.fqn.rpartition(".")[0])
        lines.append(f"{kind} {target.fqn!r} of {type(owner).__name__}")
    return (
        f"built on the meta device, and nothing gives these a value: {', '.join(lines)}; let the module's "
        "reset_parameters() (or the model's init_weights()) write them, or build the model on a real device"
    )
