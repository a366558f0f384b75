"""Who calls a unit is told to somebody first, who decides what is called: the unit, or something in its place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

__all__ = ["OnCall", "watch_attributes", "watch_calls", "with_stand_in"]

# (name of the unit, its own call, positional and keyword arguments) -> what the caller gets.
OnCall = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def watch_calls(units: Mapping[str, nn.Module], on_call: OnCall) -> None:
    """Give each unit a class that asks `on_call`. It is outside of everything: hooks, recompute, casts.

    A class and not a hook, since a hook cannot take the place of a call, and no instance attribute, since Python looks
    `__call__` up in the class.
    """
    classes: dict[type, type] = {}
    names: dict[int, str] = {id(unit): name for name, unit in units.items()}
    for unit in units.values():
        base = type(unit)
        if base not in classes:
            classes[base] = _watching(base, names, on_call)
        unit.__class__ = classes[base]


def _watching(base: Any, names: Mapping[int, str], on_call: OnCall) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(base.__call__, self)
        name = names.get(id(self))  # None of a copy
        return own(*args, **kwargs) if name is None else on_call(name, own, args, kwargs)

    return _subclass(base, {"__call__": call})


def watch_attributes(modules: Iterable[nn.Module], on_read: Callable[[nn.Module, str, Any], None]) -> None:
    """Tell `on_read` (module, attribute, value) of what is read of each; methods and what classes have are no news."""
    classes: dict[type, type] = {}
    for module in modules:
        base = type(module)
        if base not in classes:
            classes[base] = _telling(base, on_read)
        module.__class__ = classes[base]


def _telling(base: Any, on_read: Callable[[nn.Module, str, Any], None]) -> type:
    def read(self: Any, name: str) -> Any:
        value = base.__getattribute__(self, name)
        if name in object.__getattribute__(self, "__dict__"):
            on_read(self, name, value)
        return value

    return _subclass(base, {"__getattribute__": read})


def with_stand_in(
    module: nn.Module,
    stand_in: Callable[[], nn.Parameter | None],
    *,
    before_call: Callable[[nn.Module], None],
    before_walk: Callable[[nn.Module], None],
) -> None:
    """While a forward runs, a module that holds no parameter here has one: `next(module.parameters()).device`.

    `before_call`, `before_walk`: who calls it, or goes through its modules, is told to first.
    """
    base: Any = type(module)

    def parameters(self: Any, recurse: bool = True) -> Iterator[nn.Parameter]:
        found = False
        for parameter in base.parameters(self, recurse):
            found = True
            yield parameter
        other = None if found else stand_in()
        if other is not None:
            yield other

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before_call(self)
        return base.__call__(self, *args, **kwargs)

    def named_modules(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        before_walk(self)
        yield from base.named_modules(self, *args, **kwargs)

    module.__class__ = _subclass(base, {"parameters": parameters, "__call__": call, "named_modules": named_modules})


def _subclass(base: Any, methods: dict[str, Any]) -> type:
    """Under the name of the class itself: code that asks for a module's class by name finds what it looks for."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), names | methods)
