"""A live model, for `explain`. The one place on this floor that imports torch, and it does so when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from hybrid.contracts.tensor_facts import ModelFacts
from hybrid.errors import ModelError, StrategyError

if TYPE_CHECKING:
    from torch import nn

    Model: TypeAlias = nn.Module
else:
    Model = Any

__all__ = ["Model", "build", "facts_of", "is_module", "units_of"]


def is_module(value: object) -> TypeGuard[Model]:
    """Whether it is a torch module; where torch is not loaded there are none."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def facts_of(model: Model) -> ModelFacts:
    """Names and sizes, for the rules."""
    from hybrid.tensor.facts import read_facts  # torch comes with it

    return read_facts(model)


def units_of(model: Model, class_names: list[str] | None) -> tuple[str, ...]:
    """Names of the modules that ZeRO gathers, frees and reduces as one.

    Raises:
        ModelError: a name that is no class of the model.
    """
    from hybrid.sharding.units import plan_units  # torch comes with it

    return tuple(unit.name for unit in plan_units(model, class_names=class_names))


def build(reference: str) -> tuple[Model, str]:
    """The model that `package.module:factory` makes, on the meta device where it can; and a note if it could not.

    Raises:
        StrategyError: no such module or factory, or it makes no model.
        ModelError: the factory itself failed.
    """
    import torch  # only where a model is to be built

    name, _, attribute = reference.partition(":")
    if not name or not attribute:
        raise StrategyError(f"--model {reference!r}: expected package.module:factory, such as my_package.model:build")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python itself does for a script
    try:
        factory: Any = importlib.import_module(name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except ImportError as error:
        raise StrategyError(f"--model {reference!r}: cannot import {name!r}: {error}") from error
    except AttributeError as error:
        raise StrategyError(f"--model {reference!r}: {error}") from error
    if is_module(factory):
        return factory, ""
    if not callable(factory):
        raise StrategyError(f"--model {reference!r}: expected a function or a class, got {type(factory).__name__}")
    note = ""
    try:
        with torch.device("meta"):
            model = factory()
    except Exception as error:
        note = (
            f"built in full, since {reference} cannot be built on the meta device ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'})"
        )
        try:
            model = factory()
        except Exception as second:
            raise ModelError(f"--model {reference!r}: the factory raised {type(second).__name__}: {second}") from second
    if not is_module(model):
        raise StrategyError(f"--model {reference!r}: expected a torch.nn.Module, got {type(model).__name__}")
    return model, note
