"""The description of a cluster that its graph is built from: nodes, network cards, switches.

    spine                                 one vertex stands for all spine switches
     ├─ leaf0/rail0 … leaf0/rail7         rails: NIC i of `nodes_per_leaf` nodes hangs on leaf switch i;
     │    node0/nic0   node1/nic0 …       without rails all NICs of `nodes_per_leaf` nodes hang on one leaf
     │    node0/gpu0   node1/gpu0         one NIC for several devices, or several for one, as the numbers are
     └─ …
    domain0                               the switch of a scale-up domain; a mesh has an edge per pair instead
    domain0/host                          where the devices of a node meet over PCIe

A leaf has `bandwidth of its NICs / oversubscription` towards the spine. A domain is what meets without a NIC: a node,
or the nodes of a rack that scale-up links join.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import networkx as nx

from hybrid.contracts.device_kind import DeviceKind, link_figure

__all__ = ["Fabric", "NodePart", "Shape", "add_inside"]

# NVLinks between the eight devices of a DGX-1V.
HYBRID_MESH = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePart:
    """`count` equal nodes.

    Args:
        count: of nodes.
        devices: in each.
        kind: of the devices.
        num_nics: network cards of a node.
        nic_bytes_per_second: of one card and direction.
        domain: devices that scale-up links join; None: as the kind has it.
    """

    count: int
    devices: int
    kind: DeviceKind
    num_nics: int
    nic_bytes_per_second: float
    domain: int | None = None

    def nics_of(self, local: int) -> range:
        """The cards that device `local` of a node sends through: its nearest."""
        if self.num_nics <= self.devices:
            card = local * self.num_nics // self.devices
            return range(card, card + 1)
        return range(local * self.num_nics // self.devices, (local + 1) * self.num_nics // self.devices)

    @property
    def nodes_per_domain(self) -> int:
        """1 but for racks."""
        if self.domain is None and not self.kind.is_domain_of_rack:
            return 1
        return max(1, (self.domain or self.kind.scale_up_domain) // self.devices)

    @property
    def text(self) -> str:
        return f"{self.count}x{self.devices}x{self.kind.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The switches between nodes.

    Args:
        rails: NIC i of every node on leaf i; else all NICs of a node on one leaf.
        nodes_per_leaf: nodes that meet at one leaf (at one set of rails).
        oversubscription: bandwidth of a leaf towards its nodes over that towards the spine; 1 is non-blocking.
    """

    rails: bool
    nodes_per_leaf: int
    oversubscription: float = 1.0

    def leaf_name(self, node: int, card: int) -> str:
        block = node // self.nodes_per_leaf
        return f"leaf{block}/rail{card}" if self.rails else f"leaf{block}"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Nodes in order, and what joins them. Devices are numbered node by node."""

    parts: tuple[NodePart, ...]
    fabric: Fabric

    @cached_property
    def num_nodes(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def is_regular(self) -> bool:
        """Equal nodes, and each device has as many cards of its own, or shares one."""
        part = self.parts[0]
        return len(self.parts) == 1 and (part.num_nics <= part.devices or part.num_nics % part.devices == 0)

    def nodes(self) -> Iterator[tuple[int, int, NodePart]]:
        """(node, its domain, its part) in order."""
        node = domain = 0
        for part in self.parts:
            for number in range(part.count):
                yield node + number, domain + number // part.nodes_per_domain, part
            node += part.count
            domain += -(-part.count // part.nodes_per_domain)

    @cached_property
    def num_domains(self) -> int:
        return sum(-(-part.count // part.nodes_per_domain) for part in self.parts)

    @property
    def device_names(self) -> tuple[str, ...]:
        return tuple(f"node{node}/gpu{local}" for node, _, part in self.nodes() for local in range(part.devices))

    @property
    def domains(self) -> tuple[int, ...]:
        """Domain of each device."""
        return tuple(domain for _, domain, part in self.nodes() for _ in range(part.devices))

    @property
    def has_spine(self) -> bool:
        """Whether more than one leaf is there."""
        return self.num_nodes > self.fabric.nodes_per_leaf or (
            self.fabric.rails and max(part.num_nics for part in self.parts) > 1
        )

    def build(self) -> nx.Graph:
        """The graph; vertices have `kind` (device, switch, nic), edges `bytes_per_second` and `latency_seconds`."""
        graph = nx.Graph()
        members: dict[int, tuple[DeviceKind, list[str]]] = {}
        for node, domain, part in self.nodes():
            names = [f"node{node}/gpu{local}" for local in range(part.devices)]
            graph.add_nodes_from(names, kind="device", device=part.kind.name, domain=domain)
            members.setdefault(domain, (part.kind, []))[1].extend(names)
        for domain, (kind, names) in members.items():
            add_inside(graph, f"domain{domain}", names, kind)
        if self.num_domains > 1:
            self._add_network(graph)
        return graph

    def _add_network(self, graph: nx.Graph) -> None:
        attach, edge = link_figure("nic_attach_latency"), link_figure("network_edge_latency")
        below: dict[str, float] = {}
        for node, _, part in self.nodes():
            speed, host = part.nic_bytes_per_second, part.kind.host_bytes_per_second
            for card in range(part.num_nics):
                leaf = self.fabric.leaf_name(node, card)
                graph.add_node(f"node{node}/nic{card}", kind="nic")
                graph.add_node(leaf, kind="switch", level="leaf")
                graph.add_edge(f"node{node}/nic{card}", leaf, bytes_per_second=speed, latency_seconds=edge)
                below[leaf] = below.get(leaf, 0.0) + speed
            for local in range(part.devices):
                for card in part.nics_of(local):
                    ends = f"node{node}/gpu{local}", f"node{node}/nic{card}"
                    graph.add_edge(*ends, bytes_per_second=host, latency_seconds=attach)
        if self.has_spine:
            graph.add_node("spine", kind="switch", level="spine")
            for leaf, speed in below.items():
                up = speed / self.fabric.oversubscription
                graph.add_edge(leaf, "spine", bytes_per_second=up, latency_seconds=edge)


def add_inside(graph: nx.Graph, domain: str, names: list[str], kind: DeviceKind) -> None:
    """Add the links among the devices of one domain; switches get names that begin with that of the domain."""
    if kind.topology == "switch" or (kind.topology == "hybrid_mesh" and len(names) > 8):  # DGX-2 has switches
        graph.add_node(domain, kind="switch", level="scale_up")
        speed, half = kind.scale_up_bytes_per_second, kind.scale_up_latency_seconds / 2
        graph.add_edges_from(((name, domain) for name in names), bytes_per_second=speed, latency_seconds=half)
        return
    for (one, other), speed in _direct(len(names), kind).items():
        latency = kind.scale_up_latency_seconds
        graph.add_edge(names[one], names[other], bytes_per_second=speed, latency_seconds=latency)
    if kind.topology != "mesh" and len(names) > 1:
        graph.add_node(f"{domain}/host", kind="switch", level="host")
        speed = kind.host_bytes_per_second
        if not kind.has_peer_to_peer:
            speed *= link_figure("host_staging_fraction")
        latency = link_figure("host_latency")
        ends = ((name, f"{domain}/host") for name in names)
        graph.add_edges_from(ends, bytes_per_second=speed, latency_seconds=latency)


def _direct(num_devices: int, kind: DeviceKind) -> dict[tuple[int, int], float]:
    """(device, device) -> bytes per second of the links between them."""
    pairs = list(combinations(range(num_devices), 2))
    if kind.topology == "mesh":
        return dict.fromkeys(pairs, kind.peer_bytes_per_second)
    if kind.topology == "bridge":
        return {(one, other): kind.peer_bytes_per_second for one, other in pairs if one % 2 == 0 and other == one + 1}
    if kind.topology == "hybrid_mesh":
        link = link_figure("hybrid_mesh_link")
        if num_devices <= 4:  # two links to each of three peers
            return dict.fromkeys(pairs, 2 * link)
        return {pair: HYBRID_MESH[pair] * link for pair in pairs if pair in HYBRID_MESH}
    return {}
