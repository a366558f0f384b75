"""Plans as `rich` tables: the ranking, and the best one in full."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hybrid.planner.plan import Plan, Plans
from hybrid.units import format_bytes, format_count, format_seconds

__all__ = ["advice_lines", "best_in_full", "plan_columns", "ranking", "rejections", "time_parts"]

# Parts of a step under the head of their column; a part in none of them is in `other`.
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "comp": ("compute", "attention", "elementwise", "host", "recompute"),
    "tp": ("tp_exposed", "cp_exposed", "ep_exposed"),
    "pp": ("pp_bubble", "pp_transfer"),
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


def ranking(plans: Plans, *, width: int) -> RenderableType:
    """The plans, best first: layout, step, parts of the step in %, memory; in several tables where one is too wide."""
    job = plans.request.job
    title = (
        f"{job.model.name} ({format_count(job.model.num_parameters)} parameters) on {job.cluster.name}: "
        f"batch {job.global_batch_size} × {job.seq} tokens"
    )
    whole = plan_columns(plans)
    numbers, *rest = whole
    costs = list(_cost_columns(plans))
    layouts = rest[: len(rest) - len(costs)]
    if _width(whole) <= width:
        return _columns(whole, title=title)
    first, *more = [one for part in (layouts, costs) for one in _beside(numbers, part, width=width)]
    return Group(
        _columns(first, title=title), *(part for one in more for part in (Text(""), _columns(one, title=None)))
    )


Column = tuple[str, list[str]]


def _width(columns: Sequence[Column]) -> int:
    return sum(max(map(len, [head, *cells])) + 2 for head, cells in columns) - 2


def _beside(numbers: Column, columns: Sequence[Column], *, width: int) -> Iterator[list[Column]]:
    """The columns in as few tables as the width allows, each with the plans' numbers in front: nothing is cut off."""
    table = [numbers]
    for column in columns:
        if len(table) > 1 and _width([*table, column]) > width:
            yield table
            table = [numbers]
        table.append(column)
    yield table


def plan_columns(plans: Plans) -> list[Column]:
    """(head, a cell per plan): number, layout, costs."""
    numbers = ("#", [str(number) for number in range(1, len(plans) + 1)])
    return [numbers, *_layout_columns(plans), *_cost_columns(plans)]


def _columns(columns: list[Column], *, title: str | None) -> Table:
    table = Table(
        title=None if title is None else escape(title),
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for head, _ in columns:
        table.add_column(head, justify="left" if head in {"schedule", "recompute"} else "right", no_wrap=True)
    for place, row in enumerate(zip(*(cells for _, cells in columns), strict=True)):
        table.add_row(*row, style="bold green" if place == 0 else "")
    return table


def _layout_columns(plans: Plans) -> Iterator[Column]:
    chosen = [plan.candidate for plan in plans]
    yield "tp", [f"{one.tp}{' sp' if one.sequence_parallel else ''}" for one in chosen]
    yield "pp", [str(one.pp) for one in chosen]
    for name, values in (("cp", [one.cp for one in chosen]), ("ep", [one.ep for one in chosen])):
        if any(value > 1 for value in values):
            yield name, [str(value) for value in values]
    yield "dp", [str(one.dp) for one in chosen]
    yield "zero", [str(one.zero_stage) + (" host" if one.is_offloaded else "") for one in chosen]
    yield "shard", [str(one.dp_shard) if one.zero_stage else "–" for one in chosen]
    if any(one.zero_stage >= 2 for one in chosen):
        words = {"every_micro_batch": "every", "last_micro_batch": "last"}
        yield "reduce", [words[one.grad_reduce] if one.zero_stage >= 2 else "–" for one in chosen]
    if any(one.zero_stage == 3 for one in chosen):
        yield "keep", [one.reshard_after if one.zero_stage == 3 else "–" for one in chosen]
    if any(one.pp > 1 for one in chosen):
        chunks = [f" ×{one.virtual_stages}" if one.virtual_stages > 1 else "" for one in chosen]
        yield (
            "schedule",
            [one.schedule + many if one.pp > 1 else "–" for one, many in zip(chosen, chunks, strict=True)],
        )
    yield "micro", [f"{one.micro_batch_size} × {one.num_micro_batches}" for one in chosen]
    yield "recompute", [one.recompute for one in chosen]


def _cost_columns(plans: Plans) -> Iterator[Column]:
    devices = plans.request.job.cluster.num_devices
    yield "step", [format_seconds(plan.time.total_seconds) for plan in plans]
    yield "tok/s/dev", [f"{plan.tokens_per_second / devices:,.0f}" for plan in plans]
    yield "MFU", [f"{plan.model_flops_utilization:.1%}" for plan in plans]
    shares = [
        [sum(plan.time.parts.get(part, 0.0) for part in parts) / plan.time.total_seconds for parts in _COLUMNS.values()]
        for plan in plans
    ]
    for place, name in enumerate(_COLUMNS):
        yield f"{name} %", [f"{100 * row[place]:.0f}" for row in shares]
    yield "other %", [f"{100 * max(0.0, 1 - sum(row)):.0f}" for row in shares]
    yield "memory", [format_bytes(plan.fit.needed_bytes) for plan in plans]
    yield "OOM", [f"{plan.fit.chance_of_running_out:.1%}" for plan in plans]


def time_parts(plan: Plan) -> list[tuple[str, float]]:
    """(name for people, seconds) of the parts of a step, the longest first."""
    parts = sorted(plan.time.parts.items(), key=lambda item: -item[1])
    return [(_PART_NAMES.get(name, name), seconds) for name, seconds in parts if seconds > 0]


def best_in_full(plan: Plan) -> RenderableType:
    """Time and memory of one plan, part by part."""
    time = Table(title="Step", title_justify="left", box=None, pad_edge=False, show_header=False)
    total = plan.time.total_seconds
    for name, seconds in time_parts(plan):
        time.add_row(name, format_seconds(seconds), f"{seconds / total:.0%}", _bar(seconds / total))
    time.add_row("all", format_seconds(total), "", "", style="bold")
    worst = plan.memory.worst
    memory = Table(
        title=f"Memory of the fullest rank, of pipeline stage {worst.stage}",
        title_justify="left",
        box=None,
        pad_edge=False,
        show_header=False,
    )
    limit = plan.fit.limit_bytes
    for name, size in sorted(worst.parts.items(), key=lambda item: -item[1]):
        if size > 0:
            memory.add_row(name.replace("_", " "), format_bytes(size), f"{size / limit:.0%}", _bar(size / limit))
    memory.add_row("tensors", format_bytes(worst.tensors_bytes), f"{worst.tensors_bytes / limit:.0%}", "", style="bold")
    for name, interval in (("reserved by the allocator", worst.reserved), ("on the device", worst.device)):
        between = f"{format_bytes(interval.low)} … {format_bytes(interval.high)}"
        memory.add_row(name, format_bytes(interval.expected), f"{interval.expected / limit:.0%}", between)
    if plan.candidate.is_offloaded:
        memory.add_row(
            "in the memory of one host", format_bytes(plan.memory.fullest_host_bytes), "", "of all its ranks"
        )
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
    order = plans.best.rank_order
    if order != tuple(range(len(order))):
        shown = ", ".join(map(str, order))
        yield f"rank order: the step is that of ranks on devices {shown} (rank 0 first); list the hosts so"
    if plans.best.candidate.pp > 1:
        yield (
            "pipeline: distributed_model(model, sample=...) cuts a model by its own forward; an nn.Sequential or a "
            "hybrid.PipelineLayer needs no sample; --fix pp=1 for none"
        )
    yield f"measure first: {'; '.join(advice.measure_first)}"
    if plans.request.job.cluster.measured is not None:
        yield f"cluster: {plans.request.job.cluster.notes[-1]}"
    if plans.request.correction is not None:
        yield plans.request.correction.sentence
    yield from (f"model: {note}" for note in plans.request.job.model.notes)


def rejections(plans: Plans) -> Table:
    """Why the others are not there, by rule."""
    table = Table(title="Left out", title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("reason", no_wrap=True)
    table.add_column("layouts", justify="right")
    table.add_column("first of them", overflow="fold")
    for rejection in plans.result.rejections:
        table.add_row(rejection.rule, f"{rejection.count:,}", escape(rejection.text))
    return table
