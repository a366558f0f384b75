"""What a family of groups has of the links, and how a group's rings cross domains.

Rings are taken as NCCL makes them: inside a domain they use every link between the group's members; between domains
they leave through the cards of all of the group's ranks, each rank sending to its counterpart in the next domain. So
eight ranks of a node with eight cards of 50 GB/s have 400 GB/s together, and one rank has 50.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Flow", "GroupLinks", "flows_of", "parts_of"]

Flow = tuple[int, int, float]
"""From a rank, to a rank, share of the group's rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLinks:
    """What each group of a family has while all of them communicate; of unequal groups the worst.

    Bandwidths are bytes per second in one direction; links carry both directions at once.

    Args:
        size: ranks of a group, of the largest.
        num_domains: that a group spans.
        ranks_per_domain: most ranks of a group in one domain.
        inside_bytes_per_second: of each rank to the group's other ranks in its domain: the smallest cut that parts
            them. inf where it has none there.
        inside_latency_seconds: of a hop of a ring there; 0 where there is none.
        across_bytes_per_second: of a whole group out of a domain; inf in one domain.
        across_latency_seconds: from a rank to its counterpart in the next domain; 0 in one domain.
        nic_bytes_per_second: of one network card; inf in one domain.
    """

    size: int
    num_domains: int
    ranks_per_domain: int
    inside_bytes_per_second: float = math.inf
    inside_latency_seconds: float = 0.0
    across_bytes_per_second: float = math.inf
    across_latency_seconds: float = 0.0
    nic_bytes_per_second: float = math.inf

    @property
    def ring_bytes_per_second(self) -> float:
        """Rate of each rank in rings over the whole group, without any loss: the lesser of inside and across."""
        return min(self.inside_bytes_per_second, self.across_bytes_per_second)


def parts_of(group: Iterable[int], domain_of: Sequence[int]) -> list[list[int]]:
    """A group's ranks by domain, both in the order in which the group names them."""
    parts: dict[int, list[int]] = {}
    for rank in group:
        parts.setdefault(domain_of[rank], []).append(rank)
    return list(parts.values())


def flows_of(parts: Sequence[Sequence[int]]) -> list[Flow]:
    """What the rings of a group send from domain to domain; of unequal parts the lesser one's ranks serve several."""
    if len(parts) == 1:
        return []
    flows = []
    for here, there in pairwise([*parts, parts[0]]):
        width = max(len(here), len(there))
        flows += [(here[lane % len(here)], there[lane % len(there)], 1.0 / width) for lane in range(width)]
    return flows
