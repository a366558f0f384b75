"""A cluster as a page: its graph, its links, what groups of ranks have of them, its device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybrid.contracts.cluster import Cluster
from hybrid.report.cluster_folding import Folded, link_kinds
from hybrid.report.cluster_picture import cluster_picture
from hybrid.report.page import Section, TableData, page
from hybrid.report.plan_page import device_rows
from hybrid.units import format_rate, format_seconds

__all__ = ["cluster_page"]

_MOST_LINKS = 40
Row = tuple[str, float, float, float]
"""Who talks, the slowest and the fastest bytes per second of each, latency in seconds."""


def cluster_page(
    cluster: Cluster, *, rows: Sequence[Row], halves: float | None, slow_links: Sequence[tuple[str, str, float, float]]
) -> str:
    """A whole HTML file.

    Args:
        cluster: also one on which nothing can be planned; the page says why.
        rows: of the table of rates; none where nothing can be planned.
        halves: bytes per second between the halves of the cluster; None in one domain.
        slow_links: (end, end, bytes per second, that of its like).
    """
    kinds = "" if cluster.refusal is not None else f" × {cluster.device.name}"
    domains = f"{cluster.num_domains} domain{'s' * (cluster.num_domains > 1)}"
    count = f"{cluster.num_devices}{kinds or ' devices of several kinds'}"
    subtitle = f"{count} in {domains}: devices of a domain meet without a network card"
    return page(f"Cluster {cluster.name}", subtitle, list(_sections(cluster, rows, halves, slow_links)))


def _sections(
    cluster: Cluster, rows: Sequence[Row], halves: float | None, slow_links: Sequence[tuple[str, str, float, float]]
) -> Iterator[Section]:
    picture, caption, folded = cluster_picture(cluster)
    refusal = [] if cluster.refusal is None else [f"Nothing can be planned here: {cluster.refusal}"]
    yield Section(name="graph", heading="Graph", sentences=refusal, picture=picture, caption=caption)
    if rows:
        both = [] if halves is None else [f"Between the halves, all devices at once: {format_rate(halves)}."]
        yield Section(
            name="rates",
            heading="What groups of ranks have",
            sentences=both,
            table=TableData(
                heads=("who", "each, one direction", "latency"),
                rows=[(name, _between(low, high), format_seconds(latency)) for name, low, high, latency in rows],
                numbers=("each, one direction", "latency"),
            ),
        )
    yield _nodes(cluster, folded)
    yield _links(cluster, folded, slow_links)
    if cluster.refusal is None:
        yield Section(
            name="device",
            heading=cluster.device.name,
            table=TableData(heads=("what", "value", "source"), rows=device_rows(cluster)),
        )


def _between(low: float, high: float) -> str:
    return format_rate(low) if low == high else f"{format_rate(low)} to {format_rate(high)}"


def _nodes(cluster: Cluster, folded: Folded) -> Section:
    graph = cluster.graph
    rows = []
    for one in folded.looks:
        kinds = dict.fromkeys(graph.nodes[name].get("device", "") for name in one.devices)
        also = f" and {len(one.alike) - 1} more" if len(one.alike) > 1 else ""
        shown = [f"{one.name}{also}", str(len(one.alike)), str(len(one.devices)), ", ".join(filter(None, kinds))]
        rows.append((*shown, str(len(one.cards)), ", ".join(one.switches) or "–"))
    heads = ("domains", "alike", "devices", "kind", "cards", "switches within")
    return Section(
        name="domains",
        heading="Domains",
        table=TableData(heads=heads, rows=rows, numbers=("alike", "devices", "cards")),
    )


def _links(cluster: Cluster, folded: Folded, slow_links: Sequence[tuple[str, str, float, float]]) -> Section:
    kinds = link_kinds(cluster, folded)
    rows = [
        (
            kind.ends,
            f"{kind.count:,}",
            format_rate(kind.bytes_per_second),
            format_seconds(kind.latency_seconds),
            " – ".join(kind.examples[0]) + (", ..." if kind.count > 1 else ""),
        )
        for kind in kinds[:_MOST_LINKS]
    ]
    cut = [f"And {len(kinds) - _MOST_LINKS} more sorts of links."] if len(kinds) > _MOST_LINKS else []
    slow = [
        f"Slower than its like: {here} – {there} has {format_rate(speed)}, others {format_rate(usual)}."
        for here, there, speed, usual in slow_links[:_MOST_LINKS]
    ]
    more = len(slow_links) - _MOST_LINKS
    return Section(
        name="links",
        heading="Links",
        sentences=cut,
        points=[*slow, *([f"And {more} more slow links."] if more > 0 else []), *cluster.notes],
        table=TableData(
            heads=("between", "links", "each, one direction", "latency", "which"),
            rows=rows,
            numbers=("links", "each, one direction", "latency"),
        ),
    )
