"""What an offloaded state keeps in host memory, and whether the hosts of a cluster have as much (docs/offload.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hybrid.contracts.cluster import Cluster
from hybrid.planner.job import Candidate
from hybrid.planner.memory_state import StateBytes

__all__ = ["devices_per_host", "fullest_host", "host_parts"]


def host_parts(state: StateBytes, candidate: Candidate) -> dict[str, int]:
    """Part -> bytes that one rank has in its host's memory when its gradients have come there; empty without offload.

    `mirrors`: copies of own parameters that the host updates, where these have neither a master nor a place there.
    """
    if candidate.offload == "none":
        return {}
    has_parameters = candidate.offload == "parameters"
    return {
        "parameters": state.parameters if has_parameters else 0,
        "masters": state.masters,
        "optimizer_state": state.optimizer_state,
        "gradient_shards": state.gradient_shards,
        "mirrors": 0 if has_parameters else state.unmastered,
    }


def devices_per_host(cluster: Cluster) -> int:
    """Ranks that share the memory of one host, at most."""
    if cluster.shape is not None:
        return max(part.devices for part in cluster.shape.parts)
    return cluster.domain_size


def fullest_host(cluster: Cluster, candidate: Candidate, bytes_of_ranks: Sequence[int]) -> int:
    """Bytes on the host whose ranks keep most.

    Args:
        cluster: the hosts.
        candidate: the layout.
        bytes_of_ranks: of a rank of each pipeline stage.
    """
    size, per_stage = devices_per_host(cluster), candidate.world_size // candidate.pp
    if per_stage % size == 0:
        return size * max(bytes_of_ranks)
    ranks = range(candidate.world_size)
    hosts = (Counter(rank // per_stage for rank in ranks[first : first + size]) for first in ranks[::size])
    return max(sum(count * bytes_of_ranks[stage] for stage, count in host.items()) for host in hosts)
