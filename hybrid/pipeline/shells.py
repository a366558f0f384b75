"""Takes the parameters of other stages out of a model, and leaves in their places what shows their shape and type.

Modules stay the same objects: code that asks a unit of another stage for its attributes finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from hybrid import shims
from hybrid.pipeline.unit_class import with_stand_in

__all__ = ["Shells", "empty_like"]


@dataclass(slots=True, kw_only=True)
class _Removed:
    """A parameter or buffer that was taken out of a module."""

    module: nn.Module
    name: str
    is_persistent: bool


class Shells:
    """What was taken out of one model.

    Args:
        model: the whole one.
        is_here: (module, name of its own parameter or buffer) -> whether it stays.
        device: of the placeholders.
        is_running: whether a forward runs now.
        before_call, before_walk: are told of modules that hold nothing here and are called, or gone through.
    """

    def __init__(
        self,
        model: nn.Module,
        is_here: Callable[[nn.Module, str], bool],
        *,
        device: torch.device,
        is_running: Callable[[], bool],
        before_call: Callable[[nn.Module], None],
        before_walk: Callable[[nn.Module], None],
    ) -> None:
        self._model = model
        self._device = device
        self._is_running = is_running
        self._is_here = is_here
        self._before_call = before_call
        self._before_walk = before_walk
        self._removed: list[_Removed] = []
        self._tensors: list[torch.Tensor] = []

    def remove(self) -> list[nn.Parameter]:
        """Take them out; returns the parameters that nothing in the model holds now."""
        self._removed = [
            _Removed(
                module=module,
                name=name,
                is_persistent=isinstance(tensor, nn.Parameter) or shims.is_persistent(module, name),
            )
            for module in self._model.modules()
            for name, tensor in list(_own_tensors(module))
            if not self._is_here(module, name)
        ]
        had = [module for module in self._model.modules() if next(module.parameters(), None) is not None]
        self._take_out()
        here = {id(parameter) for parameter in self._model.parameters()}
        gone = {id(t): t for t in self._tensors if isinstance(t, nn.Parameter) and id(t) not in here}
        for module in had:
            if next(module.parameters(), None) is None:
                with_stand_in(
                    module,
                    self._stand_in_for(module),
                    before_call=self._before_call,
                    before_walk=self._before_walk,
                )
        return list(gone.values())

    def _take_out(self) -> None:
        self._tensors = []
        for one in self._removed:
            tensor = getattr(one.module, one.name)
            self._tensors.append(tensor)
            delattr(one.module, one.name)
            vars(one.module)[one.name] = empty_like(tensor, self._device)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside, the model has everything again."""
        for one, tensor in zip(self._removed, self._tensors, strict=True):
            del vars(one.module)[one.name]
            if isinstance(tensor, nn.Parameter):
                one.module.register_parameter(one.name, tensor)
            else:
                one.module.register_buffer(one.name, tensor, persistent=one.is_persistent)
        try:
            yield
        finally:
            self._take_out()

    def forget(self) -> None:
        """Let go of what was taken out."""
        self._tensors = []

    def _stand_in_for(self, module: nn.Module) -> Callable[[], nn.Parameter | None]:
        inside = {id(one) for one in module.modules()}
        placeholders = [vars(one.module)[one.name] for one in self._removed if id(one.module) in inside]
        like = next((tensor for tensor in placeholders if tensor.is_floating_point()), placeholders[0])
        stand_in = nn.Parameter(like.detach(), requires_grad=False)
        return lambda: stand_in if self._is_running() else None


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same shape and type over one element, which is no number: writes raise, and values that are used show."""
    dtype = tensor.dtype
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    empty = torch.full((), value, dtype=dtype, device=device).expand(tensor.shape)
    return empty.requires_grad_() if tensor.requires_grad else empty


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)
