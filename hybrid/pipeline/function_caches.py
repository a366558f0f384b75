"""Caches of functions (functools.lru_cache): what a run without values leaves in them is good for nobody."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from hybrid.errors import ModelError
from hybrid.pipeline.outline import tensors_by_path
from hybrid.pipeline.skeleton import is_fake

__all__ = ["check_not_kept", "fresh_caches"]

_Cached = type(functools.lru_cache(maxsize=1)(lambda: None))


@contextmanager
def fresh_caches(model: nn.Module) -> Iterator[None]:
    """Empty the caches that grow inside, of functions in the files of a model's classes and in these classes."""
    before = {id(one): one.cache_info().misses for one in _caches(model)}
    try:
        yield
    finally:
        for one in _caches(model):
            if one.cache_info().misses != before.get(id(one), 0):
                one.cache_clear()


def check_not_kept(unit: str, outcome: Any) -> None:
    """Raises ModelError: what a unit returned, or the error that ended it, comes of a tensor without values.

    Such a one spreads through all that is computed from it, and fails anywhere.
    """
    if type(outcome) is torch.Tensor:
        return
    if isinstance(outcome, Exception):
        frames = (frame for frame, _ in traceback.walk_tb(outcome.__traceback__))
        tensors = (value for frame in frames for value in frame.f_locals.values() if isinstance(value, torch.Tensor))
        cause: Exception | None = outcome
    else:
        tensors, cause = (value for value in tensors_by_path((outcome,), {}).values()), None
    if any(map(is_fake, tensors)):
        raise ModelError(
            f"{unit!r} uses a tensor without values, which its code has kept from the run before the start (in a cache "
            "of a function, a class or a module, filled at its first call): let it keep no tensors there, or set "
            "pipeline_configs.degree = 1"
        ) from cause


def _caches(model: nn.Module) -> Iterator[Any]:
    classes = {base for module in model.modules() for base in type(module).__mro__}
    files = {base.__module__ for base in classes}
    spaces = [vars(sys.modules[name]) for name in files if name in sys.modules and name.partition(".")[0] != "torch"]
    for space in (*spaces, *map(vars, classes)):
        for value in list(space.values()):
            value = getattr(value, "__func__", value)  # of a static or class method
            yield from (one for one in (value, *_enclosed(value)) if isinstance(one, _Cached))


def _enclosed(value: Any) -> Iterator[Any]:
    """What a function refers to: a decorator may have put one with a cache into one without."""
    for cell in getattr(value, "__closure__", None) or ():
        with suppress(ValueError):  # of an empty one
            yield cell.cell_contents
