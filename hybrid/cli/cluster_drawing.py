"""A cluster on a terminal: a tree of switches and domains, and a table of rates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from hybrid.contracts.cluster import Cluster
from hybrid.contracts.cluster_shape import NodePart, Shape
from hybrid.contracts.device_kind import DeviceKind
from hybrid.units import format_rate, format_seconds

__all__ = ["device_dict", "print_cluster", "print_devices"]

MOST_LINES = 6  # domains, switches or links that are drawn one by one
MOST_BLOCKS = 16  # devices that are drawn one by one on a line
DEVICE = "■"
Row = tuple[str, float, float, float]


def device_dict(kind: DeviceKind) -> dict[str, Any]:
    """All figures of a kind, as JSON has them; measured curves stand in the cluster's file."""
    figures = {name: getattr(kind, name) for name in kind.__slots__ if name != "measured"}
    return {**figures, "flops": dict(kind.flops)}


def print_cluster(
    cluster: Cluster, *, rows: Sequence[Row], halves: float | None, slow_links: Sequence[tuple[str, str, float, float]]
) -> None:
    """The drawing, the table of rates, notes, and why nothing can be planned where that is so."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_title(cluster))
    console.print(_tree(cluster))
    if rows:
        console.print()
        console.print(_rates(rows))
    if halves is not None:
        console.print(f"between the halves, all devices at once: {format_rate(halves)}")
    for here, there, speed, usual in slow_links[:MOST_LINES]:
        line = f"slower than its like: {here} - {there} has {format_rate(speed)}, others {format_rate(usual)}"
        console.print(Text(line, style="yellow"))
    if len(slow_links) > MOST_LINES:
        console.print(Text(f"and {len(slow_links) - MOST_LINES} more slow links", style="yellow"))
    for note in cluster.notes:
        console.print(Text(f"note: {note}", style="dim"))
    if cluster.refusal is not None:
        console.print(Text(f"nothing can be planned here: {cluster.refusal}", style="red"))


def print_devices(kinds: Iterable[DeviceKind]) -> None:
    """One row per kind."""
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(
        ("device", "bf16", "fp16", "fp8", "fp32", "best", "GB", "GB/s", "domain", "to peers", "to one", "network")
    ):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for kind in kinds:
        rates = [_tera(kind.flops[dtype]) if dtype in kind.flops else "-" for dtype in ("bf16", "fp16", "fp8", "fp32")]
        best = "-" if kind.matmul_fraction is None else f"{kind.matmul_fraction:.0%}"
        domain = "node" if kind.scale_up_domain > 1000 else str(kind.scale_up_domain)
        links = (kind.scale_up_bytes_per_second, kind.peer_bytes_per_second, kind.nic_bytes_per_second)
        sizes = (kind.memory_bytes, kind.memory_bytes_per_second)
        table.add_row(kind.name, *rates, best, *map(_giga, sizes), domain, *map(_giga, links))
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=160)  # whole lines, for `grep`
    console.print(table)
    console.print("TFLOP/s dense; GB/s in one direction; domain: devices on scale-up links; network: per device")


def _title(cluster: Cluster) -> Text:
    title = Text(f"{cluster.name}  ", style="bold")
    kind, count = cluster.device, cluster.num_devices
    if cluster.refusal is not None:
        return title.append(f"{count} devices of several kinds", style="not bold")
    dtype = "bf16" if "bf16" in kind.flops else "fp16"
    memory, flops = _scaled(count * kind.memory_bytes), _scaled(count * kind.flops[dtype])
    return title.append(f"{count} × {kind.name}, {memory}B of memory, {flops}FLOP/s in {dtype}", style="not bold")


def _tree(cluster: Cluster) -> Tree:
    shape = cluster.shape
    if shape is None:
        return _graph_tree(cluster)
    if shape.num_domains == 1:
        tree = Tree(_domain_line(shape.parts[0], shape.num_nodes))
        for line in _links_lines(shape.parts[0]):
            tree.add(line)
        return tree
    fabric = shape.fabric
    blocks = -(-shape.num_nodes // fabric.nodes_per_leaf)
    if shape.has_spine:
        blocking = "non-blocking" if fabric.oversubscription == 1 else f"{fabric.oversubscription:g}:1 oversubscribed"
        tree = Tree(f"spine switches, {blocking}")
        below = tree
    else:
        tree = below = Tree("network")
    leaves = below.add(_leaf_line(shape, blocks))
    for part in shape.parts:
        domains = -(-part.count // part.nodes_per_domain)
        shown = min(domains, MOST_LINES if len(shape.parts) == 1 else 2)
        for number in range(shown):
            nodes = min(part.nodes_per_domain, part.count - number * part.nodes_per_domain)
            branch = leaves.add(_domain_line(part, nodes))
            if number == 0:
                for line in _links_lines(part):
                    branch.add(line)
        if domains > shown:
            leaves.add(f"… {domains - shown} more like these")
    return tree


def _leaf_line(shape: Shape, blocks: int) -> str:
    fabric = shape.fabric
    cards = max(part.num_nics for part in shape.parts)
    nodes = _nodes(min(fabric.nodes_per_leaf, shape.num_nodes))
    if fabric.rails and cards > 1:
        sets = "" if blocks == 1 else f"{blocks} sets of "
        return f"{sets}{cards} leaf switches, card i of {nodes} on switch i"
    count, each = ("1 leaf switch", "") if blocks == 1 else (f"{blocks} leaf switches", " each")
    return f"{count}, all cards of {nodes}{each}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _domain_line(part: NodePart, num_nodes: int) -> Text:
    count = part.devices * num_nodes
    blocks = f"{DEVICE} " * min(count, MOST_BLOCKS) + ("… " if count > MOST_BLOCKS else "")
    line = Text(blocks, style="cyan")
    spans = f" in {num_nodes} nodes" if num_nodes > 1 else ""
    line.append(f" {count} × {part.kind.name}{spans}", style="default")
    return line


def _links_lines(part: NodePart) -> list[str]:
    kind = part.kind
    lines = []
    if part.devices * part.nodes_per_domain > 1:
        link = kind.scale_up
        if kind.topology == "none":
            link = f"no scale-up links; {kind.host_link} to the host"
        total, peer = format_rate(kind.scale_up_bytes_per_second), format_rate(kind.peer_bytes_per_second)
        lines.append(f"{link}: {total} per device" + (f", {peer} to one peer" if total != peer else ""))
    speed = f"{part.nic_bytes_per_second * 8 / 1e9:g} Gb/s"
    lines.append(f"{part.num_nics} network card(s) of {speed} per node of {part.devices}")
    return lines


def _graph_tree(cluster: Cluster) -> Tree:
    """Domains with their devices, then the other vertices by what they are."""
    graph = cluster.graph
    tree = Tree(f"graph of {graph.number_of_nodes()} vertices and {graph.number_of_edges()} links")
    members: dict[int, list[str]] = defaultdict(list)
    for name, domain in zip(cluster.ranks, cluster.domain_of, strict=True):
        members[domain].append(name)
    for names in list(members.values())[:MOST_LINES]:
        line = Text(f"{DEVICE} " * min(len(names), MOST_BLOCKS), style="cyan")
        kinds = Counter(graph.nodes[name]["device"] for name in names)
        what = " + ".join(f"{count} × {kind}" for kind, count in kinds.items())
        line.append(f" {what}: {_some(names)}", style="default")
        tree.add(line)
    if len(members) > MOST_LINES:
        tree.add(f"… {len(members) - MOST_LINES} more domains")
    for kind, word in (("nic", "network cards"), ("switch", "switches")):
        names = [name for name, data in graph.nodes(data=True) if data["kind"] == kind]
        if names:
            tree.add(f"{len(names)} {word}: {_some(names)}")
    return tree


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" … {names[-1]}" if len(names) > 4 else "")


def _rates(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("who", no_wrap=True)
    table.add_column("each, one direction", justify="right", no_wrap=True)
    table.add_column("latency", justify="right", no_wrap=True)
    for name, lowest, highest, latency in rows:
        speed = format_rate(lowest) if lowest == highest else f"{_giga(lowest)} to {format_rate(highest)}"
        table.add_row(name, speed, format_seconds(latency))
    return table


def _giga(value: float) -> str:
    return f"{value / 1e9:.4g}"


def _tera(value: float) -> str:
    return f"{value / 1e12:.4g}"


def _scaled(value: float) -> str:
    """Three digits and a decimal prefix: `2.56 T`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 999.5:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} E"
