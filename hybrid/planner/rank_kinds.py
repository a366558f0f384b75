"""Which pipeline ranks have equal chunks, so that one price serves all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.planner.chunk_seconds import PricedChunk, placed
from hybrid.planner.job import Candidate

__all__ = ["RankKinds", "rank_kinds"]


@dataclass(frozen=True, slots=True)
class RankKinds:
    """Args:
    ranks: the different ranks: their chunks, and whether they have both the beginning and the end of the model.
    numbers: which of them each pipeline rank is.
    """

    ranks: tuple[tuple[tuple[PricedChunk, ...], bool], ...]
    numbers: tuple[int, ...]


def rank_kinds(chunks: Sequence[PricedChunk], candidate: Candidate) -> RankKinds:
    """Of the chunks of a model; equal ones are one object."""
    found: dict[tuple[object, ...], tuple[int, tuple[PricedChunk, ...], bool]] = {}
    numbers = []
    for places in placed(candidate, len(chunks)):
        own = tuple(chunks[place] for place in places)
        is_whole = candidate.pp > 1 and {0, len(chunks) - 1} <= set(places)
        alike = (is_whole, *map(id, own))
        numbers.append(found.setdefault(alike, (len(found), own, is_whole))[0])
    return RankKinds(tuple((own, is_whole) for _, own, is_whole in found.values()), tuple(numbers))
