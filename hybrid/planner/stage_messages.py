"""Seconds of the messages between pipeline stages."""

from __future__ import annotations

from itertools import pairwise

from hybrid.contracts.chunk_placement import ChunkPlacement, chunk_rank
from hybrid.contracts.cluster import GroupLinks
from hybrid.contracts.schedule_choice import schedule_placement
from hybrid.planner.axis_links import AxisLinks
from hybrid.planner.collectives import Fabric, collective_seconds
from hybrid.planner.job import Candidate, Job
from hybrid.planner.software import Software

__all__ = ["StageMessages"]


class StageMessages:
    """Of one job; remembers them by what they depend on."""

    def __init__(self, job: Job, software: Software, fabric: Fabric, links: AxisLinks) -> None:
        self._job, self._software, self._fabric, self._links = job, software, fabric, links
        self._known: dict[tuple[object, ...], tuple[list[float], list[float]]] = {}
        self._legs: dict[tuple[object, ...], list[GroupLinks | None]] = {}

    def of(self, candidate: Candidate, num_chunks: int) -> tuple[list[float], list[float]]:
        """What each chunk waits for its messages per micro-batch, and what delays the others at each cut."""
        c = candidate
        is_v = schedule_placement(c.schedule) is ChunkPlacement.V
        # How the ranks of a stage are cut into replicas and shards changes no pair of them.
        key = (c.pp, c.tp, c.cp, c.sequence_parallel, c.micro_batch_size, num_chunks, is_v)
        known = self._known.get(key)
        if known is None:
            transfers = self._transfers(candidate, num_chunks)
            share = self._software.pp_exposed_fraction
            shown = [0.0] * num_chunks
            for cut, seconds in enumerate(transfers if share else ()):
                for chunk in (cut, cut + 1):
                    shown[chunk] += seconds * share
            known = self._known[key] = shown, [seconds * (1 - share) for seconds in transfers]
        return known

    def is_across(self, candidate: Candidate) -> bool:
        """Whether a message between stages leaves a domain, where the software says what that costs the host."""
        if candidate.pp == 1 or not self._software.across_pipeline_seconds:
            return False
        legs = self._leg(candidate, candidate.pp * candidate.virtual_stages)
        return any(link is not None and link.num_domains > 1 for link in legs)

    def _transfers(self, candidate: Candidate, num_chunks: int) -> list[float]:
        """Seconds of one message over each cut between chunks; none between chunks of one rank."""
        if candidate.pp == 1:
            return []
        job, software = self._job, self._software
        size = candidate.micro_batch_size * job.seq / candidate.cp * job.model.hidden * job.precision.activation
        gather = 0.0
        tp_links = self._links.of(candidate, ("tp",))
        if tp_links is not None and (candidate.sequence_parallel or software.is_scatter_gather):
            if not candidate.sequence_parallel:
                gather = collective_seconds("all_gather", size, tp_links, fabric=self._fabric, software=software)
            size /= candidate.tp
        seconds: dict[int, float] = {0: 0.0}
        leg = []
        for link in self._leg(candidate, num_chunks):
            place = id(link) if link is not None else 0
            if place not in seconds:
                sent = collective_seconds("send", size, link, fabric=self._fabric, software=software)
                seconds[place] = sent + gather
            leg.append(seconds[place])
        return (leg * -(-(num_chunks - 1) // len(leg)))[: num_chunks - 1]

    def _leg(self, candidate: Candidate, num_chunks: int) -> list[GroupLinks | None]:
        """Links of the cuts, which repeat, every leg of the model or every two; None between chunks of one rank."""
        placement = schedule_placement(candidate.schedule)
        length = min(num_chunks - 1, 2 * candidate.pp if placement is ChunkPlacement.V else candidate.pp)
        key = (candidate.pp, candidate.world_size, placement, length)
        known = self._legs.get(key)
        if known is None:
            ranks = [chunk_rank(chunk, candidate.pp, placement) for chunk in range(length + 1)]
            known = self._legs[key] = [
                None if source == target else self._links.of_stages(candidate, source, target)
                for source, target in pairwise(ranks)
            ]
        return known
