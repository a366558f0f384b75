"""Time of a collective on the links of its group.

    ring    base + steps inside · step_seconds + steps across · across_seconds + share · bytes / rate
    tree    all-reduce between domains: 2 · log2(domains) steps across instead of 2 · domains
    log     all-gather and reduce-scatter of one rank per domain (PAT, from NCCL 2.23): log2(domains) steps
    switch  all-reduce inside a domain whose switches add up (NVLS): every rank sends and receives the value once

`rate` is that of the slowest cut of the ring: what a rank has inside a domain, or what the whole group has out of one,
whichever is less: a ring goes round a domain before it leaves it, on every card that the group's ranks there own.
Shares, steps and what they cost: NVIDIA/nccl-tests doc/PERFORMANCE.md, NVIDIA/nccl src/graph/tuning.cc. Constants:
`data/collectives.yaml` for devices, `Software` for networks. Groups that `hybrid calibrate` measured take what it
found, others are corrected as the nearest of them (`measured.py`). Comparison with measurements:
tests/pure/test_planner_collectives.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from hybrid.contracts.cluster import Cluster, GroupLinks
from hybrid.planner.data_file import read_data_file
from hybrid.planner.measured import MeasuredCollective, MeasuredCollectives
from hybrid.planner.software import Software

__all__ = ["Collective", "Fabric", "collective_seconds", "fabric_of", "measured_fabric"]

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The fields are explained at the top of `data/collectives.yaml`; `curves` are what was measured."""

    prefix: str
    inside: float
    inside_pair: float
    base_seconds: float
    step_seconds: float
    in_switch: float
    in_switch_least: int
    in_switch_half: float
    tree: float
    exchange: float
    source: str
    date: str
    curves: MeasuredCollectives = field(default_factory=MeasuredCollectives)


@cache
def fabric_of(name: str) -> Fabric:
    """Of the device of this name; a device that no entry names has the last one, which fits all."""
    return next(fabric for fabric in _fabrics() if name.upper().startswith(fabric.prefix.upper()))


def measured_fabric(cluster: Cluster, software: Software) -> Fabric:
    """Of a cluster's devices, with what `hybrid calibrate` measured of the groups of its ranks."""
    plain = fabric_of(cluster.device.like)
    if cluster.measured is None:
        return plain
    curves = [
        MeasuredCollective(
            kind=curve.kind,
            # Of the cluster as it was measured, also where its links have been scaled since.
            links=Cluster.axis_links(cluster, size=curve.size, stride=curve.stride),
            points=tuple(sorted((float(point.num_bytes), point.seconds) for point in curve.points)),
        )
        for curve in cluster.measured.collectives
    ]

    def formula(curve: MeasuredCollective, num_bytes: float) -> float:
        return _by_formula(curve.kind, num_bytes, curve.links, fabric=plain, software=software)

    return replace(plain, curves=MeasuredCollectives(curves, formula))


@cache
def _fabrics() -> tuple[Fabric, ...]:
    entries = read_data_file("collectives.yaml")
    return tuple(Fabric(**{**entry, "date": str(entry["date"])}) for entry in entries)


def collective_seconds(
    kind: Collective, num_bytes: float, links: GroupLinks | None, *, fabric: Fabric, software: Software
) -> float:
    """`num_bytes`: of the whole value: the sum, what has been gathered, what one rank sends to all others together."""
    if links is None or links.size <= 1 or num_bytes <= 0:
        return 0.0
    time = _by_formula(kind, num_bytes, links, fabric=fabric, software=software)
    time *= fabric.curves.factor(kind, num_bytes, links)
    return time / software.collective_fraction + software.collective_seconds


def _by_formula(kind: Collective, num_bytes: float, links: GroupLinks, *, fabric: Fabric, software: Software) -> float:
    if kind == "all_to_all":
        time = _all_to_all(num_bytes, links, fabric, software)
    elif kind == "send":
        rate = _ring_rate(links, fabric, software)
        time = fabric.base_seconds + _step(links, fabric, software) + num_bytes / rate
    else:
        time = _ring(kind, num_bytes, links, fabric, software)
        if kind == "all_reduce":
            time = min(time, _tree(num_bytes, links, fabric, software), _switch(num_bytes, links, fabric))
        elif software.is_log_gather and links.ranks_per_domain == 1 and kind != "broadcast":
            time = min(time, _log(num_bytes, links, fabric, software))
    return time


def _ring(kind: Collective, num_bytes: float, links: GroupLinks, fabric: Fabric, software: Software) -> float:
    n = links.size
    rounds = 2 if kind == "all_reduce" else 1
    share = 1.0 if kind == "broadcast" else rounds * (n - 1) / n
    crossing = rounds * links.num_domains * (n - 1) / n if links.num_domains > 1 else 0.0
    steps = rounds * (n - 1) - crossing
    latency = fabric.base_seconds + steps * fabric.step_seconds + crossing * _across_step(links, software)
    return latency + share * num_bytes / _ring_rate(links, fabric, software)


def _tree(num_bytes: float, links: GroupLinks, fabric: Fabric, software: Software) -> float:
    """Chains inside the domains, a tree over the domains."""
    if links.num_domains == 1:
        return math.inf
    n = links.size
    inside = (links.ranks_per_domain - 1) * fabric.step_seconds
    depth = math.ceil(math.log2(links.num_domains)) * _across_step(links, software)
    rate = _ring_rate(links, fabric, software) * fabric.tree
    return fabric.base_seconds + 2 * (inside + depth) + 2 * (n - 1) / n * num_bytes / rate


def _log(num_bytes: float, links: GroupLinks, fabric: Fabric, software: Software) -> float:
    n = links.size
    depth = math.ceil(math.log2(n)) * _across_step(links, software)
    return fabric.base_seconds + depth + (n - 1) / n * num_bytes / (_across_rate(links, software) * fabric.tree)


def _switch(num_bytes: float, links: GroupLinks, fabric: Fabric) -> float:
    if links.num_domains > 1 or not fabric.in_switch or links.size < fabric.in_switch_least:
        return math.inf
    return fabric.base_seconds + (num_bytes + fabric.in_switch_half) / (
        fabric.in_switch * links.inside_bytes_per_second
    )


def _all_to_all(num_bytes: float, links: GroupLinks, fabric: Fabric, software: Software) -> float:
    """Each rank sends 1/n to each; what stays in the domain and what leaves it travel at the same time."""
    n, width = links.size, links.ranks_per_domain
    inside = across = 0.0
    if width > 1:
        inside = num_bytes * (width - 1) / n / (_inside_rate(links, fabric) * fabric.exchange)
    if links.num_domains > 1:
        across = num_bytes * (n - width) / n * width / (_across_rate(links, software) * fabric.exchange)
    started = 2 * (width - 1) * fabric.step_seconds + (_across_step(links, software) if links.num_domains > 1 else 0.0)
    return 2 * fabric.base_seconds + started + max(inside, across)


# ---------------------------------------------------------------- rates and steps


def _ring_rate(links: GroupLinks, fabric: Fabric, software: Software) -> float:
    if links.num_domains == 1:
        return _inside_rate(links, fabric)
    across = _across_rate(links, software)
    return across if links.ranks_per_domain == 1 else min(_inside_rate(links, fabric), across)


def _inside_rate(links: GroupLinks, fabric: Fabric) -> float:
    """Of one rank; rings through two ranks have fewer channels than rings through eight."""
    return fabric.inside * (1.0 - 2 * fabric.inside_pair / links.ranks_per_domain) * links.inside_bytes_per_second


def _across_rate(links: GroupLinks, software: Software) -> float:
    """Of a whole group out of a domain; networks of many nodes meet more congestion."""
    falloff = math.pow(links.num_domains / 2, -software.across_falloff)
    return links.across_bytes_per_second * software.across_fraction * falloff


def _across_step(links: GroupLinks, software: Software) -> float:
    return software.across_step_seconds + links.across_latency_seconds


def _step(links: GroupLinks, fabric: Fabric, software: Software) -> float:
    return _across_step(links, software) if links.num_domains > 1 else fabric.step_seconds
