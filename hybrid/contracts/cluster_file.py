"""Clusters from YAML: nodes and network in a few lines, single links changed, or the whole graph (docs/cluster.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import networkx as nx
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hybrid.contracts.cluster_text import (
    Description,
    Options,
    described,
    description_of,
    node_part,
    refusal_of,
)
from hybrid.contracts.device_kind import DeviceKind, device_kind, kind_like, link_figure
from hybrid.contracts.entry_problems import entry_problems
from hybrid.contracts.measurements import Measurements
from hybrid.contracts.unique_keys import KeyTwiceError, UniqueKeys
from hybrid.errors import PlanError
from hybrid.units import parse_bytes

__all__ = ["read_cluster_file", "read_seconds", "read_speed"]

Positive = Annotated[int, Field(ge=1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Nodes(_Model):
    """Equal nodes."""

    count: Positive = 1
    devices: Positive
    kind: str
    network: str | None = None


class _Link(_Model):
    """An edge: new, or other figures for one that is there."""

    between: Annotated[list[str], Field(min_length=2, max_length=2)]
    speed: str | None = None
    latency: str | float | None = None
    remove: bool = False


class _Device(_Model):
    kind: str | None = None
    domain: str | int | None = None


class _Graph(_Model):
    """Every vertex and edge."""

    kind: str | None = None
    devices: dict[str, _Device | None] | list[str]
    switches: list[str] = []
    hosts: list[str] = []
    nics: list[str] = []
    links: list[_Link]


class _File(_Model):
    name: str | None = None
    cluster: str | None = None
    nodes: list[_Nodes] | None = None
    graph: _Graph | None = None
    network: str | None = None
    oversubscription: float | int | None = None
    rails: bool | None = None
    nodes_per_leaf: Positive | None = None
    domain: Positive | None = None
    kinds: dict[str, dict[str, str | float | int | bool]] = {}
    links: list[_Link] = []
    measured: Measurements | None = None
    host_memory: str | Positive | None = None


def read_cluster_file(source: str | Path | Mapping[str, Any], options: Options) -> Description:
    """The cluster of a YAML file, or of what stands in one; a PlanError names the file and the entry."""
    where = "cluster" if isinstance(source, Mapping) else f"cluster file {source}"
    content = source if isinstance(source, Mapping) else _load(Path(source), where)
    try:
        file = _File.model_validate(dict(content))
    except ValidationError as error:
        raise PlanError(entry_problems(error, where)) from None
    ways = [way for way in ("cluster", "nodes", "graph") if getattr(file, way) is not None]
    if len(ways) != 1:
        found = f"it has {' and '.join(ways)}" if ways else "it has none"
        raise PlanError(f"{where}: give one of cluster, nodes or graph; {found}")
    name = file.name or (Path(source).stem if not isinstance(source, Mapping) else file.cluster or "cluster")
    kinds = {key: _own_kind(key, figures, where) for key, figures in file.kinds.items()}
    try:
        description = _description(file, name, kinds, _merged(file, options))
        names = {kind.name for kind in description.kinds}
        unused = [key for key, kind in kinds.items() if kind.name not in names]
        if unused:
            raise PlanError([f"kinds.{key} has no effect: no device of the cluster is one" for key in unused])
        return _measured(replace(description, host_memory_bytes=_host_memory(file.host_memory)), file.measured)
    except PlanError as error:
        raise PlanError([f"{where}: {problem}" for problem in error.problems]) from None


def read_speed(text: str) -> float:
    """`400G` or `400 Gb/s` (bits), `50 GB/s` (bytes) -> bytes per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GM])(b|B)?(?:it)?(?:/s|ps)?", text.strip())
    if match is None or float(match[1]) <= 0:
        raise PlanError(f"speed {text!r}: write 400G or 400 Gb/s for bits, 50 GB/s for bytes per second")
    scale = {"G": 1e9, "M": 1e6}[match[2]]
    return float(match[1]) * scale / (1 if match[3] == "B" else 8)


def _host_memory(given: str | int | None) -> int | None:
    if given is None or isinstance(given, int):
        return given
    try:
        found = parse_bytes(given)
    except ValueError as error:
        raise PlanError(f"host_memory: {error}") from None
    if found < 1:
        raise PlanError(f"host_memory: {given!r} is no memory; write for example 1TB, of one host")
    return found


def read_seconds(value: str | float) -> float:
    """`2us`, `0.5 µs`, `1 ms`, `300ns`, or a number of seconds."""
    if not isinstance(value, str):
        return float(value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(s|ms|us|µs|ns)", value.strip())
    if match is None:
        raise PlanError(f"latency {value!r}: write 2us, 0.5 ms, or a number of seconds")
    return float(match[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}[match[2]]


def _load(path: Path, where: str) -> Mapping[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeys)
    except OSError as error:
        raise PlanError(f"{where}: cannot be read ({error.strerror or error})") from None
    except KeyTwiceError as error:
        raise PlanError(f"{where}: {error}") from None
    except RecursionError:
        raise PlanError(f"{where}: entries lie within entries hundreds of levels deep") from None
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: no UTF-8, no day of the calendar, endless digits
        raise PlanError(f"{where} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, Mapping):
        raise PlanError(f"{where}: must hold entries such as `cluster: 16x8xH100`, it holds {type(content).__name__}")
    return content


def _own_kind(name: str, figures: Mapping[str, str | float | int | bool], where: str) -> DeviceKind:
    try:
        return kind_like(name, figures)
    except PlanError as error:
        raise PlanError(f"{where}, kinds.{name}: {error}") from None


def _merged(file: _File, options: Options) -> Options:
    """What the file says and what was said beside it; a PlanError where both say different things."""
    problems, merged = [], {}
    for key, beside in asdict(options).items():
        inside = getattr(file, key)
        if inside is not None and beside is not None and inside != beside:
            problems.append(f"{key} is {inside} in the file and {beside} beside it; leave one of them out")
        merged[key] = inside if beside is None else beside
    own = [part.network for part in file.nodes or ()]
    if options.network is not None:
        problems += [
            f"network is {inside} in nodes.{place} of the file and {options.network} beside it; leave one of them out"
            for place, inside in enumerate(own)
            if inside is not None and inside != options.network
        ]
    elif file.network is not None and own and None not in own:
        problems.append(f"network {file.network} has no effect: each of nodes has its own; leave it out")
    if problems:
        raise PlanError(problems)
    return Options(**merged)


def _measured(found: Description, measured: Measurements | None) -> Description:
    """With what was measured; a PlanError where it cannot belong to these devices."""
    if measured is None or found.refusal is not None:
        return found
    machine = measured.machine
    ranks = len(machine.hosts) * machine.ranks_per_host
    sizes = found.shape.device_names if found.shape is not None else ()
    if len(sizes) != ranks:
        have = f"the cluster has {len(sizes)}" if sizes else "a graph says nothing of hosts"
        raise PlanError(
            f"measured: it was taken on {len(machine.hosts)} host(s) of {machine.ranks_per_host} ranks, and {have}; "
            f"run hybrid calibrate --ranks for this number, or take measured out"
        )
    strangers = [kind.name for kind in found.kinds if kind.is_processor != (machine.accelerator is None)]
    if strangers:
        where = "processors" if machine.accelerator is None else machine.accelerator
        raise PlanError(
            f"measured: it was taken on {where}, and {strangers[0]} is "
            f"{'an accelerator' if machine.accelerator is None else 'a kind of processor'}: give a kind like what was "
            "measured, or take measured out"
        )
    for curve in measured.collectives:
        if ranks % (curve.size * curve.stride):
            raise PlanError(
                f"measured.collectives: groups of {curve.size}, {curve.stride} apart, do not fit into {ranks} ranks"
            )
    each = f"{machine.ranks_per_host} ranks on {machine.cores} core(s)" if machine.accelerator is None else ""
    note = f"measured {measured.date} by {measured.source}, torch {measured.torch}"
    note += (f"; {each} per host" if each else "") + f"; spread {measured.spread:.0%}"
    return replace(found, measured=measured, notes=(*found.notes, note))


def _description(file: _File, name: str, kinds: Mapping[str, DeviceKind], options: Options) -> Description:
    if file.graph is not None:
        said = [key for key, value in asdict(options).items() if value is not None]
        if said:
            raise PlanError(f"{said[0]} has no effect beside graph: its links say it all")
        return _of_graph(file.graph, name, kinds, file.links)
    if file.cluster is not None:
        base = replace(described(file.cluster, options, kinds), name=name)
    else:
        assert file.nodes is not None
        parts = [
            node_part(
                part.count,
                part.devices,
                kinds.get(part.kind) or device_kind(part.kind),
                replace(options, network=part.network or options.network),
            )
            for part in file.nodes
        ]
        own = [part.network for part in file.nodes]
        base = description_of(name, parts, options if None in own else replace(options, network=own[0]))
    if not file.links:
        return base
    assert base.shape is not None
    graph = base.shape.build()
    _apply(graph, file.links)
    _check_whole(graph)
    return replace(base, graph=graph)


def _of_graph(given: _Graph, name: str, kinds: Mapping[str, DeviceKind], changes: Sequence[_Link]) -> Description:
    devices = given.devices if isinstance(given.devices, dict) else dict.fromkeys(given.devices)
    if not devices:
        raise PlanError("graph.devices: give at least one")
    graph = nx.Graph()
    found: dict[str, DeviceKind] = {}
    for vertex, device in devices.items():
        kind_name = (device and device.kind) or given.kind
        if kind_name is None:
            raise PlanError(f"graph.devices.{vertex}: no kind; give it one, or graph.kind for all")
        kind = kinds.get(kind_name) or device_kind(kind_name)
        found[kind.name] = kind
        domain = None if device is None or device.domain is None else str(device.domain)
        graph.add_node(vertex, kind="device", device=kind.name, domain=domain)
    for level, vertices in (("", given.switches), ("host", given.hosts), ("nic", given.nics)):
        for vertex in vertices:
            if vertex in graph:
                raise PlanError(f"graph: {vertex} is named twice")
            graph.add_node(vertex, kind="nic" if level == "nic" else "switch", level=level)
    for link in given.links:
        if link.speed is None:
            raise PlanError(f"graph.links, {' - '.join(link.between)}: no speed; write speed: 400G or 50 GB/s")
    _apply(graph, [*given.links, *changes])
    _check_whole(graph)
    _fill_domains(graph)
    listed = tuple(found.values())
    return Description(name=name, kinds=listed, graph=graph, refusal=refusal_of(listed, name))


def _apply(graph: nx.Graph, links: Sequence[_Link]) -> None:
    problems = []
    for link in links:
        here, there = link.between
        title = f"links, {here} - {there}"
        strangers = [end for end in link.between if end not in graph]
        if strangers:
            near = [name for name in graph if name.split("/")[0] == strangers[0].split("/")[0]] or list(graph)
            problems.append(f"{title}: no {strangers[0]} in this cluster; there are {', '.join(near[:6])} …")
        elif here == there:
            problems.append(f"{title}: a link needs two ends")
        elif link.remove and (link.speed, link.latency) != (None, None):
            problems.append(f"{title}: what is removed has no speed and no latency; leave remove out, or these")
        elif link.remove:
            if graph.has_edge(here, there):
                graph.remove_edge(here, there)
            else:
                problems.append(f"{title}: nothing to remove, they are not joined")
        elif link.speed is None and not graph.has_edge(here, there):
            problems.append(f"{title}: a new link needs a speed, such as 400G")
        else:
            figures = {} if graph.has_edge(here, there) else {"latency_seconds": link_figure("default_latency")}
            if link.speed is not None:
                figures["bytes_per_second"] = read_speed(link.speed)
            if link.latency is not None:
                figures["latency_seconds"] = read_seconds(link.latency)
            graph.add_edge(here, there, **figures)
    if problems:
        raise PlanError(problems)


def _check_whole(graph: nx.Graph) -> None:
    """Refuse a graph in several pieces, naming those that the first device does not reach."""
    pieces = list(nx.connected_components(graph))
    first = next(name for name, kind in graph.nodes(data="kind") if kind == "device")
    lost = [piece for piece in pieces if first not in piece]
    if lost:
        names = sorted(set().union(*lost), key=list(graph).index)
        num_devices = sum(graph.nodes[name]["kind"] == "device" for name in names)
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise PlanError(
            f"the graph is not connected: {', '.join(names[:8])}{more} ({num_devices} device(s) among them) cannot be "
            f"reached from {first}; add the missing link, or take them out"
        )


def _fill_domains(graph: nx.Graph) -> None:
    """Where no device names its domain: what is joined without a network card is one."""
    devices = [name for name, kind in graph.nodes(data="kind") if kind == "device"]
    named = [name for name in devices if graph.nodes[name]["domain"] is not None]
    if named and len(named) < len(devices):
        missing = next(name for name in devices if graph.nodes[name]["domain"] is None)
        raise PlanError(f"graph.devices.{missing} has no domain, while {named[0]} has one; give all or none")
    if not named:
        without = graph.subgraph(name for name, kind in graph.nodes(data="kind") if kind != "nic")
        for number, piece in enumerate(sorted(nx.connected_components(without), key=sorted)):
            for name in piece:
                graph.nodes[name]["domain"] = f"domain{number}"
