"""Which chunks of a pipeline are made of the same units, so that one price serves all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybrid.planner.model_spec import UnitSpec
from hybrid.planner.stages import Chunks

__all__ = ["ChunkKind", "ChunkKinds", "StageKinds"]


@dataclass(frozen=True, eq=False, slots=True)
class ChunkKind:
    """Chunks that look alike; `counted`: each different unit, the last ones first, with how many there are."""

    number: int
    units: tuple[UnitSpec, ...]
    counted: tuple[tuple[UnitSpec, int], ...]


@dataclass(frozen=True, eq=False, slots=True)
class StageKinds:
    """The different chunks of a pipeline, and which of them each one is. `stages` is held so that its id stays its."""

    stages: Chunks
    kinds: tuple[ChunkKind, ...]
    numbers: tuple[int, ...]


class ChunkKinds:
    """Of one model; `looks`: id of a unit -> equal for units that cost the same."""

    def __init__(self, looks: Mapping[int, int]) -> None:
        self._looks = looks
        self._kinds: dict[tuple[int, ...], ChunkKind] = {}
        self._stages: dict[int, StageKinds] = {}

    def of(self, stages: Chunks) -> StageKinds:
        """Of a pipeline, by the identity of its stages."""
        known = self._stages.get(id(stages))
        if known is None:
            kinds = [self._kind(units) for units in stages]
            different = tuple({kind.number: kind for kind in kinds}.values())
            known = self._stages[id(stages)] = StageKinds(stages, different, tuple(kind.number for kind in kinds))
        return known

    def _kind(self, units: tuple[UnitSpec, ...]) -> ChunkKind:
        looks = tuple(self._looks[id(unit)] for unit in units)
        kind = self._kinds.get(looks)
        if kind is None:
            first = dict(zip(reversed(looks), reversed(units), strict=True))
            counted = tuple((unit, looks.count(look)) for look, unit in first.items())
            kind = self._kinds[looks] = ChunkKind(len(self._kinds), units, counted)
        return kind
