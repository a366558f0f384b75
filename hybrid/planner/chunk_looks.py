"""What the chunks of a pipeline hold of weights that stand in several places; chunks and ranks that hold alike.

A rank holds a tied weight once, with the first of its chunks that has it. Another chunk of the rank borrows it there;
other ranks may have it as well, and share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hybrid.contracts.chunk_placement import ChunkPlacement, chunks_on
from hybrid.contracts.schedule_choice import schedule_placement
from hybrid.planner.job import Candidate
from hybrid.planner.model_spec import ModelSpec

__all__ = ["ChunkLook", "ChunkLooks", "RankLooks"]

Place = tuple[int, int]
"""(unit, parameter)."""


@dataclass(frozen=True, slots=True)
class ChunkLook:
    """A chunk on its rank.

    Args:
        key: equal for chunks that cost alike.
        chunk: units.
        borrowed: what it does not hold, for another chunk of its rank does.
        lent: what another chunk of its rank borrows.
        shared: what other ranks hold too.
        lenders: the chunks that it borrows from.
    """

    key: int
    chunk: range
    borrowed: frozenset[Place]
    lent: frozenset[Place]
    shared: frozenset[Place]
    lenders: tuple[ChunkLook, ...] = ()


@dataclass(frozen=True, slots=True)
class RankLooks:
    """The different ranks of a pipeline, each with how many chunks of a look it has, and which of them each rank is.

    `chunks` is held so that its id stays its own.
    """

    chunks: tuple[range, ...]
    ranks: tuple[tuple[tuple[ChunkLook, int], ...], ...]
    places: tuple[int, ...]


class ChunkLooks:
    """Answers for one model; remembers them by the chunks."""

    def __init__(self, model: ModelSpec) -> None:
        self._model = model
        self._known: dict[tuple[int, int, ChunkPlacement], RankLooks] = {}
        self._keys: dict[tuple[object, ...], int] = {}

    def of_ranks(self, chunks: tuple[range, ...], candidate: Candidate) -> RankLooks:
        """What each pipeline rank holds; ranks that look alike cost alike."""
        pp, placement = candidate.pp, schedule_placement(candidate.schedule)
        key = (id(chunks), pp, placement)
        if key not in self._known:
            ranks: dict[tuple[object, ...], tuple[tuple[ChunkLook, int], ...]] = {}
            order = []
            for pp_rank in range(pp):
                held = self.of_rank([chunks[at] for at in chunks_on(pp_rank, pp, len(chunks), placement)], chunks, pp)
                alike = tuple(look.key for look in held)
                if alike not in ranks:
                    counts = Counter(alike)
                    ranks[alike] = tuple((look, counts[key]) for key, look in {one.key: one for one in held}.items())
                order.append(alike)
            number = {alike: place for place, alike in enumerate(ranks)}
            self._known[key] = RankLooks(chunks, tuple(ranks.values()), tuple(number[alike] for alike in order))
        return self._known[key]

    def of_rank(self, mine: Sequence[range], chunks: Sequence[range], pp: int) -> list[ChunkLook]:
        """Of a rank with these of all the chunks."""
        shared: set[Place] = set()
        borrowed: dict[Place, Place] = {}
        for holders in self._ties.values():
            here = [place for place in holders if any(place[0] in chunk for chunk in mine)]
            borrowed |= dict.fromkeys(here[1:], here[0]) if here else {}
            if here and len(here) < len(holders):
                shared.add(here[0])
        looks: list[ChunkLook] = []
        for chunk in mine:
            taken = {place: owner for place, owner in borrowed.items() if place[0] in chunk}
            given = {owner for place, owner in borrowed.items() if owner[0] in chunk and place[0] not in chunk}
            owners = {owner for owner in taken.values() if owner[0] not in chunk}
            lenders = tuple(look for look in looks if any(owner[0] in look.chunk for owner in owners))
            own = frozenset(place for place in shared if place[0] in chunk)
            key = self._key(chunk, frozenset(taken), frozenset(given), own, lenders, pp)
            looks.append(ChunkLook(key, chunk, frozenset(taken), frozenset(given), own, lenders))
        return looks

    def _key(
        self,
        chunk: range,
        borrowed: frozenset[Place],
        lent: frozenset[Place],
        shared: frozenset[Place],
        lenders: Sequence[ChunkLook],
        pp: int,
    ) -> int:
        looks = self._model.look_indices[chunk.start : chunk.stop]
        special = tuple(
            tuple(sorted((at - chunk.start, index) for at, index in places)) for places in (borrowed, lent, shared)
        )
        key = (looks, special, tuple(look.key for look in lenders), pp > 1)
        return self._keys.setdefault(key, len(self._keys))

    @cached_property
    def _ties(self) -> Mapping[Place, tuple[Place, ...]]:
        """An owner -> all that hold the same parameter, the owner first."""
        places = {
            f"{unit.name}.{parameter.name}": (at, index)
            for at, unit in enumerate(self._model.units)
            for index, parameter in enumerate(unit.parameters)
        }
        ties: dict[Place, list[Place]] = {}
        for at, unit in enumerate(self._model.units):
            for index, parameter in enumerate(unit.parameters):
                owner = places.get(parameter.tied_to or "")
                if owner is not None:
                    ties.setdefault(owner, [owner]).append((at, index))
        return {owner: tuple(sorted(holders)) for owner, holders in ties.items()}
