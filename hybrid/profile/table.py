"""A profile as `rich` tables and sentences; its lines and rows as text, for a page as well."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hybrid.profile.advice import THRESHOLD, exposed_fraction
from hybrid.profile.profile import PARTS, Profile
from hybrid.units import format_bytes, format_count, format_seconds

__all__ = ["advice_lines", "headline", "part_rows", "profile_as_text", "totals", "traffic_rows"]

_MOST_RANKS = 4


def profile_as_text(profile: Profile) -> Iterator[RenderableType]:
    """What is printed, from top to bottom."""
    yield Text(headline(profile), style="bold")
    yield Text()
    yield _parts(profile)
    if profile.axes:
        yield Text()
        yield _traffic(profile)
    yield Text()
    for line in totals(profile):
        yield Text(line)
    yield Text()
    first, *rest = advice_lines(profile)
    yield Text(first, style="bold yellow" if rest else "")
    for line in rest:
        yield Text(f"- {line}")
    yield Text(f"traces, for https://ui.perfetto.dev: {', '.join(rank.trace_file for rank in profile.ranks)}")


def headline(profile: Profile) -> str:
    """How many steps, ranks, cut how, on what."""
    layout = " × ".join(f"{axis} {degree}" for axis, degree in profile.degrees.items() if degree > 1) or "nothing cut"
    return (
        f"{_count(profile.num_steps, 'step')} of {_count(profile.world_size, 'rank')} ({layout}; ZeRO stage "
        f"{profile.settings['zero_stage']}), {profile.device}"
    )


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _parts(profile: Profile) -> Table:
    """Rows are what time goes to; columns the mean, and every rank or, of many, the least and the most."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    ranks, are_many = profile.ranks, len(profile.ranks) > _MOST_RANKS
    table.add_column("per step")
    names = ["least", "on rank", "most", "on rank"] if are_many else [f"rank {rank.rank}" for rank in ranks]
    for head in ["mean", "share", *(names if len(ranks) > 1 else [])]:
        table.add_column(head, justify="right", no_wrap=True)
    for name, values in part_rows(profile):
        mean = sum(values) / len(values)
        share = "" if name == "between steps" else f"{mean / profile.mean('step'):.0%}"
        cells = [format_seconds(value) for value in values]
        if are_many:
            least, most = values.index(min(values)), values.index(max(values))
            cells = [cells[least], str(least), cells[most], str(most)]
        style = "bold" if name in {"step", "exposed communication"} else None
        table.add_row(name, format_seconds(mean), share, *(cells if len(ranks) > 1 else []), style=style)
    return table


def part_rows(profile: Profile) -> Iterator[tuple[str, list[float]]]:
    """What a row is of, and its seconds by rank; what belongs to exposed communication is indented below it."""
    yield "step", [rank.step_seconds for rank in profile.ranks]
    for part in PARTS:
        yield part, [getattr(rank, f"{part}_seconds") for rank in profile.ranks]
    if profile.axes:
        yield "exposed communication", [rank.exposed_seconds for rank in profile.ranks]
    for axis in profile.axes:
        yield f"  {axis}", [rank.exposed(axis) for rank in profile.ranks]
    yield "between steps", [rank.between_seconds for rank in profile.ranks]


def _traffic(profile: Profile) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("axis", "what", "calls", "sent", "exposed"):
        table.add_column(head, justify="left" if head in {"axis", "what"} else "right", no_wrap=True)
    table.add_column("under way", justify="right", no_wrap=True)
    for row in traffic_rows(profile):
        table.add_row(*row)
    return table


def traffic_rows(profile: Profile) -> Iterator[tuple[str, ...]]:
    """Axis, operation, calls, bytes sent, exposed, under way; mean of the ranks. What a row shares with the one above
    is left empty."""
    count = len(profile.ranks)
    for axis in profile.axes:
        under_way = sum(rank.communication_seconds.get(axis, 0.0) for rank in profile.ranks) / count
        sums: dict[str, list[float]] = {}
        for one in (one for rank in profile.ranks for one in rank.traffic if one.axis == axis):
            own = sums.setdefault(one.op, [0.0, 0.0, 0.0])
            for place, value in enumerate((one.calls, one.sent_bytes, one.exposed_seconds)):
                own[place] += value / count
        for op, (calls, sent, exposed) in sums.items():
            shown = [f"{calls:g}", format_bytes(round(sent))] if calls else ["", ""]
            is_first = op == next(iter(sums))
            ends = [format_seconds(under_way)] if is_first else [""]
            yield (axis if is_first else "", op, *shown, format_seconds(exposed), *ends)


def totals(profile: Profile) -> Iterator[str]:
    """Step, tokens, flops, MFU: a line each."""
    step = profile.step_seconds
    plain = profile.untraced_step_seconds
    shown = f"step {format_seconds(step)} while traced"
    yield shown + (
        "" if plain is None else f", {format_seconds(plain)} before (tokens and flops per second are of these)"
    )
    rate = f"{format_count(profile.tokens)} tokens a step, {format_count(profile.tokens_per_second)} tokens/s"
    if profile.flops_per_step is not None and profile.flops_per_second is not None:
        rate += (
            f"; {format_count(profile.flops_per_step)} flops a step, {format_count(profile.flops_per_second)} flops/s"
        )
    yield rate
    if profile.mfu is None:
        yield f"MFU: not given, {profile.peak_source}"
    else:
        peak = format_count(profile.peak_flops_per_device or 0.0)
        yield f"MFU {profile.mfu:.1%} of {peak} flops/s per device ({profile.peak_source}, {profile.dtype})"


def advice_lines(profile: Profile) -> Iterator[str]:
    """A sentence on the whole; where there is something to change, what, each a line."""
    fraction = exposed_fraction(profile)
    if profile.is_on_device:
        yield (
            "Times are the host's, which does not wait for the device: the traces show what communication is exposed; "
            "no advice."
        )
    elif not profile.advice:
        yield f"Exposed communication is {fraction:.0%} of the step; nothing to change (up to {THRESHOLD:.0%})."
    else:
        yield f"Exposed communication is {fraction:.0%} of the step, more than {THRESHOLD:.0%}:"
        yield from (advice.text for advice in profile.advice)
