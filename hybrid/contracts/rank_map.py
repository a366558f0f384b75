"""Where each rank of a planned job runs: which node, which of its devices; and whether the job that came up is so.

Launchers number ranks node by node: node n with d devices has the ranks n·d to n·d + d - 1, in the order of its
devices. So an order of ranks can be launched if each node's ranks stand together, whatever the order of the nodes and,
by CUDA_VISIBLE_DEVICES, of the devices on a node.

    rank,node,device,local_rank,pp,dp_replicate,dp_shard,cp,tp
    0,node0,gpu0,0,0,0,0,0,0
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from hybrid.contracts.layout import AXES, Axis, Layout
from hybrid.errors import LaunchError, PlanError

__all__ = ["PlannedNode", "RankMap", "make_rank_map", "named", "read_rank_map"]

_COLUMNS = ("rank", "node", "device", "local_rank", *AXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNode:
    """A node with its devices, in the order of their ranks."""

    name: str
    first_rank: int
    devices: tuple[str, ...]

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + len(self.devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMap:
    """All ranks of a job: `nodes` in the order of their ranks, and the layout over them."""

    nodes: tuple[PlannedNode, ...]
    layout: Layout

    @property
    def num_ranks(self) -> int:
        return sum(len(node.devices) for node in self.nodes)

    def to_csv(self) -> str:
        """One row per rank."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for node in self.nodes:
            for local, (rank, device) in enumerate(zip(node.ranks, node.devices, strict=True)):
                place = self.layout.coordinate(rank)
                writer.writerow((rank, node.name, device, local, *(place[axis] for axis in AXES)))
        return text.getvalue()

    def differences(self, hosts: Mapping[str, Sequence[int]], local_ranks: Mapping[int, int]) -> list[str]:
        """What is not as planned, lowest rank first, in sentences; empty: all of it is.

        Args:
            hosts: the hosts that came up, with their ranks. Their names need not be those of the plan.
            local_ranks: of each rank, where it is known.
        """
        num_up = sum(map(len, hosts.values()))
        if num_up != self.num_ranks:
            return [f"the plan is for {self.num_ranks} ranks on {len(self.nodes)} nodes, and {num_up} came up"]
        host_of = {rank: host for host, ranks in hosts.items() for rank in ranks}
        return list(self._moved(host_of, local_ranks)) or list(self._turned(local_ranks))

    def _moved(self, host_of: Mapping[int, str], local_ranks: Mapping[int, int]) -> Iterator[str]:
        taken: dict[str, str] = {}
        for node in self.nodes:
            first = host_of[node.ranks[0]]
            if first in taken:
                yield (
                    f"rank {node.ranks[0]} is on host {first}, where {taken[first]} of the plan came up; the plan has "
                    f"it on a node of its own, {node.name}, with {named(node.ranks)}"
                    f"{_same_name(first, host_of, local_ranks)}"
                )
                continue
            taken[first] = node.name
            away = [rank for rank in node.ranks if host_of[rank] != first]
            if away:
                axes = [axis for axis in AXES if self._is_split(axis, node, host_of)]
                split = f"; groups of {', '.join(axes)} that the plan keeps on one node are spread" if axes else ""
                yield (
                    f"rank {away[0]} is on host {host_of[away[0]]}, but rank {node.ranks[0]} is on {first}: the plan "
                    f"has {named(node.ranks)} together on {node.name}{split}"
                )

    def _turned(self, local_ranks: Mapping[int, int]) -> Iterator[str]:
        for node in self.nodes:
            for local, rank in enumerate(node.ranks):
                found = local_ranks.get(rank, local)
                if found != local:
                    yield (
                        f"rank {rank} is local rank {found} of its node, and the plan has it at local rank {local} "
                        f"({node.name}, {node.devices[local]})"
                    )
                    break

    def _is_split(self, axis: str, node: PlannedNode, host_of: Mapping[int, str]) -> bool:
        """Whether a group of this axis lies on the node by plan, and not on one host."""
        for rank in node.ranks:
            group = self.layout.group_ranks(rank, (axis,))
            if len(group) > 1 and set(group) <= set(node.ranks) and len({host_of[one] for one in group}) > 1:
                return True
        return False


def make_rank_map(devices: Sequence[str], layout: Layout) -> RankMap:
    """The map of a cluster's devices in rank order, written node/device (`node0/gpu3`).

    Raises:
        PlanError: the ranks of a node do not stand together, or nodes differ in size: no launcher numbers them so.
    """
    pairs = [device.rpartition("/")[::2] for device in devices]
    nodes: list[PlannedNode] = []
    for name, group in groupby(enumerate(pairs), key=lambda item: item[1][0]):
        members = list(group)
        first = members[0][0]
        if any(node.name == name for node in nodes):
            raise PlanError(
                f"the ranks of {name or 'a node'} do not stand together in the plan's rank order (again at rank "
                f"{first}), so torchrun cannot number them; start each process with its own RANK, or fix the order"
            )
        nodes.append(PlannedNode(name=name, first_rank=first, devices=tuple(device for _, (_, device) in members)))
    sizes = {len(node.devices) for node in nodes}
    if len(sizes) > 1:
        raise PlanError(f"nodes of {' and '.join(map(str, sorted(sizes)))} devices: torchrun wants equal ones")
    return RankMap(nodes=tuple(nodes), layout=layout)


def read_rank_map(path: Path) -> RankMap:
    """From a file that `to_csv` wrote.

    Raises:
        LaunchError: the file cannot be read, is no such map, or has ranks as no launcher numbers them; with its line.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"))))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise LaunchError(f"cannot read the rank map {path}: {error}") from error
    if not rows or any(column not in rows[0] for column in _COLUMNS):
        raise LaunchError(f"{path} is no rank map: expected the columns {', '.join(_COLUMNS)} and a row per rank")
    places = []
    for number, row in enumerate(rows):
        line = f"{path}, line {number + 2}"
        try:
            rank, place = int(row["rank"]), tuple(int(row[axis]) for axis in AXES)
        except (TypeError, ValueError):
            raise LaunchError(f"{line}: expected whole numbers for rank and coordinates, got {row}") from None
        if rank != number:
            raise LaunchError(f"{line}: rank {rank} where rank {number} is due; one row per rank, in order")
        places.append(place)
    degrees: Mapping[str, int] = {axis: 1 + max(place[index] for place in places) for index, axis in enumerate(AXES)}
    layout = Layout(tuple(Axis(name=axis, size=size) for axis, size in degrees.items()))
    for rank, place in enumerate(places):
        if rank >= layout.world_size or tuple(layout.coordinate(rank).values()) != place:
            raise LaunchError(f"{path}, line {rank + 2}: the coordinates do not fit a layout of {layout.describe()}")
    if layout.world_size != len(places):
        raise LaunchError(f"{path}: {len(places)} ranks, but the coordinates span {layout.world_size}")
    try:
        found = make_rank_map([f"{row['node']}/{row['device']}" for row in rows], layout)
    except PlanError as error:
        raise LaunchError(f"{path}: {error}") from None
    for node in found.nodes:
        for local, rank in enumerate(node.ranks):
            if rows[rank]["local_rank"] != str(local):
                raise LaunchError(
                    f"{path}, line {rank + 2}: local rank {rows[rank]['local_rank']} where {local} is due: the ranks "
                    f"of {node.name} are numbered in their order"
                )
    return found


def _same_name(host: str, host_of: Mapping[int, str], local_ranks: Mapping[int, int]) -> str:
    """Where two ranks of a host have one local rank, there are two machines of that name."""
    seen: dict[int, int] = {}
    for rank, name in host_of.items():
        if name == host and rank in local_ranks:
            other = seen.setdefault(local_ranks[rank], rank)
            if other != rank:
                return (
                    f" (ranks {other} and {rank} both are local rank {local_ranks[rank]} there: two machines have the "
                    f"name {host}; give each a host name of its own)"
                )
    return ""


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0 to 7`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
