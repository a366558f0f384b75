"""Forward hooks that the user put on the model itself: once per micro-batch, as on one process.

The model is called once for each chunk. A pre-hook sees what the model is given, so it runs before the first chunk,
on the first stage; a hook sees what it returns, so it runs after the last one, on the last stage, where the inputs
are not. A backward hook would need both in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from hybrid import shims
from hybrid.errors import ModelError

__all__ = ["around_units", "check_backward_hooks", "check_backward_hooks_around", "keep_to_the_ends"]


class _InputsElsewhere(tuple[Any, ...]):
    """Stands for the positional inputs of the model on the last stage."""

    __slots__ = ()

    def _refuse(self, *_: Any) -> Any:
        raise ModelError(
            "a forward hook of the whole model reads its inputs: under a pipeline they are on the first stage, and the "
            "hook runs on the last one. Use the output alone, or give the inputs along to the last layer"
        )

    __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = __eq__ = __hash__ = __add__ = _refuse
    __repr__ = _refuse


class _AtOneEnd:
    """A hook that is silent for all chunks but one."""

    def __init__(self, hook: Callable[..., Any], runs: Callable[[], bool], *, sees_inputs: bool) -> None:
        self._hook, self._runs, self._sees_inputs = hook, runs, sees_inputs

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        if not self._runs():
            return None
        return self._hook(module, args if self._sees_inputs else _InputsElsewhere(), *rest)


def keep_to_the_ends(
    model: nn.Module, *, runs_first: Callable[[], bool], runs_last: Callable[[], bool], inputs_here: bool = False
) -> None:
    """Put every hook of the user in its place; called before each chunk, since hooks may come at any time.

    `inputs_here`: every chunk is called with the model's own inputs.

    Raises:
        ModelError: a backward hook.
    """
    check_backward_hooks(model)
    before, after = shims.forward_hooks(model)
    for hooks, runs, sees_inputs in ((before, runs_first, True), (after, runs_last, inputs_here)):
        for key, hook in hooks.items():
            if not _is_ours(hook):
                hooks[key] = _AtOneEnd(hook, runs, sees_inputs=sees_inputs)


def check_backward_hooks(model: nn.Module) -> None:
    """Raises ModelError: the model itself, not a layer, has a backward hook."""
    if shims.has_backward_hooks(model):
        raise ModelError(
            "a backward hook on the whole model with a pipeline: no rank has both its inputs and its outputs. Put the "
            "hook on the first or the last layer, or set pipeline_configs.degree = 1"
        )


def around_units(model: nn.Module, units: Iterable[str]) -> dict[str, nn.Module]:
    """The modules between a model and its units, by name."""
    inside = {id(module) for name in units for module in model.get_submodule(name).modules()}
    return {name: module for name, module in model.named_modules() if name and id(module) not in inside}


def check_backward_hooks_around(modules: Mapping[str, nn.Module]) -> None:
    """Raises ModelError: a module around units has a backward hook."""
    for name, module in modules.items():
        if shims.has_backward_hooks(module):
            raise ModelError(
                f"a backward hook on {name!r}, which a pipeline cuts inside or runs in every chunk: it would see the "
                "gradients of a part, or several times. Put it on a unit or a module in one, or set "
                "pipeline_configs.degree = 1"
            )


def _is_ours(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)  # of a partial
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "hybrid"
