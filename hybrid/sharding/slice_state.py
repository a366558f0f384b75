"""The state of an optimizer that steps on slices, asked for by the parameters of the model."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from hybrid.errors import OptimizerError

if TYPE_CHECKING:
    from hybrid.sharding.optimizer_state import OptimizerShards, Shard

__all__ = ["SliceState"]


class SliceState(defaultdict[Any, Any]):
    """An optimizer's state, whose keys are slices.

    Asked for one of the model's own parameters, it answers with the state of the slice if that is the whole parameter,
    and refuses else: an empty answer would be taken for a parameter that was never stepped.
    """

    def __init__(self, shards: OptimizerShards, state: Mapping[Any, Any]) -> None:
        super().__init__(dict, state)
        self._shards = weakref.ref(shards)

    def _slice_of(self, parameter: Any) -> nn.Parameter | None:
        """The slice that is one of the model's own parameters as a whole; None for any other key.

        Raises:
            OptimizerError: a parameter of which this rank has a part, or nothing.
        """
        shards = self._shards()
        shard = None if shards is None else shards.shard_of(parameter)
        if shard is None:
            return None
        if shard.tensor is None or shard.tensor.shape != parameter.shape:
            raise _is_cut(shard)
        return shard.tensor

    def __missing__(self, key: Any) -> Any:
        part = self._slice_of(key)
        return super().__missing__(key) if part is None else self[part]

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or ((part := self._slice_of(key)) is not None and super().__contains__(part))

    def __setitem__(self, key: Any, value: Any) -> None:
        part = self._slice_of(key)
        super().__setitem__(key if part is None else part, value)

    def update(self, *others: Any, **named: Any) -> None:
        for key, value in dict(*others, **named).items():
            self[key] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[misc]
        self.update(other)
        return self

    def copy(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        """By slices, as `dict(state)` has it: what is done to a copy is not done to the optimizer."""
        return defaultdict(dict, self)

    def __copy__(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        """Deep copies and pickles are of that kind, too."""
        return defaultdict, (dict, dict(self))

    def get(self, key: Any, default: Any = None) -> Any:
        part = self._slice_of(key)
        return super().get(key if part is None else part, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        part = self._slice_of(key)
        return super().setdefault(key if part is None else part, default)

    def pop(self, key: Any, *default: Any) -> Any:
        part = self._slice_of(key)
        shards = self._shards()
        shard = None if part is None or shards is None else shards.shard_of(key)
        if shard is not None and shard.bucket.high - shard.bucket.low < shard.bucket.partition.num_elements:
            raise _is_cut(shard)  # also where it is whole on this rank: the others have nothing to give
        return super().pop(key if part is None else part, *default)

    def __delitem__(self, key: Any) -> None:
        """Of a parameter that is cut: what this rank has of its state, if it has any."""
        shards = self._shards()
        shard = None if shards is None else shards.shard_of(key)
        if shard is None:
            super().__delitem__(key)
        elif shard.tensor is not None and shard.tensor.shape == key.shape:
            if not super().__contains__(shard.tensor):
                raise KeyError(shard.fqn)  # a parameter at stage 3 cannot be printed
            super().__delitem__(shard.tensor)
        elif shard.tensor is not None:
            super().pop(shard.tensor, None)  # the ranks that have nothing of it cannot tell either


def _is_cut(shard: Shard) -> OptimizerError:
    part = shard.part
    owned = "no element of it" if part is None else f"elements {part.start} to {part.stop}"
    return OptimizerError(
        f"the optimizer's state of {shard.fqn!r} is cut over the ranks, and this one has that of {owned}: read "
        f"optimizer.state_dict()['state'][{shard.fqn!r}], or optimizer.full_state_dict() for all of it; "
        "`del optimizer.state[p]`, on every rank, forgets it"
    )
