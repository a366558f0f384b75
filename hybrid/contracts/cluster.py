"""A cluster: devices in rank order, the graph of links between them, and what groups of ranks have of these links.

    cluster = parse_cluster("16x8xH100", network="8x400G")
    cluster.links([range(8)])             one group on the switch of its node: 450 GB/s per rank
    cluster.axis_links(size=16, stride=8) all groups of 16 ranks that are 8 apart, at once: a card each, 50 GB/s
    cluster.pair(0, 8)                    one message alone: (50e9, 2e-06)

Ranks of one domain meet without a network card: over scale-up links, or over the host of their node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

from hybrid.contracts.cluster_file import read_cluster_file
from hybrid.contracts.cluster_graph import GraphLinks
from hybrid.contracts.cluster_links import GroupLinks
from hybrid.contracts.cluster_regular import RegularLinks
from hybrid.contracts.cluster_shape import Shape
from hybrid.contracts.cluster_text import Description, Options, described
from hybrid.contracts.device_kind import DeviceKind, MeasuredDevice, device_kind
from hybrid.contracts.measurements import Measurements
from hybrid.errors import PlanError

__all__ = ["Cluster", "DeviceKind", "GroupLinks", "device_kind", "parse_cluster"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Cluster:
    """Devices and links. Compared by identity.

    Args:
        name: as the user gave it.
        device: kind of every device.
        ranks: vertex of each rank.
        domain_of: scale-up domain of each rank.
        shape: the description, where nodes and network are regular enough to have one; the graph is built from it when
            it is asked for.
        slots: device of each rank, numbered node by node; empty: as they come. For `shape`.
        given: the graph, where there is no such description, or single links differ from it.
        notes: what a reader of the figures should know.
        refusal: why nothing can be planned on it; None where it can.
        measured: what `hybrid calibrate` found on it.
        path: of the file that it was read from.
        host_memory_bytes: of one host, as that file says.
    """

    name: str
    device: DeviceKind
    ranks: tuple[str, ...]
    domain_of: tuple[int, ...]
    shape: Shape | None = None
    slots: tuple[int, ...] = ()
    given: nx.Graph | None = None
    notes: tuple[str, ...] = ()
    refusal: str | None = None
    measured: Measurements | None = None
    path: Path | None = None
    host_memory_bytes: int | None = None

    def __repr__(self) -> str:
        return f"Cluster({self.name!r}: {self.num_devices} × {self.device.name} in {self.num_domains} domains)"

    @property
    def num_devices(self) -> int:
        return len(self.ranks)

    @cached_property
    def _domain_sizes(self) -> Counter[int]:
        return Counter(self.domain_of)

    @property
    def num_domains(self) -> int:
        return len(self._domain_sizes)

    @property
    def domain_size(self) -> int:
        """Devices of the largest domain."""
        return max(self._domain_sizes.values())

    @property
    def is_uniform(self) -> bool:
        """All domains have as many devices."""
        return len(set(self._domain_sizes.values())) == 1

    @cached_property
    def graph(self) -> nx.Graph:
        """Vertices with `kind` (device, switch, nic); edges with `bytes_per_second` and `latency_seconds`."""
        if self.given is not None:
            return self.given
        assert self.shape is not None
        return self.shape.build()

    def links(self, groups: Sequence[Sequence[int]]) -> GroupLinks:
        """What each of these groups has while all of them communicate.

        Args:
            groups: ranks of each; no rank in two groups. Of an axis on equal nodes a few alike groups do not stand for
                all: those of one node share its cards.

        Raises:
            PlanError: a group is empty, or nothing can be planned on this cluster.
        """
        listed = [tuple(group) for group in groups]
        if not all(listed) or not listed:
            raise PlanError("links(groups): a group needs at least one rank")
        return self._engine.links(listed)

    def axis_links(self, *, size: int, stride: int) -> GroupLinks:
        """What all groups of an axis have at once: `size` ranks each, `stride` apart, as `Layout.groups` makes them.

        Kept, so that a second call costs nothing.

        Raises:
            PlanError: size · stride does not divide the number of devices.
        """
        if size < 1 or stride < 1 or self.num_devices % (size * stride):
            raise PlanError(
                f"groups of {size} ranks, {stride} apart: {size * stride} does not divide {self.num_devices}"
            )
        if (size, stride) not in self._axes:
            ranks = np.arange(self.num_devices).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size)
            groups: Any = ranks if isinstance(self._engine, RegularLinks) else ranks.tolist()
            self._axes[size, stride] = self._engine.links(groups)
        return self._axes[size, stride]

    def pair(self, a: int, b: int) -> tuple[float, float]:
        """(bytes per second, latency in seconds) of one message alone from rank a to rank b."""
        return (math.inf, 0.0) if a == b else self._engine.pair(a, b)

    def with_rank_order(self, order: Sequence[int]) -> Cluster:
        """The same devices; rank i is what rank `order[i]` was.

        Raises:
            PlanError: the order does not name each rank once.
        """
        if sorted(order) != list(range(self.num_devices)):
            twice = [rank for rank, count in Counter(order).items() if count > 1]
            detail = f"rank {twice[0]} stands there twice" if twice else f"it has {len(order)}"
            raise PlanError(f"a rank order names each of the {self.num_devices} ranks once; {detail}")
        slots = self.slots or range(self.num_devices)
        return replace(
            self,
            ranks=tuple(self.ranks[rank] for rank in order),
            domain_of=tuple(self.domain_of[rank] for rank in order),
            slots=tuple(slots[rank] for rank in order),
        )

    def with_device(self, **figures: Any) -> Cluster:
        """The same cluster with other figures of its device: `with_device(memory_bytes=8e9)`.

        Links stay as they are.
        """
        return replace(self, device=replace(self.device, **figures))

    def with_nodes(self, times: int) -> Cluster | None:
        """So many times the nodes, joined in the same way; None where links are given one by one or nodes differ."""
        if self.given is not None or self.shape is None or len(self.shape.parts) > 1 or self.slots:
            return None
        part = replace(self.shape.parts[0], count=self.shape.parts[0].count * times)
        shape = replace(self.shape, parts=(part,))
        return replace(self, name=part.text, shape=shape, ranks=shape.device_names, domain_of=shape.domains)

    @cached_property
    def _axes(self) -> dict[tuple[int, int], GroupLinks]:
        return {}

    @cached_property
    def _engine(self) -> GraphLinks | RegularLinks:
        if self.refusal is not None:
            raise PlanError(self.refusal)
        if self.given is None and self.shape is not None and self.shape.is_regular:
            return RegularLinks(self.shape, np.array(self.slots or range(self.num_devices)))
        return GraphLinks(self.graph, self.ranks, self.domain_of)


def parse_cluster(
    source: str | Path | Mapping[str, Any],
    *,
    network: str | None = None,
    oversubscription: float | None = None,
    rails: bool | None = None,
    nodes_per_leaf: int | None = None,
    domain: int | None = None,
    describe: bool = False,
) -> Cluster:
    """The cluster that a text, a file or a mapping describes.

    Args:
        source: `16x8xH100` (nodes × devices × kind), `8xA100-80GB` (one node), `2x8xH100+1x4xH100`, `local` (the
            processors of this machine), a YAML file (docs/cluster.md) or what stands in one.
        network: cards of a node and their speed, `8x400G` in Gb/s; None: typical for the device.
        oversubscription: bandwidth of a leaf switch towards its nodes over that towards the spine; None: as the file
            says, else 1, non-blocking.
        rails: NIC i of every node on leaf switch i; False: all NICs of a node on one leaf. None: rails, unless
            oversubscription makes the leaf of each node the narrow place.
        nodes_per_leaf: nodes that meet at one leaf, or one set of rails; None: 32 with rails, else 1.
        domain: devices that scale-up links join, where it is not what the device usually has.
        describe: also return what nothing can be planned on (its `refusal` says why) instead of raising.

    Raises:
        PlanError: malformed text, unknown device (with the nearest names), settings that contradict each other or have
            no effect, devices that cannot reach each other, mixed devices.
    """
    options = Options(
        network=network,
        oversubscription=oversubscription,
        rails=rails,
        nodes_per_leaf=nodes_per_leaf,
        domain=domain,
    )
    is_file = isinstance(source, Path) or (
        isinstance(source, str) and (source.endswith((".yaml", ".yml", ".json")) or Path(source).is_file())
    )
    if is_file or isinstance(source, Mapping):
        description = read_cluster_file(source, options)
    else:
        description = described(str(source), options)
    cluster = _with_measurements(_cluster_of(description), description.measured)
    if is_file:
        cluster = replace(cluster, path=Path(str(source)))
    if cluster.refusal is not None and not describe:
        raise PlanError(cluster.refusal)
    return cluster


def _with_measurements(cluster: Cluster, measured: Measurements | None) -> Cluster:
    if measured is None:
        return cluster
    device = replace(cluster.device, measured=MeasuredDevice(base=cluster.device, points=measured))
    return replace(cluster, measured=measured, device=device)


def _cluster_of(description: Description) -> Cluster:
    shape = description.shape
    if description.graph is None:
        assert shape is not None
        return Cluster(
            name=description.name,
            device=description.kinds[0],
            ranks=shape.device_names,
            domain_of=shape.domains,
            shape=shape,
            notes=description.notes,
            refusal=description.refusal,
            host_memory_bytes=description.host_memory_bytes,
        )
    graph = description.graph
    names = tuple(name for name, kind in graph.nodes(data="kind") if kind == "device")
    numbers: dict[Any, int] = {}
    domains = tuple(numbers.setdefault(graph.nodes[name]["domain"], len(numbers)) for name in names)
    if description.refusal is None:
        GraphLinks(graph, names, domains).check()
    return Cluster(
        name=description.name,
        device=description.kinds[0],
        ranks=names,
        domain_of=domains,
        shape=description.shape,
        given=graph,
        notes=description.notes,
        refusal=description.refusal,
        host_memory_bytes=description.host_memory_bytes,
    )
