"""Cut weights that other code than their own layers computes with, noticed in the first step.

A layer that is cut computes with this rank's part of its weight, and what comes out is joined. Other code that reads
the weight (a head by `F.linear` over the embedding's weight, a penalty on a norm) gets the part as well, and nobody
joins anything: each rank would train with another loss. So until the first update the parameters that are cut are
`CutParameter`s, which give out nothing with a gradient but to a layer that is cut.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hybrid import shims
from hybrid.errors import ModelError
from hybrid.tensor.cut_module import CutModule

__all__ = ["CutParameter", "ForeignReads", "check"]


SetClass = Callable[[nn.Parameter, type[nn.Parameter]], None]


class _Running(threading.local):
    """How many forwards of cut layers run in this thread, one inside the other."""

    layers = 0


_running = _Running()
# id of a parameter that is watched -> its name and the number of tp ranks.
_watched: dict[int, tuple[str, int]] = {}


class CutParameter(nn.Parameter):
    """The class of a cut parameter until the first update."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not {*types} <= {cls, nn.Parameter, torch.Tensor}:
            return NotImplemented  # theirs first: a bias whose values are elsewhere is brought
        with shims.plain_tensors():
            result = func(*args, **(kwargs or {}))
        if not _running.layers and torch.is_grad_enabled() and not shims.in_backward():
            known = [item for item in (*args, *(kwargs or {}).values()) if isinstance(item, torch.Tensor)]
            outputs = result if isinstance(result, list | tuple) else (result,)
            for output in outputs:
                if isinstance(output, torch.Tensor) and output.requires_grad and all(output is not i for i in known):
                    _refuse(args, kwargs or {})
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with shims.plain_tensors():
            copy = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        with shims.plain_tensors():
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


def _refuse(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ModelError: an operation gave out a gradient for one of these, outside the layers."""
    stack = [*args, *kwargs.values()]
    while stack:
        item = stack.pop()
        if isinstance(item, list | tuple):
            stack.extend(item)
        elif isinstance(item, nn.Parameter):
            check(item)


def check(parameter: nn.Parameter) -> None:
    """Raises ModelError: code outside the layers that are cut computes with a parameter that is watched."""
    wants = parameter.requires_grad and torch.is_grad_enabled()
    if id(parameter) not in _watched or _running.layers or not wants or shims.in_backward():
        return
    fqn, degree = _watched[id(parameter)]
    layer = fqn.rpartition(".")[0] or fqn
    raise ModelError(
        f"parameter {fqn!r} is cut over {degree} tensor-parallel ranks, and code outside its layer computes with it (a "
        "head that reads an embedding's weight, a penalty in the loss): each rank would take its part for the whole. "
        f"Leave the layer whole by tensor_parallel_configs['plan'] = {{{layer!r}: 'replicated'}} (a column layer and "
        "its row layer together); write a tied head as a layer that has the embedding's weight; take weight_decay of "
        "the optimizer for a penalty on squares. To look at values: torch.no_grad() for this rank's part, "
        "hybrid.full_parameter(p) for all"
    )


class ForeignReads:
    """Watches the cut parameters of one model until `end`.

    Args:
        model: its layers are cut.
        parameters: fqn -> parameter, of those that are.
        set_class: gives one its class, where its values are here.
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], *, degree: int, set_class: SetClass
    ) -> None:
        self._parameters = list(parameters.values())
        self._set_class = set_class
        self._handles: list[RemovableHandle] = []
        for fqn, parameter in parameters.items():
            _watched[id(parameter)] = (fqn, degree)
            set_class(parameter, CutParameter)
        self._forget = weakref.finalize(model, _forget, list(map(id, self._parameters)))
        for module in model.modules():
            if isinstance(module, CutModule):
                self._handles.append(module.register_forward_pre_hook(_begin, prepend=True))
                self._handles.append(module.register_forward_hook(_end, always_call=True))

    def end(self) -> None:
        """The parameters are ordinary ones from now on."""
        self._forget()
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            self._set_class(parameter, nn.Parameter)
        self._parameters.clear()
        self._handles.clear()


def _forget(ids: Iterable[int]) -> None:
    for one in ids:
        _watched.pop(one, None)


def _begin(module: nn.Module, args: Any) -> None:
    _running.layers += 1


def _end(module: nn.Module, args: Any, output: Any) -> None:
    _running.layers = max(0, _running.layers - 1)
