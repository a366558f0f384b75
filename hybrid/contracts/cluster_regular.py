"""Links of equal nodes without their graph: what `cluster_graph` finds, by counting.

All nodes look alike, so inside a domain one node stands for all, and between domains every edge of the graph is a place
in an array: device to card, card to leaf, leaf to spine. The two must agree (tests compare them).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from hybrid.contracts.cluster_graph import GraphLinks
from hybrid.contracts.cluster_links import Flow, GroupLinks, flows_of, parts_of
from hybrid.contracts.cluster_shape import Shape, add_inside
from hybrid.contracts.device_kind import link_figure

__all__ = ["RegularLinks"]

Ranks = NDArray[np.int64]
Flows = tuple[Ranks, Ranks, NDArray[np.float64]]


class RegularLinks:
    """Groups and pairs of ranks; `slots[rank]` is the rank's device, numbered node by node."""

    def __init__(self, shape: Shape, slots: Ranks) -> None:
        part, fabric = shape.parts[0], shape.fabric
        self._part = part
        node, local = slots // part.devices, slots % part.devices
        self._domain = node // part.nodes_per_domain
        self._place = slots - self._domain * part.devices * part.nodes_per_domain
        # A device with several cards spreads over them evenly: they count as one card of their bandwidth together.
        self._cards_per_device = max(1, part.num_nics // part.devices)
        self._host = part.kind.host_bytes_per_second * self._cards_per_device
        self._nic = part.nic_bytes_per_second * self._cards_per_device
        self._spine_latency = 2 * link_figure("network_edge_latency")
        self._latency = 2 * link_figure("nic_attach_latency") + self._spine_latency
        self._is_alike = part.kind.topology == "switch"
        cards = min(part.num_nics, part.devices)
        card = local * cards // part.devices
        self._card = node * cards + card
        block = node // fabric.nodes_per_leaf
        self._leaf = block * cards + card if fabric.rails else block
        nodes_below = np.bincount(np.arange(shape.num_nodes) // fabric.nodes_per_leaf)
        below = nodes_below * part.num_nics * part.nic_bytes_per_second / fabric.oversubscription
        self._uplink = np.repeat(below / cards, cards) if fabric.rails else below

    def links(self, groups: Iterable[Sequence[int]] | Ranks) -> GroupLinks:
        """All groups at once."""
        size = num_domains = width = 1
        inside, hop = math.inf, 0.0
        flows: list[Flows] = []
        ragged: list[Flow] = []
        for ranks in _by_size(groups):
            size = max(size, ranks.shape[1])
            for parts in self._parts(ranks):
                num_domains, width = max(num_domains, parts.shape[1]), max(width, parts.shape[2])
                speed, latency = self._inside(parts)
                inside, hop = min(inside, speed), max(hop, latency)
                flows += _flows(parts)
            for group in self._ragged(ranks):
                parts_list = parts_of(group, self._domains)
                num_domains, width = max(num_domains, len(parts_list)), max(width, *map(len, parts_list))
                for part in parts_list:
                    speed, latency = self._inside(np.array(part).reshape(1, 1, -1))
                    inside, hop = min(inside, speed), max(hop, latency)
                ragged += flows_of(parts_list)
        if ragged:
            source, target, share = zip(*ragged, strict=True)
            flows.append((np.array(source), np.array(target), np.array(share)))
        across, latency = self._across(flows)
        return GroupLinks(
            size=size,
            num_domains=num_domains,
            ranks_per_domain=width,
            inside_bytes_per_second=inside,
            inside_latency_seconds=hop,
            across_bytes_per_second=across,
            across_latency_seconds=latency,
            nic_bytes_per_second=self._part.nic_bytes_per_second if flows else math.inf,
        )

    def pair(self, a: int, b: int) -> tuple[float, float]:
        """(bytes per second, seconds) of one message alone."""
        if self._domain[a] == self._domain[b]:
            places = (0, 1) if self._is_alike else (int(self._place[a]), int(self._place[b]))
            return self._node.pair(*places)
        worst, latency = min(self._host, self._nic), self._latency
        if self._leaf[a] != self._leaf[b]:
            worst = min(worst, float(self._uplink[self._leaf[a]]), float(self._uplink[self._leaf[b]]))
            latency += self._spine_latency
        return worst, latency

    # ---------------------------------------------------------------- inside a domain

    @cached_property
    def _domains(self) -> list[int]:
        return [int(domain) for domain in self._domain]

    @cached_property
    def _node(self) -> GraphLinks:
        """One domain, which stands for all: a last, smaller one hangs on a switch and looks the same to its members."""
        size = min(self._part.devices * self._part.nodes_per_domain, len(self._domain))
        names = [str(place) for place in range(size)]
        graph = nx.Graph()
        graph.add_nodes_from(names, kind="device")
        add_inside(graph, "domain", names, self._part.kind)
        return GraphLinks(graph, names, [0] * size)

    @cached_property
    def _known(self) -> dict[tuple[int, ...], tuple[float, float]]:
        return {}

    def _inside(self, parts: Ranks) -> tuple[float, float]:
        """(bytes per second, latency) of the worst part; `parts` is groups × domains × ranks."""
        width = parts.shape[2]
        if width == 1:
            return math.inf, 0.0
        # On a switch the places make no difference.
        places = np.arange(width)[None] if self._is_alike else self._place[parts].reshape(-1, width)
        worst = math.inf, 0.0
        for look in map(tuple, np.unique(places, axis=0).tolist()):
            if look not in self._known:
                links = self._node.links([look])
                self._known[look] = links.inside_bytes_per_second, links.inside_latency_seconds
            speed, latency = self._known[look]
            worst = min(worst[0], speed), max(worst[1], latency)
        return worst

    # ---------------------------------------------------------------- between domains

    def _parts(self, ranks: Ranks) -> Iterator[Ranks]:
        """Groups × domains × ranks, where every group has as many ranks, side by side, in each of its domains."""
        width = self._width(ranks)
        if width:
            yield ranks.reshape(len(ranks), -1, width)

    def _ragged(self, ranks: Ranks) -> Iterator[Sequence[int]]:
        """The groups one by one where they are not so."""
        if not self._width(ranks):
            yield from ranks.tolist()

    def _width(self, ranks: Ranks) -> int:
        domains = self._domain[ranks]
        changes = np.flatnonzero(domains[0] != domains[0, 0])
        width = int(changes[0]) if len(changes) else domains.shape[1]
        if domains.shape[1] % width:
            return 0
        parts = domains.reshape(len(ranks), -1, width)
        heads = np.sort(parts[:, :, 0], axis=1)
        is_even = bool((parts == parts[:, :, :1]).all()) and bool((np.diff(heads, axis=1) > 0).all())
        return width if is_even else 0

    def _across(self, flows: Sequence[Flows]) -> tuple[float, float]:
        """(bytes per second, latency) of all flows at once."""
        if not flows:
            return math.inf, 0.0
        source, target = (np.concatenate([flow[end] for flow in flows]) for end in (0, 1))
        share = np.concatenate([flow[2] for flow in flows])
        host = self._part.kind.host_bytes_per_second * self._cards_per_device
        card = self._part.nic_bytes_per_second * self._cards_per_device
        worst = math.inf
        for ranks in (source, target):
            worst = min(
                worst, host / np.bincount(ranks, share).max(), card / np.bincount(self._card[ranks], share).max()
            )
        is_far = self._leaf[source] != self._leaf[target]
        if is_far.any():
            for ranks in (source, target):
                load = np.bincount(self._leaf[ranks[is_far]], share[is_far], minlength=len(self._uplink))
                worst = min(worst, (self._uplink[load > 0] / load[load > 0]).min())
        return float(worst), self._latency + self._spine_latency * bool(is_far.any())


def _by_size(groups: Iterable[Sequence[int]] | Ranks) -> list[Ranks]:
    if isinstance(groups, np.ndarray):
        return [groups]
    by_size: dict[int, list[Sequence[int]]] = {}
    for group in groups:
        by_size.setdefault(len(group), []).append(group)
    return [np.array(same) for same in by_size.values()]


def _flows(parts: Ranks) -> list[Flows]:
    """As `flows_of`, for groups whose parts are equal."""
    if parts.shape[1] == 1:
        return []
    source, target = parts.ravel(), np.roll(parts, -1, axis=1).ravel()
    return [(source, target, np.full(len(source), 1.0 / parts.shape[2]))]
