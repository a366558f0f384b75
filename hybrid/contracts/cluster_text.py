"""Clusters as short text: `16x8xH100`, `8xA100-80GB`, a network `8x400G`; and what goes with every description."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import networkx as nx

from hybrid.contracts.cluster_shape import Fabric, NodePart, Shape
from hybrid.contracts.device_kind import DeviceKind, device_kind, link_figure
from hybrid.contracts.measurements import Measurements
from hybrid.errors import PlanError

__all__ = ["Description", "Options", "described", "description_of", "node_part", "read_network", "refusal_of"]

# As many as `hybrid dryrun` takes.
MOST_DEVICES = 2**20
EXAMPLE = "write NODESxDEVICESxKIND, for example 16x8xH100, or 8xA100-80GB for one node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What may be said beside the nodes; None: not said. Meanings: `parse_cluster`."""

    network: str | None = None
    oversubscription: float | None = None
    rails: bool | None = None
    nodes_per_leaf: int | None = None
    domain: int | None = None

    def __post_init__(self) -> None:
        problems = []
        for name, value in ((item.name, getattr(self, item.name)) for item in fields(self)):
            expected, what = _KINDS[name]
            is_wrong = not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool)
            if value is not None and is_wrong:
                problems.append(f"{name} {value!r}: expected {what}")
            elif isinstance(value, int) and value > MOST_DEVICES:
                problems.append(f"{name} {value}: at most {MOST_DEVICES:,}")
        if problems:
            raise PlanError(problems)


# What values there are, in code and in words.
_KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "network": (str, "CARDSxSPEED of a node, such as '8x400G'"),
    "oversubscription": ((int, float), "a number of at least 1"),
    "rails": (bool, "true or false"),
    "nodes_per_leaf": (int, "a whole number of at least 1"),
    "domain": (int, "a whole number of at least 1"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A cluster as it was described: a shape, or a graph.

    Args:
        name: for the eye.
        kinds: of its devices, each once, in order.
        shape: nodes and network; None where only a graph was given.
        graph: given, or a shape's with single links changed; None: the shape's own.
        notes: for whoever reads figures of it.
        refusal: why nothing can be planned on it.
        measured: what was measured on it.
        host_memory_bytes: of one host.
    """

    name: str
    kinds: tuple[DeviceKind, ...]
    shape: Shape | None = None
    graph: nx.Graph | None = None
    notes: tuple[str, ...] = ()
    refusal: str | None = None
    measured: Measurements | None = None
    host_memory_bytes: int | None = None


def described(text: str, options: Options, kinds: Mapping[str, DeviceKind] | None = None) -> Description:
    """The cluster of a shorthand, with `kinds` beside those that are known; a PlanError where it cannot be read."""
    plain = re.sub(r"\s+", "", text).replace("×", "x")
    if plain == "local":
        plain = f"1x{os.cpu_count() or 1}xcpu"
    parts = [_part_of(part, options, text, kinds or {}) for part in plain.split("+")]
    return description_of(text, parts, options)


def _part_of(text: str, options: Options, whole: str, kinds: Mapping[str, DeviceKind]) -> NodePart:
    """Equal nodes from `16x8xH100`; `whole` is for messages."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(.*[a-z].*|\d{4})", text, re.IGNORECASE)
    if match is None:
        turned = re.fullmatch(r"(.*[^\dx].*?)x(\d+)(?:x(\d+))?", text, re.IGNORECASE)
        example = f"write {'x'.join([n for n in turned.groups()[1:] if n] + [turned[1]])}" if turned else EXAMPLE
        raise PlanError(f"cluster {whole!r}: cannot read {text!r}; {example}")
    return node_part(int(match[1] or 1), int(match[2]), kinds.get(match[3]) or device_kind(match[3]), options)


def node_part(count: int, devices: int, kind: DeviceKind, options: Options) -> NodePart:
    """Equal nodes with the network that the options name, or that is typical; refused where they cannot exist."""
    if count < 1 or devices < 1:
        raise PlanError(f"{count}x{devices}x{kind.name}: nodes and devices must be at least 1; {EXAMPLE}")
    if options.network is None:
        cards = max(1, devices // kind.devices_per_nic)
        speed = kind.nic_bytes_per_second * kind.devices_per_nic
    else:
        cards, speed = read_network(options.network)
    if options.domain is not None and (kind.topology != "switch" or options.domain < devices):
        reason = (
            f"it must hold the {devices} devices of a node"
            if kind.topology == "switch"
            else f"only devices on a switch can have another domain; {kind.name} has {kind.scale_up or 'none'}"
        )
        raise PlanError(f"domain {options.domain}: {reason}")
    limit = options.domain or kind.scale_up_domain
    if kind.topology in {"switch", "mesh", "hybrid_mesh"} and devices > limit:
        nodes = f"{count * devices // limit}x{limit}" if count * devices % limit == 0 else f"NODESx{limit}"
        raise PlanError(
            f"{count}x{devices}x{kind.name}: {devices} devices in a node, and {kind.scale_up} joins {limit}; "
            f"write {nodes}x{kind.name}" + (f", or give domain {devices}" if kind.topology == "switch" else "")
        )
    return NodePart(
        count=count, devices=devices, kind=kind, num_nics=cards, nic_bytes_per_second=speed, domain=options.domain
    )


def read_network(text: str) -> tuple[int, float]:
    """`8x400G` -> (8 cards per node, 50e9 bytes per second each); `400G` is one card."""
    plain = re.sub(r"\s+", "", text).replace("×", "x")
    match = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)(?:G|g)(?:b|bit|bps|bit/s|b/s)?", plain)
    if match is None or int(match[1] or 1) < 1 or float(match[2]) <= 0:
        in_bytes = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)GB(?:/s|ps)?", plain)
        example = f"{in_bytes[1] or 1}x{float(in_bytes[2]) * 8:g}G, in bits" if in_bytes else "8x400G"
        raise PlanError(f"network {text!r} is not CARDSxSPEED of a node in Gb/s; write for example {example}")
    return int(match[1] or 1), float(match[2]) / 8 * 1e9


def description_of(name: str, parts: Sequence[NodePart], options: Options) -> Description:
    """Nodes joined as the options say; a PlanError where an option has no effect or makes no sense."""
    oversubscription = 1.0 if options.oversubscription is None else float(options.oversubscription)
    rails = oversubscription == 1 if options.rails is None else options.rails
    num_nodes = sum(part.count for part in parts)
    num_devices = sum(part.count * part.devices for part in parts)
    if num_devices > MOST_DEVICES:
        raise PlanError(f"cluster {name}: {num_devices:,} devices; at most {MOST_DEVICES:,} are looked at")
    nodes_per_leaf = options.nodes_per_leaf or (int(link_figure("rail_leaf_nodes")) if rails else 1)
    fabric = Fabric(rails=rails, nodes_per_leaf=nodes_per_leaf, oversubscription=oversubscription)
    shape = Shape(parts=tuple(parts), fabric=fabric)
    problems = []
    if not 1 <= oversubscription < math.inf:
        problems.append(
            f"oversubscription {oversubscription:g}: must be at least 1 (2 halves what leaves a leaf switch)"
        )
    if options.nodes_per_leaf is not None and options.nodes_per_leaf < 1:
        problems.append(f"nodes_per_leaf {options.nodes_per_leaf}: must be at least 1")
    elif oversubscription > 1 and shape.num_domains == 1:
        problems.append(f"oversubscription {oversubscription:g} has no effect: {name} is one domain and has no network")
    elif oversubscription > 1 and num_nodes <= nodes_per_leaf:
        problems.append(
            f"oversubscription {oversubscription:g} has no effect: the {num_nodes} nodes meet at "
            f"{'one set of rails' if rails else 'one leaf switch'}, which holds {nodes_per_leaf}; "
            f"give nodes_per_leaf {max(1, num_nodes // 2)}, or leave rails out"
        )
    if shape.num_domains == 1:
        told = (
            ("network", options.network),
            ("rails", options.rails if options.rails is None else f"{options.rails}".lower()),
            ("nodes_per_leaf", options.nodes_per_leaf),
        )
        problems += [
            f"{key} {value} has no effect: {name} is one domain and has no network"
            for key, value in told
            if value is not None
        ]
    if problems:
        raise PlanError(problems)
    kinds = tuple({part.kind.name: part.kind for part in parts}.values())
    return Description(
        name=name, kinds=kinds, shape=shape, notes=tuple(_notes(shape, options)), refusal=refusal_of(kinds, name)
    )


def refusal_of(kinds: Sequence[DeviceKind], name: str) -> str | None:
    """Why devices of several kinds are not planned together."""
    if len(kinds) < 2:
        return None
    listed = " and ".join(kind.name for kind in kinds)
    peaks = " and ".join(f"{kind.flops.get('fp16', kind.flops['fp32']) / 1e12:.0f}" for kind in kinds)
    return (
        f"cluster {name} mixes {listed} (16-bit peaks of {peaks} TFLOP/s): every rank of a layout does the same "
        f"work, so the slower would set the pace and the smaller memory the size; plan one kind at a time"
    )


def _notes(shape: Shape, options: Options) -> list[str]:
    notes = []
    fabric = shape.fabric
    if shape.num_domains > 1 and options.network is None:
        cards = {f"{part.num_nics}x{part.nic_bytes_per_second * 8 / 1e9:g}G" for part in shape.parts}
        notes.append(f"network {' and '.join(sorted(cards))} per node is typical for the device, not told")
    if fabric.oversubscription > 1 and options.rails is None:
        notes.append(
            f"oversubscription without rails: {fabric.nodes_per_leaf} node(s) per leaf switch; for rail-optimised pods "
            f"say rails and nodes_per_leaf"
        )
    for kind in {part.kind.name: part.kind for part in shape.parts if part.devices > 1}.values():
        if not kind.has_peer_to_peer:
            notes.append(
                f"{kind.name}: no peer access; between devices every byte is staged in host memory, at "
                f"{link_figure('host_staging_fraction'):.0%} of {kind.host_link}"
            )
        if kind.topology in {"none", "bridge"}:
            notes.append(
                f"{kind.name}: the host is taken as non-blocking; sockets and PCIe switches are not told apart"
            )
        if kind.topology == "mesh":
            notes.append(
                f"{kind.name}: a link per pair; two devices alone see {kind.peer_bytes_per_second / 1e9:g} GB/s of "
                f"{kind.scale_up_bytes_per_second / 1e9:g}"
            )
        if kind.topology == "hybrid_mesh" and any(4 < part.devices <= 8 for part in shape.parts):
            notes.append(f"{kind.name}: NVLink cube of 8; pairs have two links, one, or none and use the host")
    return notes
