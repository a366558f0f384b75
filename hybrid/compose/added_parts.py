"""What came into a model after it was wrapped: nobody keeps it alike over ranks, trains it or runs it."""

from __future__ import annotations

import weakref
from itertools import chain
from operator import is_, methodcaller

from torch import nn

from hybrid import shims
from hybrid.compose.pipeline import Stages
from hybrid.errors import ModelError
from hybrid.sharding.engine import ShardingEngine

__all__ = ["AddedParts"]


class AddedParts:
    """Knows the parts that a model had when it was wrapped.

    Args:
        model: the wrapped one.
        engine: with all parameters of this rank.
        stages: what this rank does of a pipeline; its layers are then a fixed list.
    """

    def __init__(self, model: nn.Module, engine: ShardingEngine, stages: Stages | None) -> None:
        self._model = weakref.ref(model)
        self._engine = engine
        self._layers = None if stages is None else _children(model)
        self._seen: list[nn.Module | nn.Parameter | None] = []
        self._modules: list[nn.Module] = []
        self._names: list[str] = []

    def check(self) -> None:
        """Raises ModelError: a parameter that was not there, or another list of layers in a pipeline."""
        model = self._model()
        assert model is not None
        if self._modules and self._has_what_was_seen(model):
            return
        if self._layers is not None:
            now = _children(model)
            changed = [name for name, module in now.items() if name not in self._layers]
            changed += [name for name, known in self._layers.items() if now.get(name) is not known]
            if changed:
                name = changed[0]
                what = type(now[name]).__name__ if name in now else "nothing"
                raise ModelError(
                    f"layer {name!r} of the model is {what} now and was "
                    f"{'not there' if name not in self._layers else 'something else'} at distributed_model: the stages "
                    "of the pipeline run the layers of then. Build the model in full, then wrap it"
                )
        for name, parameter in nn.Module.named_parameters(model):
            if id(parameter) not in self._engine.fqn_of:
                raise ModelError(
                    f"parameter {name!r} came into the model after distributed_model: it lies in no bucket, and no "
                    "rank would reduce its gradient. Build the model in full, then wrap it"
                )
        self._look(model)

    def _look(self, model: nn.Module) -> None:
        """Remember what is right: all modules, what they hold, and the names of the model's own children."""
        self._modules = list(model.modules())
        self._seen = self._held()
        self._names = list(shims.own_parts(model)[1])

    def _held(self) -> list[nn.Module | nn.Parameter | None]:
        tables = chain.from_iterable(map(shims.own_parts, self._modules))
        return list(chain.from_iterable(map(methodcaller("values"), tables)))

    def _has_what_was_seen(self, model: nn.Module) -> bool:
        """Whether nothing has changed since, which takes a twentieth of the time of a walk over all names."""
        now = self._held()
        is_same = len(now) == len(self._seen) and all(map(is_, now, self._seen))
        return is_same and list(shims.own_parts(model)[1]) == self._names


def _children(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules(remove_duplicate=False) if name and "." not in name}
