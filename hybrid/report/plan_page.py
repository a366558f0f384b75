"""The answer of the planner as a page: to look at, and to argue with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from hybrid.contracts.cluster import Cluster
from hybrid.contracts.layout import Layout
from hybrid.contracts.rank_map import named
from hybrid.planner.cost import step_timeline
from hybrid.planner.plan import Plan, Plans
from hybrid.planner.request import Request
from hybrid.planner.search import Priced, search
from hybrid.planner.software import software_of
from hybrid.report.cluster_picture import cluster_picture
from hybrid.report.page import Section, TableData, page
from hybrid.report.pictures import Bar, Point, bars, devices, gantt, legend, part_names, points
from hybrid.report.plan_table import advice_lines, plan_columns, time_parts
from hybrid.units import format_bytes, format_count, format_seconds

__all__ = ["device_rows", "plan_page"]

_SHOWN = 12
_POINTS = 60  # of those that fit
_MOST_DEVICES = 1024  # of a map of single devices


def plan_page(plans: Plans) -> str:
    """A whole HTML file about these plans: memory, schedule, rank map, candidates, what was left out, assumptions."""
    job = plans.request.job
    title = f"{job.model.name} on {job.cluster.name}"
    subtitle = (
        f"{format_count(job.model.num_parameters)} parameters, {job.cluster.num_devices} × {job.cluster.device.name}, "
        f"batch of {job.global_batch_size} samples × {job.seq} tokens, {job.precision.compute}; "
        f"{plans.result.num_considered:,} layouts looked at"
    )
    return page(title, subtitle, list(_sections(plans)))


def _sections(plans: Plans) -> Iterator[Section]:
    best = plans.best
    columns = plan_columns(plans)
    rows = list(zip(*(cells for _, cells in columns), strict=True))[:_SHOWN]
    heads = [head for head, _ in columns]
    texts = {"schedule", "recompute", "reduce", "keep"}
    yield Section(
        name="layouts",
        heading="Layouts, best first",
        points=list(advice_lines(plans)),
        table=TableData(heads=heads, rows=rows, numbers=[head for head in heads if head not in texts], best=0),
    )
    memory = _memory_bars(best)
    yield Section(
        name="memory",
        heading="Memory of each pipeline rank",
        picture=bars(memory) + legend(part_names(memory)),
        caption="Tensors at the fullest moment; the line with an end is what the device must have, as an interval; "
        "dashes are the limit.",
    )
    total = best.time.total_seconds
    yield Section(
        name="step",
        heading=f"One step: {format_seconds(total)}",
        table=TableData(
            heads=("part", "time", "share"),
            rows=[(name, format_seconds(seconds), f"{seconds / total:.1%}") for name, seconds in time_parts(best)],
            numbers=("time", "share"),
        ),
    )
    if best.candidate.pp > 1:
        picture, caption = gantt(step_timeline(best.job, best.candidate))
        yield Section(name="schedule", heading=f"Schedule: {best.candidate.schedule}", picture=picture, caption=caption)
    yield _on_the_graph(best)
    yield _rank_map(best)
    yield Section(
        name="candidates",
        heading="Time against memory",
        picture=points(list(_points(plans))),
        caption="Filled: fits. Rings: faster than the best, and too large. The ring of ink is the best one.",
    )
    yield Section(
        name="left-out",
        heading="Left out",
        table=TableData(
            heads=("reason", "layouts", "first of them"),
            rows=[(one.rule, f"{one.count:,}", one.text) for one in plans.result.rejections],
            numbers=("layouts",),
        ),
    )
    yield _assumptions(plans)


def _memory_bars(plan: Plan) -> list[Bar]:
    return [
        Bar(
            label=f"pp {stage.stage}",
            parts={name.replace("_", " "): size for name, size in sorted(stage.parts.items(), key=lambda kv: -kv[1])},
            low=stage.device.low,
            high=stage.device.high,
            limit=plan.fit.limit_bytes,
        )
        for stage in plan.memory.stages
    ]


def _layout_of(plan: Plan) -> Layout:
    chosen = plan.candidate
    return Layout.of(
        pp=chosen.pp, dp_replicate=chosen.dp_replicate, dp_shard=chosen.dp_shard, cp=chosen.cp, tp=chosen.tp
    )


def _on_the_graph(plan: Plan) -> Section:
    """Which ranks the links lie between."""
    cluster, layout = plan.job.cluster, _layout_of(plan)
    marks = {}
    for rank, name in enumerate(cluster.ranks):
        place = layout.coordinate(rank)
        said = ", ".join(f"{axis} {index}" for axis, index in place.items() if layout.degree(axis) > 1)
        marks[name] = (place["pp"], said)
    picture, caption, folded = cluster_picture(cluster, marks)
    whose = "" if len(folded.domains) == cluster.num_domains else ", of the devices that are shown"
    said = f"Colours are pipeline ranks{whose}; point at a line for its rate. "
    return Section(name="graph", heading="Ranks on the cluster's graph", picture=picture, caption=said + caption)


def _rank_map(plan: Plan) -> Section:
    cluster, layout = plan.job.cluster, _layout_of(plan)
    members: dict[int, list[int]] = {}
    for rank, domain in enumerate(cluster.domain_of):
        members.setdefault(domain, []).append(rank)
    if cluster.num_devices <= _MOST_DEVICES:
        groups = [[[rank] for rank in ranks] for ranks in members.values()]
        said = "A frame is what fast links join; colours are pipeline ranks. "
    else:
        groups = [list(members.values())]
        said = "A square is a domain, all that fast links join; colours are pipeline ranks, of its first device. "
    tips = {}
    squares = []
    for group in groups:
        squares.append([(cluster.ranks[ranks[0]], layout.coordinate(ranks[0])["pp"]) for ranks in group])
        tips.update({cluster.ranks[ranks[0]]: _ranks_tip(ranks, cluster, layout) for ranks in group})
    picture, caption = devices(squares, tips)
    return Section(name="ranks", heading=f"Ranks: {layout.describe()}", picture=picture, caption=said + caption)


def _ranks_tip(ranks: Sequence[int], cluster: Cluster, layout: Layout) -> str:
    """Which they are, on which devices, with which coordinates."""
    places = [layout.coordinate(rank) for rank in ranks]
    spans = [
        (axis, min(place[axis] for place in places), max(place[axis] for place in places))
        for axis in places[0]
        if layout.degree(axis) > 1
    ]
    where = ", ".join(f"{axis} {low}" if low == high else f"{axis} {low} to {high}" for axis, low, high in spans)
    names = cluster.ranks[ranks[0]] if len(ranks) == 1 else f"{cluster.ranks[ranks[0]]} to {cluster.ranks[ranks[-1]]}"
    is_row = ranks[-1] - ranks[0] == len(ranks) - 1
    which = named(ranks) if is_row else f"ranks {', '.join(map(str, ranks[:8]))}{', …' if len(ranks) > 8 else ''}"
    return f"{which}: {names}" + (f"\n{where}" if where else "")


def _points(plans: Plans) -> Iterator[Point]:
    """The plans, more that come after them, and what would be faster if it fitted."""
    request = plans.request
    more = search(replace(request, num_plans=max(_POINTS, request.num_plans)))
    found = {one.candidate.label: one for one in (*plans.result.found, *more.found)}
    large = {one.candidate.label: one for one in (*plans.result.too_large, *more.too_large)}
    best = plans.result.found[0]
    for label, one in found.items():
        slower = one.time.total_seconds / best.time.total_seconds - 1
        why = "the best" if label == best.candidate.label else f"fits, and is {slower:.1%} slower than the best"
        yield _point(one, why, is_best=label == best.candidate.label)
    for one in large.values():
        yield _point(one, f"does not fit: needs {format_bytes(one.fit.over_bytes)} more than there is")


def _point(one: Priced, why: str, *, is_best: bool = False) -> Point:
    tip = (
        f"{one.candidate.label}\n{format_seconds(one.time.total_seconds)}, {format_bytes(one.fit.needed_bytes)}\n{why}"
    )
    return Point(
        x_bytes=one.fit.needed_bytes, y_seconds=one.time.total_seconds, tip=tip, fits=one.fit.fits, is_best=is_best
    )


def device_rows(cluster: Cluster) -> list[tuple[str, str, str]]:
    """(what, value, source) of its device's figures."""
    device = cluster.device
    rows = [(f"peak {dtype}", f"{rate / 1e12:,.1f} TFLOP/s", device.source) for dtype, rate in device.flops.items()]
    figures = (
        ("memory of a device", format_bytes(device.memory_bytes)),
        ("rate of its memory", f"{device.memory_bytes_per_second / 1e9:,.0f} GB/s"),
        ("links to peers", f"{device.scale_up_bytes_per_second / 1e9:,.0f} GB/s ({device.scale_up or 'host'})"),
        ("network of a device", f"{device.nic_bytes_per_second / 1e9:,.1f} GB/s"),
    )
    return rows + [(name, value, f"{device.source}, {device.date}") for name, value in figures]


def _host_row(request: Request) -> tuple[str, str, str]:
    """Memory of a host, which only offload needs."""
    host, size = request.host, request.host_memory_bytes
    if size is None:
        return "memory of a host", "not known, not looked at", "no usual machine has so many of these devices"
    told = "given" if host is None else f"as in a {host.name}: {host.source}, {host.date}"
    return "memory of a host", format_bytes(size), told


def _assumptions(plans: Plans) -> Section:
    """What the figures rest on, with where it comes from."""
    job = plans.request.job
    software = software_of(job.software) if isinstance(job.software, str) else job.software
    rows = [("model", job.model.name, job.model.source), *device_rows(job.cluster)]
    for name in sorted(field.name for field in fields(software) if field.name not in {"name", "sources"}):
        constant = software.sources.get(name)
        source = f"{constant.source}, {constant.date}" if constant else "default of hybrid/planner/software.py"
        rows.append((f"{software.name}: {name}", f"{getattr(software, name):g}", source))
    rows += [("note", note, "the cluster's description") for note in job.cluster.notes]
    rows.append(_host_row(plans.request))
    return Section(
        name="assumptions",
        heading="Assumptions",
        table=TableData(heads=("what", "value", "source"), rows=rows),
    )
