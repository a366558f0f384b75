"""Cut weights that other code than their own layers computes with.

A layer that is cut computes with this rank's part of its weight, and what comes out is joined. Other code that reads
the weight (a head by `F.linear` over the embedding's weight, a penalty on a norm) gets the part as well, and nobody
joins anything: each rank would train with another loss. So parameters that are cut are `CutParameter`s, and the
backward that would bring them a gradient from elsewhere than a layer that is cut is refused. A product with one is
refused where it runs: what comes of that is of no use. Nothing is watched inside such a layer (`own_use`), so what is
not refused costs nothing.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn import functional

from hybrid import shims
from hybrid.cpu_products import count_as_plain
from hybrid.errors import ModelError
from hybrid.metadata import METADATA_CALLS

__all__ = ["CutParameter", "own_use", "parameters_as_plain", "watch_reads"]

_NO_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

# What no gradient comes of; these are called some times per step for each parameter.
_FREE = METADATA_CALLS | {getattr(torch.Tensor, "grad").__set__}  # noqa: B009

# Who calls one of these with a weight computes as a layer does.
_PRODUCTS: frozenset[Any] = frozenset(
    {
        *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.mv, torch.einsum, torch.tensordot),
        *(getattr(torch.Tensor, name) for name in ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "mv")),
        *(functional.linear, functional.bilinear, functional.conv1d, functional.embedding, functional.embedding_bag),
        *(functional.multi_head_attention_forward, functional.scaled_dot_product_attention),
    }
)

SetClass = Callable[[nn.Parameter, type[nn.Parameter]], None]


class _Running(threading.local):
    """How many forwards of cut layers run in this thread, one inside the other, with tensors of other classes."""

    layers = 0


_running = _Running()
# id of a parameter that is watched -> its name and the number of tp ranks.
_watched: dict[int, tuple[str, int]] = {}


class CutParameter(nn.Parameter):
    """The class of a cut parameter."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FREE and len(types) == 1:
            return shims.plain_result(func, types, args, kwargs or {})
        kwargs = kwargs or {}
        if func is torch.Tensor.detach and _caller(inspect.currentframe()) is _NEW_PARAMETER:
            # nn.Parameter(weight) takes only what is of the weight's class; nobody watches the new one.
            with shims.plain_tensors():
                return args[0].detach().as_subclass(cls)
        theirs = tuple(kind for kind in types if kind not in (cls, nn.Parameter, torch.Tensor))
        if func in _FREE or _running.layers or shims.in_backward():
            return _plainly(func, theirs, args, kwargs)
        if func in _PRODUCTS:
            _refuse_product(args, kwargs)
        if not torch.is_grad_enabled():
            _refuse_functions()
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
_NEW_PARAMETER = nn.Parameter.__new__.__code__
# Of the arguments and parameters of a layer: those that need not be asked what an operation does.
_UNASKED = frozenset({CutParameter, nn.Parameter, torch.Tensor, type(None)})


def _caller(frame: FrameType | None) -> CodeType | None:
    back = None if frame is None else frame.f_back
    return None if back is None else back.f_code


def own_use(*values: object) -> AbstractContextManager[object]:
    """Around what a cut layer computes with its parameters, which are ordinary tensors to it.

    `values`: the parameters and what the layer is called with. Some may have a class that has its say in operations (a
    parameter that is elsewhere comes by that); then all classes are asked.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    if shims.in_function_transform() or shims.in_forward_mode():
        _refuse_transform(values)
    return shims.plain_tensors() if _UNASKED.issuperset(map(type, values)) else _counted()


def _refuse_transform(values: Sequence[object]) -> NoReturn:
    """Raises ModelError: a layer runs inside torch.func, or in forward mode."""
    fqn, degree = next((_watched[id(value)] for value in values if id(value) in _watched), ("", 0))
    layer = fqn.rpartition(".")[0]
    what = f"layer {layer!r} is cut over {degree} tensor-parallel ranks" if layer else "a layer is cut over tp ranks"
    raise ModelError(
        f"{what}, and runs inside torch.func (vmap, grad, jacrev, jvp) or in forward mode ({_place()}), which cannot "
        "transform the messages between the ranks. For derivatives use torch.autograd.grad(..., create_graph=True), "
        "instead of vmap a dim for the batch; or leave the layer whole by tensor_parallel_configs['plan'] = "
        f"{{{layer or 'layer'!r}: 'replicated'}} (a column layer and its row layer together)"
    )


@contextmanager
def _counted() -> Iterator[None]:
    _running.layers += 1
    try:
        yield
    finally:
        _running.layers -= 1


@contextmanager
def parameters_as_plain(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, they are ordinary parameters: a compiler takes no others."""
    cut = [parameter for parameter in parameters if type(parameter) is CutParameter]
    for parameter in cut:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameter in cut:
            if type(parameter) is nn.Parameter:
                parameter.__class__ = CutParameter


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


def _refuse_product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ModelError: a product with a watched parameter."""
    for tensor in _tensors_in((*args, *kwargs.values())):
        if id(tensor) in _watched:
            raise ModelError(_error(*_watched[id(tensor)], place=_place()))


def _refuse_functions() -> None:
    """Raises ModelError: an operation is a part of an autograd function that was given a watched parameter.

    What such a function makes of one would have a gradient, and its operations run without.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _APPLY:
            for value in frame.f_locals["args"]:
                if id(value) in _watched and isinstance(value, CutParameter):
                    raise ModelError(_error(*_watched[id(value)], place=_place(frame)))
        frame = frame.f_back


_APPLY = inspect.unwrap(cast(Any, torch.autograd.Function.apply).__func__).__code__


def _place(frame: FrameType | None = None) -> str:
    """The line outside torch and this package that runs: in this frame, or what has called it."""
    frame = frame or inspect.currentframe()
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NO_USERS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
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


def watch_reads(model: nn.Module, parameters: Mapping[str, nn.Parameter], *, degree: int, set_class: SetClass) -> None:
    """From now on, as long as the model lives, code that computes with these parameters is refused.

    Args:
        model: its layers are cut.
        parameters: fqn -> parameter, of those that are.
        set_class: gives one its class, where its values are here.
    """
    for fqn, parameter in parameters.items():
        _watched[id(parameter)] = (fqn, degree)
        set_class(parameter, CutParameter)
        weakref.finalize(parameter, _watched.pop, id(parameter), None)
    weakref.finalize(model, _forget, [weakref.ref(parameter) for parameter in parameters.values()], set_class)


def _forget(parameters: Iterable[weakref.ref[nn.Parameter]], set_class: SetClass) -> None:
    """The model is gone: what is left of it are ordinary parameters."""
    for reference in parameters:
        parameter = reference()
        if parameter is not None:
            _watched.pop(id(parameter), None)
            set_class(parameter, nn.Parameter)
