"""Which vertices of a cluster's graph look alike, and which of them a picture shows for all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx

from hybrid.contracts.cluster import Cluster

__all__ = ["Domain", "Folded", "LinkKind", "fold", "link_kinds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Devices that meet without a network card, with what belongs to them.

    Args:
        devices: in rank order.
        switches: within the domain, hosts among them.
        cards: network cards that a device or a switch of it hangs on.
        alike: numbers of all domains that look the same, this one first; one where each is shown by itself.
        number: of the domain, in rank order.
    """

    devices: tuple[str, ...]
    switches: tuple[str, ...]
    cards: tuple[str, ...]
    number: int
    alike: tuple[int, ...]

    @property
    def name(self) -> str:
        """What the names of its devices begin with: `node3`, or `node0 to node17`."""
        heads = list(dict.fromkeys(device.rpartition("/")[0] for device in self.devices))
        if not all(heads):
            return f"domain {self.number}"
        return heads[0] if len(heads) == 1 else f"{heads[0]} to {heads[-1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """What is drawn of a graph.

    Args:
        domains: those shown; each stands for all that are alike, or for itself where all are shown.
        looks: one domain for each look, with all that are alike.
        tiers: switches between them, the ones next to the cards first.
        num_alike: of a switch that is shown: how many there are like it.
        tier_sizes: of each tier, how many switches there are in all.
        inner: all switches that lie within a domain.
    """

    domains: tuple[Domain, ...]
    looks: tuple[Domain, ...]
    tiers: tuple[tuple[str, ...], ...]
    num_alike: Mapping[str, int]
    tier_sizes: tuple[int, ...]
    inner: frozenset[str]


@dataclass(slots=True, kw_only=True)
class LinkKind:
    """Links between the same sorts of ends, of one rate."""

    ends: str
    bytes_per_second: float
    latency_seconds: float
    count: int = 0
    examples: list[tuple[str, str]] = field(default_factory=list)
    """At most two."""


def fold(cluster: Cluster, *, room: float, width_of: Callable[[Domain], float], most_switches: int) -> Folded:
    """Every domain if all have room beside each other; otherwise one of each look, as many as have room.

    Args:
        room: in all.
        width_of: what a domain takes of the room.
        most_switches: of a tier; of more, one of each look is shown.
    """
    graph = cluster.graph
    looks = _looks(graph)
    domains = _domains(cluster)
    inner = frozenset(name for one in domains for name in one.switches)
    tiers = _tiers(graph, inner)
    groups = _groups(domains, looks)
    if sum(map(width_of, domains)) > room:
        domains = _as_many_as_have_room(groups, room, width_of)
    near = set(_near(graph, domains))
    shown: list[tuple[str, ...]] = []
    for tier in tiers:
        kept = [name for name in tier if name in near] if len(tier) > most_switches else list(tier)
        if len(kept) > most_switches:
            kept = list({looks[name]: name for name in reversed(kept)}.values())[:most_switches]
        near |= {there for name in kept for there in graph.adj[name]}
        shown.append(tuple(kept))
    counts = Counter(looks[name] for tier in tiers for name in tier)
    return Folded(
        domains=tuple(domains),
        looks=tuple(groups),
        tiers=tuple(shown),
        num_alike={name: counts[looks[name]] for tier in shown for name in tier},
        tier_sizes=tuple(map(len, tiers)),
        inner=inner,
    )


def link_kinds(cluster: Cluster, folded: Folded) -> list[LinkKind]:
    """All links of the graph by what they join and how fast, from the devices outwards."""
    graph = cluster.graph
    found: dict[tuple[str, float, float], LinkKind] = {}
    for here, there, data in graph.edges(data=True):
        sorts = sorted((_sort(graph, end, folded.inner) for end in (here, there)), key=_ORDER.index)
        ends = " – ".join(sorts)
        key = ends, data["bytes_per_second"], data["latency_seconds"]
        kind = found.setdefault(key, LinkKind(ends=ends, bytes_per_second=key[1], latency_seconds=key[2]))
        kind.count += 1
        if len(kind.examples) < 2:
            kind.examples.append((here, there))
    return sorted(found.values(), key=lambda kind: (tuple(map(_ORDER.index, kind.ends.split(" – "))), -kind.count))


_ORDER = ("device", "scale-up switch", "host", "card", "leaf switch", "switch", "spine")


def _sort(graph: nx.Graph, name: str, inner: frozenset[str]) -> str:
    data = graph.nodes[name]
    if data["kind"] == "device":
        return "device"
    if data["kind"] == "nic":
        return "card"
    level = {"host": "host", "spine": "spine", "leaf": "leaf switch"}.get(data.get("level", ""))
    return level or ("scale-up switch" if name in inner else "switch")


def _looks(graph: nx.Graph) -> dict[str, int]:
    """Vertex -> number; equal numbers where no path of links tells two vertices apart.

    Each round a vertex learns the looks of its neighbours over links of each rate, until no more are told apart.
    """
    first = [(data["kind"], data.get("device"), data.get("level")) for _, data in graph.nodes(data=True)]
    looks = dict(zip(graph, _numbered(first), strict=True))
    count = 0
    while len(set(looks.values())) > count:
        count = len(set(looks.values()))
        told = [
            (
                looks[name],
                frozenset(Counter((looks[there], data["bytes_per_second"]) for there, data in edges.items()).items()),
            )
            for name, edges in graph.adj.items()
        ]
        looks = dict(zip(graph, _numbered(told), strict=True))
    return looks


def _numbered(values: Iterable[Any]) -> list[int]:
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def _domains(cluster: Cluster) -> list[Domain]:
    """All of them, in rank order; `alike` is the domain itself."""
    graph = cluster.graph
    members: dict[int, list[str]] = defaultdict(list)
    for name, number in zip(cluster.ranks, cluster.domain_of, strict=True):
        members[number].append(name)
    home = {name: number for number, names in members.items() for name in names}
    switches = _switches_by_domain(graph, home)
    found = []
    for number, names in members.items():
        inside = switches.get(number, [])
        cards = [
            there for name in (*names, *inside) for there in graph.adj[name] if graph.nodes[there]["kind"] == "nic"
        ]
        found.append(
            Domain(
                devices=tuple(names),
                switches=tuple(inside),
                cards=tuple(dict.fromkeys(cards)),
                number=number,
                alike=(number,),
            )
        )
    return found


def _switches_by_domain(graph: nx.Graph, home: Mapping[str, int]) -> dict[int, list[str]]:
    """Switches that devices of one domain alone reach without a card."""
    found: dict[int, list[str]] = defaultdict(list)
    without = graph.subgraph([name for name, kind in graph.nodes(data="kind") if kind != "nic"])
    for part in nx.connected_components(without):
        owners = {home[name] for name in part if name in home}
        for name in sorted(name for name in part if name not in home):
            near = {home[there] for there in graph.adj[name] if there in home} if len(owners) > 1 else owners
            if len(near) == 1:
                found[near.pop()].append(name)
    return found


def _groups(domains: Sequence[Domain], looks: Mapping[str, int]) -> list[Domain]:
    """The first domain of each look, with the numbers of all; the commonest look first."""
    groups: dict[Any, list[Domain]] = defaultdict(list)
    for one in domains:
        names = (*one.devices, *one.switches, *one.cards)
        groups[frozenset(Counter(looks[name] for name in names).items())].append(one)
    ordered = sorted(groups.values(), key=lambda same: (-len(same), same[0].number))
    return [replace(same[0], alike=tuple(one.number for one in same)) for same in ordered]


def _as_many_as_have_room(groups: Sequence[Domain], room: float, width_of: Callable[[Domain], float]) -> list[Domain]:
    """At least one."""
    kept: list[Domain] = []
    for one in groups:
        room -= width_of(one)
        if room < 0 and kept:
            break
        kept.append(one)
    return sorted(kept, key=lambda one: one.number)


def _tiers(graph: nx.Graph, inner: frozenset[str]) -> list[list[str]]:
    """Switches between domains by their distance from the cards (from the devices, without cards)."""
    outer = [name for name, kind in graph.nodes(data="kind") if kind == "switch" and name not in inner]
    left = dict.fromkeys(outer)
    edge = [name for name, kind in graph.nodes(data="kind") if kind in {"nic", "device"} or name in inner]
    tiers: list[list[str]] = []
    below = set(edge)
    while left:
        tier = [name for name in left if any(there in below for there in graph.adj[name])]
        if not tier:  # joined to nothing that is drawn
            return [*tiers, list(left)]
        tiers.append(tier)
        below = set(tier)
        for name in tier:
            del left[name]
    return tiers


def _near(graph: nx.Graph, domains: Sequence[Domain]) -> Iterable[str]:
    for one in domains:
        for name in (*one.devices, *one.switches, *one.cards):
            yield from graph.adj[name]
