"""Which device each rank runs on: the order, of a few sensible ones, in which a layout is fastest on the graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hybrid.contracts.cluster import Cluster
from hybrid.planner.cost import StepTime, step_time
from hybrid.planner.job import Candidate, Job

__all__ = ["best_rank_order"]

_MOST_COMPARED_DEVICES = 256  # the walk below looks at every pair


def best_rank_order(job: Job, candidate: Candidate, time: StepTime) -> tuple[tuple[int, ...], Job, StepTime]:
    """(device of each rank, the job on a cluster in that order, its time). The given order, unless one is faster."""
    given = tuple(range(job.cluster.num_devices))
    best = (given, job, time)
    for order in _orders(job.cluster):
        moved = replace(job, cluster=job.cluster.with_rank_order(order))
        moved_time = step_time(moved, candidate)
        if moved_time.total_seconds < best[2].total_seconds * (1 - 1e-6):
            best = (order, moved, moved_time)
    return best


def _orders(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    given = tuple(range(cluster.num_devices))
    by_domain = tuple(sorted(given, key=lambda rank: (cluster.domain_of[rank], rank)))
    seen = {given}
    for order in (by_domain, *([_walk(cluster)] if cluster.num_devices <= _MOST_COMPARED_DEVICES else [])):
        if order not in seen:
            seen.add(order)
            yield order


def _walk(cluster: Cluster) -> tuple[int, ...]:
    """From the first device always on to the one that it reaches fastest: neighbours in the order are near."""
    left = list(range(1, cluster.num_devices))
    order = [0]
    while left:
        here = order[-1]
        nearest = min(left, key=lambda device: _distance(cluster, here, device))
        left.remove(nearest)
        order.append(nearest)
    return tuple(order)


def _distance(cluster: Cluster, here: int, there: int) -> tuple[float, float, int]:
    bytes_per_second, latency_seconds = cluster.pair(here, there)
    return (-bytes_per_second, latency_seconds, there)
