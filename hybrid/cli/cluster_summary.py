"""The figures of a cluster that `hybrid cluster show` prints."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import networkx as nx

from hybrid.cli.cluster_drawing import device_dict, print_cluster
from hybrid.contracts.cluster import Cluster

__all__ = ["ClusterSummary", "Level"]

MOST_PAIRS_OF_A_DOMAIN = 16  # devices of a domain whose pairs are all looked at; larger ones hang on a switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One row: who talks, at what rate per rank (or together), after what latency."""

    name: str
    bytes_per_second: float
    highest_bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSummary:
    """What is said about one cluster."""

    cluster: Cluster

    def levels(self) -> list[Level]:
        """From two neighbours to the whole; none where nothing can be planned."""
        cluster = self.cluster
        if cluster.refusal is not None or cluster.num_devices == 1:
            return []
        domains: dict[int, list[int]] = defaultdict(list)
        for rank, domain in enumerate(cluster.domain_of):
            domains[domain].append(rank)
        first = max(domains.values(), key=len)
        levels = []
        if len(first) > 1:
            near = first[:MOST_PAIRS_OF_A_DOMAIN]
            pairs = [cluster.pair(a, b) for a in near for b in near if a < b]
            levels.append(_level("two devices of a domain", pairs))
            links = cluster.links([ranks for ranks in domains.values() if len(ranks) > 1])
            rate = links.inside_bytes_per_second, links.inside_latency_seconds
            levels.append(_level(f"rings over each domain of {len(first)}", [rate]))
        if len(domains) > 1:
            heads = [ranks[0] for ranks in domains.values()]
            sample = sorted({*heads[:8], *heads[:: max(1, len(heads) // 8)], heads[-1]})
            levels.append(_level("two devices of two domains", [cluster.pair(heads[0], b) for b in sample[1:]]))
            rings = cluster.links([tuple(range(cluster.num_devices))])
            rate = rings.ring_bytes_per_second, rings.across_latency_seconds
            levels.append(_level(f"rings over all {cluster.num_devices}", [rate]))
        return levels

    def halves_bytes_per_second(self) -> float | None:
        """Together, when each device of the first half sends to its counterpart in the second; None in one domain."""
        cluster = self.cluster
        half = cluster.num_devices // 2
        if cluster.refusal is not None or cluster.num_domains == 1:
            return None
        links = cluster.links([(rank, rank + half) for rank in range(half)])
        rate = links.across_bytes_per_second
        return half * (links.inside_bytes_per_second if math.isinf(rate) else rate)

    def slow_links(self) -> list[tuple[str, str, float, float]]:
        """(end, end, bytes per second, that of most links between the same sorts of ends), where a graph was given."""
        if self.cluster.given is None:
            return []
        graph = self.cluster.graph
        by_sort: dict[tuple[str, ...], list[tuple[str, str, float]]] = defaultdict(list)
        for here, there, speed in graph.edges(data="bytes_per_second"):
            ends = (_sort(graph, end) for end in (here, there))
            by_sort[tuple(sorted(ends))].append((here, there, speed))
        found = []
        for edges in by_sort.values():
            speeds = sorted(speed for _, _, speed in edges)
            usual = speeds[len(speeds) // 2]
            found += [(here, there, speed, usual) for here, there, speed in edges if speed < usual]
        return found

    def to_dict(self) -> dict[str, Any]:
        cluster = self.cluster
        return {
            "name": cluster.name,
            "num_devices": cluster.num_devices,
            "num_domains": cluster.num_domains,
            "domain_size": cluster.domain_size,
            "device": device_dict(cluster.device),
            "memory_bytes": cluster.num_devices * cluster.device.memory_bytes if cluster.refusal is None else None,
            "network": _network_dict(cluster),
            "levels": [
                {
                    "name": level.name,
                    "bytes_per_second": level.bytes_per_second,
                    "highest_bytes_per_second": level.highest_bytes_per_second,
                    "latency_seconds": level.latency_seconds,
                }
                for level in self.levels()
            ],
            "halves_bytes_per_second": self.halves_bytes_per_second(),
            "slow_links": [
                {"between": [here, there], "bytes_per_second": speed, "usual_bytes_per_second": usual}
                for here, there, speed, usual in self.slow_links()
            ],
            "notes": list(cluster.notes),
            "refusal": cluster.refusal,
        }

    def print(self) -> None:
        print_cluster(self.cluster, **self._figures())

    def page(self) -> str:
        """As an HTML file."""
        from hybrid.report.cluster_page import cluster_page  # here: what draws it is not wanted on a terminal

        return cluster_page(self.cluster, **self._figures())

    def _figures(self) -> dict[str, Any]:
        rows = [
            (level.name, level.bytes_per_second, level.highest_bytes_per_second, level.latency_seconds)
            for level in self.levels()
        ]
        return {"rows": rows, "halves": self.halves_bytes_per_second(), "slow_links": self.slow_links()}


def _level(name: str, rates: list[tuple[float, float]]) -> Level:
    """The slowest and the fastest of several; the longest latency."""
    return Level(
        name=name,
        bytes_per_second=min(speed for speed, _ in rates),
        highest_bytes_per_second=max(speed for speed, _ in rates),
        latency_seconds=max(latency for _, latency in rates),
    )


def _sort(graph: nx.Graph, name: str) -> str:
    """What a vertex is; of switches those that devices hang on are another sort."""
    kind = graph.nodes[name]["kind"]
    has_devices = any(graph.nodes[there]["kind"] == "device" for there in graph.adj[name])
    return f"{kind} {graph.nodes[name].get('level', '')} {has_devices and kind == 'switch'}"


def _network_dict(cluster: Cluster) -> dict[str, Any] | None:
    shape = cluster.shape
    if shape is None or shape.num_domains == 1:
        return None
    fabric = shape.fabric
    return {
        "num_nodes": shape.num_nodes,
        "nics_per_node": [part.num_nics for part in shape.parts],
        "nic_bytes_per_second": [part.nic_bytes_per_second for part in shape.parts],
        "rails": fabric.rails,
        "nodes_per_leaf": fabric.nodes_per_leaf,
        "oversubscription": fabric.oversubscription,
    }
