"""Parameters whose values are not here right now, and what happens when somebody touches one.

While values are absent (on their way, or freed) a parameter's class is `AbsentParameter`. Metadata works as ever;
any use of the values first asks the parameter's keeper to bring them, which may refuse with a sentence.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from hybrid.metadata import METADATA_CALLS

__all__ = ["AbsentParameter", "Keeper", "bring_all", "mark_absent", "mark_present", "set_present_class"]

# Metadata, and what puts a gradient there or takes it away.
_HARMLESS: frozenset[Any] = METADATA_CALLS | {
    getattr(torch.Tensor, "grad").__set__,  # noqa: B009
    getattr(torch.Tensor, "requires_grad").__set__,  # noqa: B009
    getattr(torch.Tensor, "_version").__get__,  # noqa: B009
    torch.Tensor.requires_grad_,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.new_zeros,
    torch.Tensor.new_ones,
    torch.Tensor.new_empty,
    torch.Tensor.new_full,
    torch.Tensor.new_tensor,
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    torch.autograd.grad,
    torch.autograd.backward,  # its `inputs`
}


class Keeper(Protocol):
    """Brings the values of the parameters that it keeps."""

    def bring(self, parameter: nn.Parameter) -> None:
        """Return when the parameter's values may be read, its class restored; or raise."""


class AbsentParameter(nn.Parameter):
    """The class of a parameter whose values are elsewhere; any use of them goes to its keeper first."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})
        bring_all((args, kwargs))
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        keeper = _keepers.get(id(self))
        if keeper is not None:
            keeper.bring(self)
        return nn.Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        keeper = _keepers.get(id(self))
        if keeper is not None:
            keeper.bring(self)
        return nn.Parameter.__reduce_ex__(self, protocol)


# id of a parameter that lives -> its class while it is present, where that is another one than nn.Parameter.
_present_classes: dict[int, tuple[weakref.ref[nn.Parameter], type[nn.Parameter]]] = {}
# id of an absent parameter -> its keeper. An entry lives only while the parameter is absent and its keeper alive.
_keepers: weakref.WeakValueDictionary[int, Keeper] = weakref.WeakValueDictionary()


def mark_absent(parameters: Iterable[nn.Parameter], keeper: Keeper) -> None:
    """From now on, uses of these parameters go to `keeper`. A subclass of Parameter keeps its class."""
    for parameter in parameters:
        if type(parameter) is _present_class(parameter):
            parameter.__class__ = AbsentParameter
            _keepers[id(parameter)] = keeper


def mark_present(parameters: Iterable[nn.Parameter]) -> None:
    """Uses of these parameters are ordinary again."""
    for parameter in parameters:
        if type(parameter) is AbsentParameter:
            parameter.__class__ = _present_class(parameter)  # type: ignore[assignment]
            _keepers.pop(id(parameter), None)


def set_present_class(parameter: nn.Parameter, present: type[nn.Parameter]) -> None:
    """Which class a plain parameter has from now on, while it is present. Taken back with nn.Parameter."""
    key, before = id(parameter), _present_class(parameter)
    _present_classes.pop(key, None)
    if present is not nn.Parameter:
        _present_classes[key] = (weakref.ref(parameter, lambda _: _present_classes.pop(key, None)), present)
    if type(parameter) is before:
        parameter.__class__ = present


def _present_class(parameter: nn.Parameter) -> type[nn.Parameter]:
    known = _present_classes.get(id(parameter))
    return nn.Parameter if known is None or known[0]() is not parameter else known[1]


def bring_all(value: Any) -> None:
    """Have the values of all absent parameters in a tree of dicts, lists and tuples brought."""
    for parameter in _absent_in(value):
        keeper = _keepers.get(id(parameter))
        if keeper is not None:  # else it came with one before it
            keeper.bring(parameter)


def _absent_in(value: Any) -> list[AbsentParameter]:
    found: list[AbsentParameter] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if type(item) is AbsentParameter:
            found.append(item)
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
    return found
