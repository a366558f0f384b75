"""Elements that a rank holds at least, counted without laying them into buckets: for bounds."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from hybrid.contracts.chunk_placement import chunks_on
from hybrid.contracts.schedule_choice import schedule_placement
from hybrid.planner.job import Candidate, Job
from hybrid.planner.model_spec import UnitSpec

__all__ = ["LeastElements", "LeastTable"]


class LeastElements(NamedTuple):
    """Of one rank, before data parallel cuts them: trained and frozen ones, those of experts apart."""

    trained: int
    trained_experts: int
    frozen: int
    frozen_experts: int


class LeastTable:
    """Answers for one model and precision."""

    def __init__(self, job: Job) -> None:
        self._model, self._precision = job.model, job.precision
        # With the chunks, which are known by their id, so that it stays theirs.
        self._elements: dict[tuple[object, ...], tuple[tuple[range, ...], tuple[LeastElements, ...], int]] = {}
        self._unit_sums: dict[tuple[int, int], tuple[list[int], ...]] = {}

    def of_ranks(self, chunks: tuple[range, ...], candidate: Candidate) -> tuple[tuple[LeastElements, ...], int]:
        """What each pipeline rank holds at least, and which holds most: copies of tied parameters, and norms of another
        type, are left out."""
        pp, placement = candidate.pp, schedule_placement(candidate.schedule)
        key = (id(chunks), pp, placement, candidate.tp, candidate.ep)
        known = self._elements.get(key)
        if known is None:
            sums = self._sums_of_units(candidate)
            ranks = tuple(
                LeastElements(*(sum(kind[chunks[at].stop] - kind[chunks[at].start] for at in mine) for kind in sums))
                for mine in (chunks_on(rank, pp, len(chunks), placement) for rank in range(pp))
            )
            known = self._elements[key] = chunks, ranks, max(range(pp), key=lambda rank: ranks[rank])
        return known[1], known[2]

    def _sums_of_units(self, candidate: Candidate) -> tuple[list[int], ...]:
        """Running sums over the units of the model, of each field of `LeastElements`."""
        key = (candidate.tp, candidate.ep)
        known = self._unit_sums.get(key)
        if known is None:
            by_look: dict[int, LeastElements] = {}
            for look in self._model.look_indices:
                if look not in by_look:
                    by_look[look] = self._least_elements(self._model.units[look], candidate)
            columns = zip(*(by_look[look] for look in self._model.look_indices), strict=True)
            known = self._unit_sums[key] = tuple([0, *accumulate(column)] for column in columns)
        return known

    def _least_elements(self, unit: UnitSpec, candidate: Candidate) -> LeastElements:
        counts = {(False, False): 0, (False, True): 0, (True, False): 0, (True, True): 0}
        for parameter in unit.parameters:
            if parameter.tied_to is None and not (parameter.is_norm and self._precision.norm):
                elements = parameter.local_elements(candidate.tp, ep=candidate.ep)
                counts[parameter.trainable, parameter.is_expert and candidate.ep > 1] += elements
        return LeastElements(counts[True, False], counts[True, True], counts[False, False], counts[False, True])
