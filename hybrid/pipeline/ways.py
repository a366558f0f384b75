"""The ways that a model's forward goes: one for each kind of inputs, looked at when the first such inputs come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from hybrid.pipeline.flow import Flow, Place, assign_chunks, crossing_values
from hybrid.pipeline.holders import Holders
from hybrid.pipeline.own_checkpoints import check_told_apart
from hybrid.pipeline.plan import OwnForwardPlan, modes_key, modes_of, signature_of

__all__ = ["Inputs", "Way", "Ways"]

# What a model is called with.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]

# A forward that goes another way for other sizes or numbers is a rare thing, and looking takes time: after so many
# alike, enough.
_SIZES_LOOKED_AT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One kind of forward, and what follows from it.

    Args:
        flow: what it does.
        chunks: the calls of each chunk.
        crossing: of each chunk but the last, the values that cross the cut behind it.
        passes: of each call, the paths of outputs that are arguments -> paths of these.
        paths: of each call, the paths of its other outputs.
    """

    flow: Flow
    chunks: tuple[range, ...]
    crossing: tuple[tuple[Place, ...], ...]
    passes: tuple[dict[str, str], ...]
    paths: tuple[frozenset[str], ...]


class Ways:
    """Those of one model that is cut.

    Args:
        model: with all of its parameters.
        plan: how it is cut.
        holders: which chunk holds what.
        stage_of: chunk -> its stage.
    """

    def __init__(
        self, model: nn.Module, plan: OwnForwardPlan, holders: Holders, *, stage_of: Callable[[int], int]
    ) -> None:
        self._plan = plan
        self._holders = holders
        self._stage_of = stage_of
        self._modules = list(model.modules())
        # Kind of inputs -> their sizes -> the way.
        self._known: dict[Any, dict[Any, Way]] = {plan.kind: {plan.sizes: _way(plan.flow, plan.chunks)}}
        if plan.in_training is not None:
            chunks = assign_chunks(plan.in_training, plan.flow, plan.chunks)
            kind = plan.kind[0], bytes([True]) * len(self._modules)
            self._known[kind] = {plan.sizes: _way(plan.in_training, chunks)}

    def of_all(self, inputs: Iterable[Inputs], *, model: nn.Module) -> list[Way]:
        """What the forward does with each of these inputs, its modules in the modes in which they are now.

        Raises:
            ModelError: a value that cannot be followed, or the stages do not hold what this way needs.
        """
        modes = modes_key(self._modules)
        return [self._of(args, kwargs, modes, model) for args, kwargs in inputs]

    def _of(self, args: tuple[Any, ...], kwargs: dict[str, Any], modes: bytes, model: nn.Module) -> Way:
        known = self._known.setdefault((signature_of((args, kwargs), sizes=False), modes), {})
        sizes = signature_of((args, kwargs), sizes=True)
        if sizes in known:
            return known[sizes]
        flows = [way.flow for way in known.values()]
        if len(flows) >= _SIZES_LOOKED_AT and all(flow == flows[0] for flow in flows):
            return next(iter(known.values()))
        flow = self._plan.follow(args, kwargs, training=modes_of(model))
        chunks = assign_chunks(flow, self._plan.flow, self._plan.chunks)
        self._holders.check(flow, chunks, self._stage_of)
        known[sizes] = _way(flow, chunks)
        return known[sizes]

    def calls_of(self, unit: str, chunk: int) -> Iterator[int]:
        """The calls of a unit that a chunk makes, in any way that was seen."""
        for ways in self._known.values():
            for way in ways.values():
                yield from (index for index in way.chunks[chunk] if way.flow.calls[index].unit == unit)


def _way(flow: Flow, chunks: tuple[range, ...]) -> Way:
    check_told_apart(flow, chunks)
    return Way(
        flow=flow,
        chunks=chunks,
        crossing=crossing_values(flow, chunks),
        passes=tuple(dict(call.passes) for call in flow.calls),
        paths=tuple(frozenset(path for path, _ in call.values) for call in flow.calls),
    )
