"""Hooks of the engine on modules: they belong to one model, and do nothing in a copy of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ModuleHook"]


class ModuleHook:
    """Calls `hook`. A deep copy of the module (a teacher, a moving average) or a file has one that does nothing."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hook(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook(_nothing)

    def __reduce__(self) -> Any:
        return ModuleHook, (_nothing,)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In a module that is nobody's."""
