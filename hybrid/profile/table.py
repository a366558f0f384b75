"""A profile as `rich` tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hybrid.profile.advice import THRESHOLD, exposed_fraction
from hybrid.profile.profile import PARTS, Profile
from hybrid.units import format_bytes, format_count, format_seconds

__all__ = ["profile_as_text"]

_MOST_RANKS = 4


def profile_as_text(profile: Profile) -> Iterator[RenderableType]:
    """What is printed, from top to bottom."""
    layout = " × ".join(f"{axis} {degree}" for axis, degree in profile.degrees.items() if degree > 1) or "nothing cut"
    yield Text(
        f"{_count(profile.num_steps, 'step')} of {_count(profile.world_size, 'rank')} ({layout}; ZeRO stage "
        f"{profile.settings['zero_stage']}), {profile.device}",
        style="bold",
    )
    yield Text()
    yield _parts(profile)
    if profile.axes:
        yield Text()
        yield _traffic(profile)
    yield Text()
    for line in _totals(profile):
        yield Text(line)
    yield Text()
    yield from _advice(profile)
    yield Text(f"traces, for https://ui.perfetto.dev: {', '.join(rank.trace_file for rank in profile.ranks)}")


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
    for name, values in _rows(profile):
        mean = sum(values) / len(values)
        share = "" if name == "between steps" else f"{mean / profile.mean('step'):.0%}"
        cells = [format_seconds(value) for value in values]
        if are_many:
            least, most = values.index(min(values)), values.index(max(values))
            cells = [cells[least], str(least), cells[most], str(most)]
        style = "bold" if name in {"step", "exposed communication"} else None
        table.add_row(name, format_seconds(mean), share, *(cells if len(ranks) > 1 else []), style=style)
    return table


def _rows(profile: Profile) -> Iterator[tuple[str, list[float]]]:
    """What a row is of, and its seconds by rank."""
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
            table.add_row(axis if is_first else "", op, *shown, format_seconds(exposed), *ends)
    return table


def _totals(profile: Profile) -> Iterator[str]:
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


def _advice(profile: Profile) -> Iterator[Text]:
    fraction = exposed_fraction(profile)
    if profile.is_on_device:
        yield Text(
            "Times are the host's, which does not wait for the device: the traces show what communication is exposed; "
            "no advice."
        )
        return
    if not profile.advice:
        yield Text(f"Exposed communication is {fraction:.0%} of the step; nothing to change (up to {THRESHOLD:.0%}).")
        return
    yield Text(f"Exposed communication is {fraction:.0%} of the step, more than {THRESHOLD:.0%}:", style="bold yellow")
    for advice in profile.advice:
        yield Text(f"- {advice.text}")
