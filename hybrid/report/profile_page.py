"""What was measured of some steps as a page: where time goes on each rank, communication by axis, advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hybrid.profile.profile import PARTS, Profile, RankProfile
from hybrid.profile.table import advice_lines, headline, part_rows, totals, traffic_rows
from hybrid.profile.timeline import RankTimeline, Stretch
from hybrid.report import pictures
from hybrid.report.page import Section, TableData, page
from hybrid.report.svg import NUM_COLORS
from hybrid.units import format_seconds

__all__ = ["profile_page"]

_MOST_RANKS = 64  # drawn; a table of more columns than _MOST_COLUMNS ranks has the least and the most instead
_MOST_COLUMNS = 8
_MOST_STRETCHES = 12_000
_OTHER_AXES = "other axes"


def profile_page(profile: Profile, timelines: Sequence[RankTimeline]) -> str:
    """A whole HTML file.

    Args:
        profile: of some steps on all ranks.
        timelines: of the last of them, by rank; none where they are not known.
    """
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    return page(
        "Where the time of a step goes", f"{headline(profile)}; {versions}", list(_sections(profile, timelines))
    )


def _sections(profile: Profile, timelines: Sequence[RankTimeline]) -> Iterator[Section]:
    first, *rest = advice_lines(profile)
    yield Section(name="advice", heading="Advice", sentences=[first], points=rest)
    names = _names(profile)
    bars = [pictures.Bar(label=f"rank {rank.rank}", parts=_parts(rank, names)) for rank in profile.ranks[:_MOST_RANKS]]
    cut = f"The first {_MOST_RANKS} of {len(profile.ranks)} ranks. " if len(profile.ranks) > _MOST_RANKS else ""
    yield Section(
        name="step",
        heading=f"One step: {format_seconds(profile.step_seconds)} on the slowest rank",
        sentences=list(totals(profile)),
        picture=pictures.bars(bars, show=format_seconds) + pictures.legend(pictures.part_names(bars)),
        caption=f"{cut}Mean of the traced steps. Axes: communication in which the rank computes nothing.",
        table=_parts_table(profile),
    )
    if profile.axes:
        heads = ("axis", "what", "calls", "sent", "exposed", "under way")
        yield Section(
            name="communication",
            heading="Communication by axis",
            table=TableData(heads=heads, rows=list(traffic_rows(profile)), numbers=heads[2:]),
        )
    if timelines:
        colors = {name: number for number, name in enumerate(pictures.part_names(bars))}
        yield _timeline(timelines, colors, names)
    yield Section(
        name="settings",
        heading="Settings",
        sentences=["Traces for https://ui.perfetto.dev: " + ", ".join(rank.trace_file for rank in profile.ranks)],
        table=TableData(heads=("setting", "value"), rows=[(name, str(value)) for name, value in _settings(profile)]),
    )


def _names(profile: Profile) -> Mapping[str, str]:
    """Axis -> under which name it is drawn: the dearest ones under their own, as long as there are colours."""
    room = NUM_COLORS - len(PARTS)
    axes = profile.axes
    own = axes if len(axes) <= room else axes[: room - 1]
    return {axis: axis if axis in own else _OTHER_AXES for axis in axes}


def _parts(rank: RankProfile, names: Mapping[str, str]) -> Mapping[str, float]:
    parts: dict[str, float] = {part: getattr(rank, f"{part}_seconds") for part in PARTS}
    for axis, name in names.items():
        parts[name] = parts.get(name, 0.0) + rank.exposed(axis)
    return parts


def _parts_table(profile: Profile) -> TableData:
    """As on a terminal: the mean, and every rank or, of many, the least and the most."""
    ranks, is_wide = profile.ranks, len(profile.ranks) > _MOST_COLUMNS
    names = ["least", "on rank", "most", "of rank"] if is_wide else [f"rank {rank.rank}" for rank in ranks]
    heads = ["per step", "mean", "share", *(names if len(ranks) > 1 else [])]
    rows = []
    for name, values in part_rows(profile):
        mean = sum(values) / len(values)
        share = "" if name == "between steps" else f"{mean / profile.mean('step'):.0%}"
        cells = [format_seconds(value) for value in values]
        if is_wide:
            least, most = values.index(min(values)), values.index(max(values))
            cells = [cells[least], str(ranks[least].rank), cells[most], str(ranks[most].rank)]
        shown = f"on {name.strip()}" if name.startswith(" ") else name
        rows.append((shown, format_seconds(mean), share, *(cells if len(ranks) > 1 else [])))
    return TableData(heads=heads, rows=rows, numbers=heads[1:])


def _timeline(timelines: Sequence[RankTimeline], colors: Mapping[str, int], names: Mapping[str, str]) -> Section:
    shown = timelines[:_MOST_RANKS]
    most = max(1, _MOST_STRETCHES // len(shown))
    begin = min(one.begun_at_seconds for one in shown)
    lanes = []
    for one in shown:
        offset = one.begun_at_seconds - begin
        kept = sorted(one.stretches, key=lambda stretch: stretch.start_seconds - stretch.end_seconds)[:most]
        lanes.append((f"rank {one.rank}", [_stretch(stretch, offset, colors, names) for stretch in sorted(kept)]))
    told = []
    if len(timelines) > len(shown):
        told.append(f"The first {len(shown)} of {len(timelines)} ranks.")
    if any(len(one.stretches) > most for one in shown):
        told.append(f"Of each rank the {most} longest stretches.")
    told.append("Colours as above. Ranks are set beside each other by the clocks of their machines.")
    return Section(
        name="timeline",
        heading="The last traced step, rank by rank",
        picture=pictures.lanes(lanes),
        caption=" ".join(told),
    )


def _stretch(stretch: Stretch, offset: float, colors: Mapping[str, int], names: Mapping[str, str]) -> pictures.Stretch:
    what = f"{stretch.op} on {stretch.axis}" if stretch.axis else stretch.part
    seconds = stretch.end_seconds - stretch.start_seconds
    return pictures.Stretch(
        start_seconds=stretch.start_seconds + offset,
        end_seconds=stretch.end_seconds + offset,
        color=colors.get(names.get(stretch.axis, stretch.part), NUM_COLORS - 1),
        tip=f"{what}\nfrom {format_seconds(stretch.start_seconds)} of the step, for {format_seconds(seconds)}",
    )


def _settings(profile: Profile) -> Iterator[tuple[str, object]]:
    yield "computes in", profile.dtype
    yield from profile.settings.items()
