"""Links read off a graph: any graph, walked vertex by vertex.

Inside a domain: the smallest cut between the group's members, over links among them and the switches of the domain; the
host carries only those that nothing else joins. An edge between switches is shared by the groups that use it.

Between domains: flows go along shortest paths through switches (equal ones share), from the nearest network cards where
no path without cards exists, with the help of a peer where none of a device's own cards leads there. The loads of all
groups add up on each edge and direction, and the fullest sets the rate.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, pairwise, product

import networkx as nx

from hybrid.contracts.cluster_links import GroupLinks, flows_of, parts_of
from hybrid.errors import PlanError

__all__ = ["GraphLinks"]

Edge = tuple[str, str]
Route = tuple[tuple[Edge, float], ...]
"""Directed edges, each with the share of the flow that it carries."""


class GraphLinks:
    """Groups and pairs of ranks on a graph; `names[rank]` is the vertex of a rank."""

    def __init__(self, graph: nx.Graph, names: Sequence[str], domain_of: Sequence[int]) -> None:
        self._graph = graph
        self._names = tuple(names)
        self._domain_of = tuple(domain_of)
        self._kind: Mapping[str, str] = dict(graph.nodes(data="kind"))
        self._routes: dict[Edge, Route] = {}
        self._distances: dict[tuple[str, ...], dict[str, int]] = {}
        self._fields: dict[tuple[str, ...], nx.Graph] = {}
        self._cuts: dict[tuple[str, ...], float] = {}
        self._hops: dict[tuple[str, ...], float] = {}

    def links(self, groups: Iterable[Sequence[int]]) -> GroupLinks:
        """All groups at once."""
        load: dict[Edge, float] = defaultdict(float)
        subsets: list[tuple[str, ...]] = []
        size = num_domains = width = 1
        latency, card = 0.0, math.inf
        for group in groups:
            parts = parts_of(group, self._domain_of)
            size, num_domains = max(size, len(group)), max(num_domains, len(parts))
            width = max(width, *map(len, parts))
            subsets += [tuple(self._names[rank] for rank in part) for part in parts if len(part) > 1]
            for source, target, share in flows_of(parts):
                route = self._route(self._names[source], self._names[target])
                for edge, part_of_flow in route:
                    load[edge] += share * part_of_flow
                latency = max(latency, self._route_latency(route))
                card = min(card, self._card_speed(self._names[source], route))
        shared = self._shared(subsets)
        return GroupLinks(
            size=size,
            num_domains=num_domains,
            ranks_per_domain=width,
            inside_bytes_per_second=min((self._cut(subset, shared) for subset in subsets), default=math.inf),
            inside_latency_seconds=max((self._hop(subset) for subset in subsets), default=0.0),
            across_bytes_per_second=min(
                (self._speed(edge) / amount for edge, amount in load.items()), default=math.inf
            ),
            across_latency_seconds=latency,
            nic_bytes_per_second=card,
        )

    def pair(self, a: int, b: int) -> tuple[float, float]:
        """(bytes per second, seconds) of one message alone."""
        source, target = self._names[a], self._names[b]
        if self._domain_of[a] == self._domain_of[b]:
            return self._cut((source, target), {}), self._hop((source, target))
        route = self._route(source, target)
        return min(self._speed(edge) / share for edge, share in route), self._route_latency(route)

    def check(self) -> None:
        """Refuse ranks that cannot reach each other; a PlanError names them."""
        first = self._names[0]
        for domain, names in self._members.items():
            for one, other in combinations(names, 2):
                if not self._are_joined(one, other):
                    raise PlanError(
                        f"{one} and {other} are of one domain, and no link or switch joins them without a network "
                        f"card or another device; add the link, or give them different domains"
                    )
            if domain != self._domain_of[0]:
                for other in names:
                    self._route(first, other)

    # ---------------------------------------------------------------- inside a domain

    def _are_joined(self, one: str, other: str) -> bool:
        """By a link, a switch, or a path of switches of their domain."""
        if self._graph.has_edge(one, other) or (set(self._switches[one]) & set(self._switches[other])) - self._network:
            return True  # as nearly always
        return bool(nx.has_path(self._field((one, other)), one, other))

    @cached_property
    def _switches(self) -> dict[str, tuple[str, ...]]:
        """Vertex -> the switches that it has an edge to."""
        return {
            here: tuple(there for there in self._graph.adj[here] if self._kind[there] == "switch")
            for here in self._graph
        }

    @cached_property
    def _domain_by_name(self) -> dict[str, int]:
        return dict(zip(self._names, self._domain_of, strict=True))

    @cached_property
    def _members(self) -> dict[int, list[str]]:
        members: dict[int, list[str]] = {}
        for name, domain in self._domain_by_name.items():
            members.setdefault(domain, []).append(name)
        return members

    @cached_property
    def _network(self) -> frozenset[str]:
        """Switches between domains: together with the switches they touch, they have devices of none or of several."""
        switches = [name for name, kind in self._kind.items() if kind == "switch"]
        network: set[str] = set()
        for part in nx.connected_components(self._graph.subgraph(switches)):
            domains = {
                self._domain_by_name[there]
                for here in part
                for there in self._graph.adj[here]
                if there in self._domain_by_name
            }
            if len(domains) != 1:
                network |= part
        return frozenset(network)

    def _field(self, subset: tuple[str, ...]) -> nx.Graph:
        """The members and the switches of their domain; without the host where the rest joins them."""
        if subset not in self._fields:
            switches: set[str] = set()
            stack: list[str] = list(subset)
            while stack:
                beyond = {there for there in self._switches[stack.pop()] if there not in self._network} - switches
                switches |= beyond
                stack += beyond
            hosts = {name for name in switches if self._graph.nodes[name].get("level") == "host"}
            field = self._graph.subgraph({*subset, *(switches - hosts)})
            if hosts and not all(nx.has_path(field, subset[0], other) for other in subset[1:]):
                field = self._graph.subgraph({*subset, *switches})
            self._fields[subset] = field
        return self._fields[subset]

    def _cut(self, subset: tuple[str, ...], shared: Mapping[Edge, int]) -> float:
        """The least bandwidth that parts some of the members from the others."""
        if subset not in self._cuts:
            self._cuts[subset] = self._least_cut(subset, {})
        if not shared or not any(_sorted(edge) in shared for edge in self._field(subset).edges):
            return self._cuts[subset]
        return self._least_cut(subset, shared)

    def _least_cut(self, subset: tuple[str, ...], shared: Mapping[Edge, int]) -> float:
        field = self._field(subset)
        hub = {there for name in subset for there in field.adj[name]}
        if len(hub) == 1 and not hub & set(subset):  # all on one switch and nothing else
            return min(self._speed((name, *hub)) for name in subset)
        flow = nx.Graph()
        for edge in field.edges:
            flow.add_edge(*edge, capacity=self._speed(edge) / shared.get(_sorted(edge), 1))
        return min(float(nx.minimum_cut_value(flow, subset[0], other)) for other in subset[1:])

    def _shared(self, subsets: Sequence[tuple[str, ...]]) -> dict[Edge, int]:
        """Edges between switches of a domain that several groups use -> how many."""
        users: Counter[Edge] = Counter()
        for subset in subsets:
            field = self._field(subset)
            between = {_sorted(edge) for edge in field.edges if self._kind[edge[0]] == self._kind[edge[1]] == "switch"}
            if between:
                used = set()
                for one, other in pairwise([*subset, subset[0]]):
                    for path in nx.all_shortest_paths(field, one, other):
                        used |= {_sorted(edge) for edge in pairwise(path)}
                users.update(used & between)
        return {edge: count for edge, count in users.items() if count > 1}

    def _hop(self, subset: tuple[str, ...]) -> float:
        """Latency of the longest hop that a ring cannot do without: joining nearest members first."""
        if subset not in self._hops:
            field = self._field(subset)
            hub = {there for name in subset for there in field.adj[name]}
            if len(hub) == 1 and not hub & set(subset):
                ends = sorted((self._latency((name, *hub)) for name in subset), reverse=True)
                self._hops[subset] = ends[0] + ends[1]
            else:
                near = nx.Graph()
                for one, other in combinations(subset, 2):
                    length = nx.shortest_path_length(field, one, other, weight="latency_seconds")
                    near.add_edge(one, other, weight=length)
                tree = nx.minimum_spanning_edges(near, data=True)
                self._hops[subset] = max(data["weight"] for _, _, data in tree)
        return self._hops[subset]

    # ---------------------------------------------------------------- between domains

    def _speed(self, edge: Edge) -> float:
        return float(self._graph.edges[edge]["bytes_per_second"])

    def _latency(self, edge: Edge) -> float:
        return float(self._graph.edges[edge]["latency_seconds"])

    def _route_latency(self, route: Route) -> float:
        """Of the average path."""
        return sum(self._latency(edge) * share for edge, share in route)

    def _card_speed(self, name: str, route: Route) -> float:
        """Of the edge by which the flow enters the network: behind the first card, or behind the device without one."""
        cards = {edge[0] for edge, _ in route if self._kind[edge[0]] == "nic" and self._kind[edge[1]] != "device"}
        return min(self._speed(edge) for edge, _ in route if edge[0] in (cards or {name}))

    def _cards(self, name: str) -> list[str]:
        """The nearest network cards of a device, past switches of its domain."""
        level, seen = [name], {name}
        while level:
            cards = sorted({there for here in level for there in self._graph.adj[here] if self._kind[there] == "nic"})
            if cards:
                return cards
            beyond = {there for here in level for there in self._switches[here]} - self._network - seen
            seen |= beyond
            level = sorted(beyond)
        return []

    def _route(self, source: str, target: str) -> Route:
        if (source, target) not in self._routes:
            for leave, enter in self._ways(source, target):
                lanes = self._lanes(leave, enter)
                if lanes:
                    break
            else:
                raise PlanError(
                    f"{source} and {target} reach each other by no path of switches and network cards, not even with "
                    f"the help of other devices of their domains; join a network card of each to a common switch"
                )
            load: dict[Edge, float] = defaultdict(float)
            for here, there in ((source, leave), (enter, target)):
                if here != there:
                    for edge in pairwise(nx.shortest_path(self._field((here, there)), here, there)):
                        load[edge] += 1.0
            for lane in lanes:
                for start, end in pairwise(lane):
                    self._spread(start, end, 1.0 / len(lanes), load)
            self._routes[source, target] = tuple(load.items())
        return self._routes[source, target]

    def _ways(self, source: str, target: str) -> Iterator[Edge]:
        """(device by which a flow leaves, by which it enters): its ends; else one peer helps, at one end or at both.

        So NCCL passes on to the device whose card is on the right rail, or works.
        """
        yield source, target
        here, there = self._peers(source), self._peers(target)
        yield from ((peer, target) for peer in here)
        yield from ((source, peer) for peer in there)
        yield from product(here, there)

    def _peers(self, name: str) -> list[str]:
        """The other devices of its domain."""
        return [peer for peer in self._members[self._domain_by_name[name]] if peer != name]

    def _lanes(self, source: str, target: str) -> list[list[str]]:
        """Stops of each lane from a device to another: themselves and a card of each, where cards are needed."""
        here, there = [source], [target]
        if not self._joined(source, target):
            here, there = self._cards(source) or here, self._cards(target) or there
        width = max(len(here), len(there))
        lanes = []
        for lane in range(width):
            stops = dict.fromkeys((source, here[lane % len(here)], there[lane % len(there)], target))
            lanes.append(list(stops))
        return lanes if all(self._joined(*hop) for lane in lanes for hop in pairwise(lane)) else []

    def _joined(self, start: str, end: str) -> bool:
        """Whether an edge or a path through nothing but switches joins them."""
        return self._graph.has_edge(start, end) or any(here in self._distance_to(end) for here in self._switches[start])

    def _distance_to(self, end: str) -> dict[str, int]:
        """Switch -> hops to `end` through switches."""
        gates = self._switches[end]
        if gates not in self._distances:
            distance = dict.fromkeys(gates, 1)
            level = list(gates)
            while level:
                beyond = dict.fromkeys(
                    there for here in level for there in self._switches[here] if there not in distance
                )
                distance |= dict.fromkeys(beyond, distance[level[0]] + 1)
                level = list(beyond)
            self._distances[gates] = distance
        return self._distances[gates]

    def _spread(self, start: str, end: str, share: float, load: dict[Edge, float]) -> None:
        """Add a flow along all shortest paths, split evenly at each branch."""
        if self._graph.has_edge(start, end):
            load[start, end] += share
            return
        distance = self._distance_to(end)
        nearest = min(distance[there] for there in self._switches[start] if there in distance)
        level = {start: share}
        for left in range(nearest, 0, -1):
            below: dict[str, float] = defaultdict(float)
            for here, amount in level.items():
                steps = [there for there in self._switches[here] if distance.get(there) == left]
                for there in steps:
                    load[here, there] += amount / len(steps)
                    below[there] += amount / len(steps)
            level = below
        for here, amount in level.items():
            load[here, end] += amount


def _sorted(edge: Edge) -> Edge:
    here, there = edge
    return (here, there) if here < there else (there, here)
