"""Cut weights that other code than their own layers computes with, noticed in the first step.

A layer that is cut computes with this rank's part of its weight, and what comes out is joined. Other code that reads
the weight (a head by `F.linear` over the embedding's weight, a penalty on a norm) gets the part as well, and nobody
joins anything: each rank would train with another loss. So until the first update the parameters that are cut are
`CutParameter`s, and the backward that would bring them a gradient from elsewhere than a layer that is cut is refused.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from hybrid import shims
from hybrid.cpu_products import count_as_plain
from hybrid.errors import ModelError
from hybrid.metadata import METADATA_CALLS
from hybrid.tensor.cut_module import CutModule

__all__ = ["CutParameter", "ForeignReads"]

_NO_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

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
        kwargs = kwargs or {}
        theirs = tuple(kind for kind in types if kind not in (cls, nn.Parameter, torch.Tensor))
        if func in METADATA_CALLS or _running.layers or not torch.is_grad_enabled() or shims.in_backward():
            return _plainly(func, theirs, args, kwargs)
        with shims.plain_tensors():
            given = _tensors_in((*args, *kwargs.values()))
            before = {tensor.grad_fn for tensor in given}
        result = _plainly(func, theirs, args, kwargs)
        with shims.plain_tensors():
            for tensor in _tensors_in((result, *given)):
                if tensor.grad_fn is not None and tensor.grad_fn not in before:
                    _refuse_gradient(tensor, given, before)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with shims.plain_tensors():
            copy = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        with shims.plain_tensors():
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


count_as_plain(CutParameter)


def _plainly(func: Any, theirs: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operation gives for ordinary parameters: other classes than ours have their say."""
    for kind in theirs:
        result = kind.__torch_function__(func, theirs, args, kwargs)
        if result is not NotImplemented:
            return result
    if theirs:
        return NotImplemented
    with shims.plain_tensors():
        return func(*args, **kwargs)


def _tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Those in lists and tuples, each once."""
    found: dict[int, torch.Tensor] = {}
    stack = [*values]
    while stack:
        item = stack.pop()
        if isinstance(item, list | tuple):
            stack.extend(item)
        elif isinstance(item, torch.Tensor):
            found[id(item)] = item
    return [*found.values()]


def _refuse_gradient(output: torch.Tensor, given: Iterable[torch.Tensor], before: Collection[Node | None]) -> None:
    """Have backward raise ModelError if it goes through `output` into one of `given` that is watched.

    Only then is the part in a loss: copies, norms to look at and shapes of views are made with gradients on, too.
    """
    watched = {id(tensor) for tensor in given if id(tensor) in _watched and tensor.requires_grad}
    stack, seen = [output.grad_fn], {*before}
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        parameter = getattr(node, "variable", None)  # of the node that takes a leaf's gradient
        if id(parameter) in watched:
            error = _error(*_watched[id(parameter)], place=_place())
            output.register_hook(partial(_raise, error))
            return
        stack.extend(following for following, _ in node.next_functions)


def _raise(error: str, gradient: torch.Tensor) -> None:
    raise ModelError(error)


def _place() -> str:
    """The line outside torch and this package that runs."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_NO_USERS):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown code"


def _error(fqn: str, degree: int, *, place: str) -> str:
    layer = fqn.rpartition(".")[0] or fqn
    return (
        f"parameter {fqn!r} is cut over {degree} tensor-parallel ranks, and code outside its layer computes with it "
        f"({place}; a head that reads an embedding's weight, a penalty in the loss): each rank would take its part for "
        f"the whole. Leave the layer whole by tensor_parallel_configs['plan'] = {{{layer!r}: 'replicated'}} (a column "
        "layer and its row layer together); write a tied head as a layer that has the embedding's weight; take "
        "weight_decay of the optimizer for a penalty on squares"
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
                self._handles.append(module.register_forward_hook(_end, prepend=True, always_call=True))
        self._handles.append(model.register_forward_pre_hook(_begin_anew, prepend=True))

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


def _begin_anew(module: nn.Module, args: Any) -> None:
    if not shims.in_backward():
        _running.layers = 0  # a KeyboardInterrupt in a layer skips its hooks
