"""Which device each rank runs on: a few sensible orders of a cluster's devices, for the search to try."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid.contracts.cluster import Cluster

__all__ = ["rank_orders"]

_MOST_COMPARED_DEVICES = 256  # the walk below looks at every pair


def rank_orders(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """The given order; then by domain, and a walk along the fastest links, where they are other ones.

    An order that only renames alike devices is left out: on a regular cluster the given one is all.
    """
    given = tuple(range(cluster.num_devices))
    yield given
    by_domain = tuple(sorted(given, key=lambda rank: (cluster.domain_of[rank], rank)))
    if by_domain != given:
        yield by_domain
    if cluster.given is not None and cluster.num_devices <= _MOST_COMPARED_DEVICES:  # links one by one
        walk = _walk(cluster)
        if walk not in {given, by_domain}:
            yield walk


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
