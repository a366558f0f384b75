"""Runs a model's own initialisation.

    1. every module's `reset_parameters()` (or `_reset_parameters()`), children before their parents and in the order
       of registration: the order in which the modules of a plain model are built. The layers of torch's
       TransformerEncoder and TransformerDecoder are copies of one, so all of them draw the same numbers
    2. when a module that has an `_init_weights(module)` is reached, that for every module in it, as
       `self.apply(self._init_weights)` at the end of its constructor does; in a model of transformers only for those
       that have not had it. An `_init_weights()` without argument is called as it is
    3. a model without `_init_weights`, but with an `init_weights()`: that

Modules that have all their values are left alone. A tied parameter takes its values from the first module that holds
it, as in a plain model whose head is given the weight of its embedding; what the others draw for it is thrown away
(but for 2, where the last one counts).
What a constructor does beside these (a parameter drawn there, a constant buffer) cannot be run again.
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
_MADE_OF_COPIES = (nn.TransformerEncoder, nn.TransformerDecoder)
_OF_TRANSFORMERS = ("initialize_weights", "_initialize_weights")  # methods of its models: each module once


def initialise(model: nn.Module, targets: Iterable[Target], *, order: Literal["replay", "by_name"], seed: int) -> None:
    """Give every target its values.

    Args:
        model: the one that `targets` are all parameters and buffers of.
        targets: see `Target`.
        order: see `Writing`.
        seed: for `by_name`.

    Raises:
        ModelError: a parameter or buffer that no initialisation writes, all of them named; one that is written in part.
    """
    everything = list(targets)
    waiting = [target for target in everything if not target.is_given]
    before = {fqn: id(parameter) for fqn, parameter in model.named_parameters(remove_duplicate=False)}
    writing = Writing(everything, order=order, seed=seed)
    with torch.no_grad():
        with writing:
            _Initialisation(model, everything, writing, order=order).run()
        writing.finish()  # outside, so that keeping the last one is not taken for a use
        _take_replaced(model, waiting)
    after = {fqn: id(parameter) for fqn, parameter in model.named_parameters(remove_duplicate=False)}
    if after != before:
        changed = sorted({fqn for fqn, _ in before.items() ^ after.items()})
        raise ModelError(
            f"the model's initialisation put other parameters in the place of {changed}; write their values instead "
            "(with torch.no_grad(): self.weight.copy_(...)), or build the model on a real device"
        )
    left = [target for target in waiting if not target.is_written and target.stand_in.numel() > 0]
    if left:
        raise ModelError(_uninitialised(model, left))


class _Initialisation:
    """One run over the modules."""

    def __init__(
        self, model: nn.Module, targets: list[Target], writing: Writing, *, order: Literal["replay", "by_name"]
    ) -> None:
        self._model = model
        self._writing = writing
        self._order = order
        self._names = {id(module): name for name, module in model.named_modules()}
        self._owners = {id(target.tensor): model.get_submodule(target.fqn.rpartition(".")[0]) for target in targets}
        waiting = {id(target.tensor) for target in targets if not target.is_given}
        self._is_waiting = {
            id(module): any(id(tensor) in waiting for tensor in (*module.parameters(), *module.buffers()))
            for module in model.modules()
        }
        self._devices = sorted({target.device.index or 0 for target in targets if target.device.type == "cuda"})
        self._visited: set[int] = set()
        self._has_init_weights = False
        self._done: set[int] = set()

    def run(self) -> None:
        self._visit(self._model)
        self._writing.muted = frozenset()
        whole = getattr(self._model, "init_weights", None)
        if not self._has_init_weights and callable(whole) and _required_arguments(whole) == 0:
            whole()

    def _visit(self, module: nn.Module) -> None:
        if id(module) in self._visited:
            return
        self._visited.add(id(module))
        for child in module.children():
            if isinstance(module, _MADE_OF_COPIES) and child is module.layers and self._order == "replay":
                self._visit_copies(list(child))
            else:
                self._visit(child)
        self._initialise(module)

    def _visit_copies(self, layers: list[nn.Module]) -> None:
        before = self._random_state()
        after = before
        for place, layer in enumerate(layers):
            self._set_random_state(before)
            self._visit(layer)
            after = self._random_state() if place == 0 else after
        self._set_random_state(after)

    def _initialise(self, module: nn.Module) -> None:
        if not self._is_waiting[id(module)]:
            return
        for name in _RESETS:
            reset = getattr(module, name, None)
            if callable(reset) and _required_arguments(reset) == 0:
                self._prepare(module, "reset_parameters")
                reset()
                break
        init_weights = getattr(module, "_init_weights", None)
        if not callable(init_weights):
            return
        self._has_init_weights = True
        if _required_arguments(init_weights) == 0:
            self._prepare(module, "_init_weights")
            init_weights()
            return
        once = all(callable(getattr(module, name, None)) for name in _OF_TRANSFORMERS)
        for inner in _children_first(module):
            if (once and id(inner) in self._done) or not self._is_waiting[id(inner)]:
                continue
            self._done.add(id(inner))
            # transformers ties after this; whoever uses `apply` has tied before, and the last to write counts.
            self._prepare(inner, f"_init_weights of {self._names[id(module)]}", mute=once)
            init_weights(inner)

    def _prepare(self, module: nn.Module, what: str, *, mute: bool = True) -> None:
        self._writing.muted = _held_elsewhere_first(module, self._owners) if mute else frozenset()
        self._writing.seed_for(f"{self._names[id(module)]}/{what}")

    def _random_state(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]

    def _set_random_state(self, state: list[torch.Tensor]) -> None:
        torch.set_rng_state(state[0])
        for device, one in zip(self._devices, state[1:], strict=True):
            torch.cuda.set_rng_state(one, device)


def _take_replaced(model: nn.Module, waiting: list[Target]) -> None:
    """An initialisation that assigned a new parameter or buffer gave its values; parameters stay the old objects."""
    for target in waiting:
        owner, name = model.get_submodule(target.fqn.rpartition(".")[0]), target.fqn.rpartition(".")[2]
        new = getattr(owner, name, None)
        if new is target.tensor or not isinstance(new, torch.Tensor) or new.is_meta:
            continue
        if isinstance(target.tensor, nn.Parameter):
            if new.shape != target.stand_in.shape:
                continue
            setattr(owner, name, target.tensor)
        target.keep(new.detach().to(target.device))
        target.is_written = True


def meta_attributes(model: nn.Module) -> list[str]:
    """Tensors on the meta device that are neither parameters nor buffers: nothing gives them values."""
    parameters = {id(parameter) for parameter in model.parameters()}  # nn.LSTM keeps a list of its own
    buffers = {id(buffer) for buffer in model.buffers()}
    return [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in {"_parameters", "_buffers", "_modules"}
        and id(value) not in buffers
        and any(tensor.is_meta and id(tensor) not in parameters for tensor in _tensors_in(value))
    ]


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """The order of `module.apply`: one that is held at two places comes twice."""
    for child in module.children():
        yield from _children_first(child)
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
