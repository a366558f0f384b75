"""Plans as `rich` tables: the ranking, and the best one in full."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hybrid.planner.plan import Plan, Plans
from hybrid.units import format_bytes, format_count, format_seconds

__all__ = ["advice_lines", "best_in_full", "ranking", "rejections"]

# Parts of a step under the head of their column; a part in none of them is in `other`.
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "compute": ("compute", "attention", "elementwise", "host", "recompute"),
    "tp": ("tp_exposed", "cp_exposed", "ep_exposed"),
    "pipeline": ("pp_bubble", "pp_transfer"),
    "dp": ("dp_exposed", "gather_exposed"),
}
_PART_NAMES = {
    "compute": "matrix products",
    "attention": "attention",
    "elementwise": "pointwise work",
    "host": "waiting for the host",
    "recompute": "recompute",
    "tp_exposed": "tensor-parallel sums",
    "cp_exposed": "context-parallel exchange",
    "ep_exposed": "expert exchange",
    "pp_bubble": "pipeline bubble",
    "pp_transfer": "pipeline messages",
    "dp_exposed": "gradient sums not hidden",
    "gather_exposed": "parameter gathers not hidden",
    "optimizer": "optimizer step",
}


def ranking(plans: Plans) -> Table:
    """The plans, best first: layout, step, parts of the step in %, memory."""
    job = plans.request.job
    title = (
        f"{job.model.name} ({format_count(job.model.num_parameters)} parameters) on {job.cluster.name}: "
        f"batch {job.global_batch_size} × {job.seq} tokens"
    )
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
    heads = ["#", "tp", "pp", "dp", "zero", "shard", "schedule", "micro", "recompute", "step", "tokens/s/device", "MFU"]
    has_unbuilt = any(plan.candidate.cp > 1 or plan.candidate.ep > 1 for plan in plans)
    if has_unbuilt:
        heads[3:3] = ["cp", "ep"]
    for head in [*heads, *(f"{name} %" for name in _COLUMNS), "other %", "memory", "OOM risk"]:
        table.add_column(head, justify="left" if head in {"schedule", "recompute"} else "right", no_wrap=True)
    for number, plan in enumerate(plans, 1):
        cells = list(_layout_cells(plan, has_unbuilt=has_unbuilt))
        total = plan.time.total_seconds
        shares = [sum(plan.time.parts.get(part, 0.0) for part in parts) / total for parts in _COLUMNS.values()]
        table.add_row(
            str(number),
            *cells,
            format_seconds(total),
            f"{plan.tokens_per_second / job.cluster.num_devices:,.0f}",
            f"{plan.model_flops_utilization:.1%}",
            *(f"{100 * share:.0f}" for share in shares),
            f"{100 * max(0.0, 1 - sum(shares)):.0f}",
            format_bytes(plan.fit.needed_bytes),
            f"{plan.fit.chance_of_running_out:.1%}",
            style="bold green" if number == 1 else "",
        )
    return table


def _layout_cells(plan: Plan, *, has_unbuilt: bool) -> Iterator[str]:
    candidate = plan.candidate
    yield f"{candidate.tp}{' sp' if candidate.sequence_parallel else ''}"
    yield str(candidate.pp)
    if has_unbuilt:
        yield str(candidate.cp)
        yield str(candidate.ep)
    yield str(candidate.dp)
    yield str(candidate.zero_stage)
    yield str(candidate.dp_shard) if candidate.zero_stage else "–"
    if candidate.pp == 1:
        yield "–"
    else:
        yield candidate.schedule + (f" ×{candidate.virtual_stages}" if candidate.virtual_stages > 1 else "")
    yield f"{candidate.micro_batch_size} × {candidate.num_micro_batches}"
    yield candidate.recompute


def best_in_full(plan: Plan) -> RenderableType:
    """Time and memory of one plan, part by part."""
    time = Table(title="Step", title_justify="left", box=None, pad_edge=False, show_header=False)
    total = plan.time.total_seconds
    for name, seconds in sorted(plan.time.parts.items(), key=lambda item: -item[1]):
        if seconds > 0:
            time.add_row(
                _PART_NAMES.get(name, name), format_seconds(seconds), f"{seconds / total:.0%}", _bar(seconds / total)
            )
    time.add_row("all", format_seconds(total), "", "", style="bold")
    worst = plan.memory.worst
    memory = Table(
        title=f"Memory per rank, pipeline stage {worst.stage}", title_justify="left", box=None, pad_edge=False
    )
    memory = Table(
        title="Memory of the fullest rank", title_justify="left", box=None, pad_edge=False, show_header=False
    )
    limit = plan.fit.limit_bytes
    for name, size in sorted(worst.parts.items(), key=lambda item: -item[1]):
        if size > 0:
            memory.add_row(name.replace("_", " "), format_bytes(size), f"{size / limit:.0%}", _bar(size / limit))
    memory.add_row("tensors", format_bytes(worst.tensors_bytes), f"{worst.tensors_bytes / limit:.0%}", "", style="bold")
    for name, interval in (("reserved by the allocator", worst.reserved), ("on the device", worst.device)):
        between = f"{format_bytes(interval.low)} … {format_bytes(interval.high)}"
        memory.add_row(name, format_bytes(interval.expected), f"{interval.expected / limit:.0%}", between)
    return Group(time, Text(""), memory)


def _bar(share: float, width: int = 24) -> str:
    return "█" * max(1, round(share * width)) if share >= 0.5 / width else "▏"


def advice_lines(plans: Plans) -> Iterator[str]:
    """Each a sentence."""
    advice = plans.advice
    yield f"binding: {advice.binding}"
    yield f"largest loss: {advice.loss}"
    yield from (f"memory: {text}" for text in advice.unlocks)
    for one in advice.sensitivities:
        step = one.step_seconds / plans.result.found[0].time.total_seconds - 1
        if abs(step) >= 0.001:
            stays = (
                "the same layout stays best"
                if one.best == plans.result.found[0].candidate.label
                else f"then best: {one.best}"
            )
            yield f"{one.what} {one.change:+.0%}: step {step:+.1%}; {stays}"
    yield advice.slow_device
    yield from advice.notes
    yield f"measure first: {'; '.join(advice.measure_first)}"


def rejections(plans: Plans) -> Table:
    """Why the others are not there, by rule."""
    table = Table(title="Left out", title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("reason", no_wrap=True)
    table.add_column("layouts", justify="right")
    table.add_column("first of them", overflow="fold")
    for rejection in plans.result.rejections:
        table.add_row(rejection.rule, f"{rejection.count:,}", escape(rejection.text))
    return table
