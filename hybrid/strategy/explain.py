"""Every value of a strategy with where it came from, as rows; as a plain text table; as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from hybrid.contracts.layout import AXES, Layout
from hybrid.contracts.schedule_choice import schedule_name
from hybrid.errors import ModelError, StrategyError
from hybrid.strategy.choice import Choice
from hybrid.strategy.effects import LOSS_SCALING
from hybrid.strategy.gather import FLAGS
from hybrid.strategy.live_model import Model
from hybrid.strategy.model_table import ModelTable, model_table
from hybrid.strategy.resolve import WorkedOut, work_out
from hybrid.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hybrid.strategy.strategy import DistributedStrategy

__all__ = ["Explanation", "Row", "explanation"]

_SECTIONS: dict[str, tuple[str, ...]] = {
    "layout": ("pp", "dp_replicate", "shard_size", "cp", "tp", "order"),
    "sharding": (
        "zero_stage",
        "bucket_bytes",
        "overlap_comm",
        "overlap_param_gather",
        "grad_reduce",
        "grad_dtype",
        "reduce_dtype",
        "partition",
        "units",
        "prefetch",
        "reshard_after",
        "offload",
    ),
    "batch": ("micro_batch_size", "accumulate_steps", "global_batch_size", "loss_reduction"),
    "clipping": ("max_norm", "norm_type", "clip_value"),
    "run": ("seed", "timeout_seconds"),
}
# Details of features: shown when the feature is on.
_DETAILS = {
    "amp": (
        "amp_dtype",
        "amp_level",
        "amp_custom_fp32",
        "amp_buffer_dtype",
        "amp_init_loss_scaling",
        "amp_growth_interval",
        "amp_growth_factor",
        "amp_backoff_factor",
    ),
    "recompute": ("recompute_units", "recompute_policy", "recompute_preserve_rng"),
    "compile": ("compile_units", "compile_backend", "compile_mode", "compile_dynamic", "compile_fullgraph"),
    "profile": ("profile_steps", "profile_warmup", "profile_directory"),
    "tensor_parallel": ("sequence_parallel", "tensor_plan", "tensor_verify"),
    "pipeline": ("schedule", "virtual_stages", "split", "memory_limit_bytes"),
}
_NAMES = {"shard_size": "dp_shard (shard_size)", "order": "order (outer to inner)"}
_MOST_GROUPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting: its section, name, value as text, and origin."""

    section: str
    setting: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All rows, the rank groups of each axis, what else there is to say, and what becomes of a model."""

    world_size: int | None
    rows: tuple[Row, ...]
    groups: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    model: ModelTable | None = None

    def to_text(self) -> str:
        head = "strategy" + (f" on {self.world_size} processes" if self.world_size is not None else "")
        if self.world_size is None:
            head += " (give world_size to see degrees, rank groups and batch sizes)"
        widths = [max(len(cell) for cell in column) for column in zip(*map(_cells, self.rows), strict=True)]
        lines = [head]
        section = ""
        for row in self.rows:
            if row.section != section:
                section = row.section
                lines.append(f"\n{section}")
            name, value, origin = _cells(row)
            lines.append(f"  {name.ljust(widths[0])}  {value.ljust(widths[1])}  {origin}".rstrip())
        if self.groups:
            lines.append("\nrank groups")
            width = max(len(name) for name, _ in self.groups)
            lines.extend(f"  {name.ljust(width)}  {text}" for name, text in self.groups)
        if self.notes:
            lines.append("\nnotes")
            lines.extend(f"  - {note}" for note in self.notes)
        if self.model is not None:
            lines.append(f"\n{self.model.to_text()}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        model = {} if self.model is None else {"model": self.model.to_dict()}
        return model | {
            "world_size": self.world_size,
            "settings": [asdict(row) for row in self.rows],
            "groups": dict(self.groups),
            "notes": list(self.notes),
        }


def explanation(
    strategy: DistributedStrategy,
    world_size: int | None = None,
    *,
    model: Model | None = None,
    sample: Any = None,
    note: str = "",
) -> Explanation:
    """The table of a strategy, and of a model under it; `note` is shown with the model.

    `sample` is an input of the model, on which the flops of the stages of a pipeline are counted.

    Raises:
        StrategyError: all problems, those of the model among them; a table of values that cannot run would mislead.
        ModelError: nothing is wrong with the strategy, but this model cannot be trained under it.
    """
    result = work_out(strategy, world_size)
    problems = list(result.problems)
    table = None
    if model is not None:
        try:
            table = model_table(model, result, note=note, sample=sample)
        except (StrategyError, ModelError) as error:
            if not problems:
                raise
            more = error.problems if isinstance(error, StrategyError) else [str(error)]
            problems += [problem for problem in more if problem not in problems]
    if problems:
        raise StrategyError(problems)
    return Explanation(
        world_size=result.world_size,
        rows=tuple(rows(result)),
        groups=tuple(_groups(result.layout)) if result.layout is not None else (),
        notes=result.remarks,
        model=table,
    )


def _cells(row: Row) -> tuple[str, str, str]:
    return row.setting, row.value, row.origin


def rows(result: WorkedOut) -> Iterator[Row]:
    for flag in FLAGS:
        choice = result.features[flag]
        yield Row(section="features", setting=flag, value="on" if choice.value else "off", origin=_origin(choice))
        if choice.value:
            for name in _DETAILS.get(flag, ()):
                yield _row("features", f"  {name}", name, result)
    for section, names in _SECTIONS.items():
        for name in names:
            yield _row(section, _NAMES.get(name, name), name, result)
        if section == "layout" and result.data_parallel_size is not None:
            yield Row(
                section=section,
                setting="data-parallel size",
                value=str(result.data_parallel_size),
                origin="derived: dp_replicate × dp_shard",
            )
    for path, value, note in result.gathered.fleet:
        yield Row(section="Fleet's fields", setting=path, value=_plain(value), origin=f"user: {note}")


def _row(section: str, title: str, name: str, result: WorkedOut) -> Row:
    choice = result.choices[name]
    return Row(section=section, setting=title, value=_value(name, choice, result.choices), origin=_origin(choice))


def _origin(choice: Choice) -> str:
    if choice.origin == "user":
        return f"user: {choice.where}"
    if choice.origin == "derived":
        return f"derived: {choice.why}"
    return f"default ({choice.why})" if choice.why else "default"


_OPEN = {
    "pp": "1",
    "cp": "1",
    "tp": "1",
    "dp_replicate": "follows from the world size",
    "shard_size": "all data-parallel ranks",
    "order": ", ".join(AXES),
    "micro_batch_size": "as the batches given",
    "global_batch_size": "as the batches given",
    "accumulate_steps": "follows from the world size",
    "units": "repeated blocks of the model",
    "recompute_units": "repeated blocks of the model",
    "compile_units": "repeated blocks of the model",
    "compile_mode": "default",
    "compile_dynamic": "what has been seen to change",
    "max_norm": "off",
    "clip_value": "off",
    "seed": "not set",
    "tensor_plan": "the model's own, or that of its family",
    "split": "balanced by cost",
    "memory_limit_bytes": "what the device has",
}


def _value(name: str, choice: Choice, choices: Mapping[str, Choice]) -> str:
    value = choice.value
    if name == "shard_size" and choices["zero_stage"].value == 0:
        return "1"
    if name in {"dp_replicate", "shard_size", "pp", "tp", "cp"} and value == -1:
        return "follows from the world size"
    if name in {"units", "prefetch", "reshard_after"} and choices["zero_stage"].value < 3:
        return "not used before stage 3"
    if name == "overlap_param_gather" and choices["zero_stage"].value == 3:
        return "not used at stage 3"
    if name in LOSS_SCALING and choices["amp_dtype"].value != "float16":
        return f"not used with {choices['amp_dtype'].value}"
    if name == "amp_buffer_dtype" and value == "float32":
        return "as the model"
    if name in {"recompute_units", "compile_units"} and value is None and choices["units"].value is not None:
        return "as units of sharding"
    if value is None:
        return _OPEN.get(name, "none")
    if name in {"bucket_bytes", "memory_limit_bytes"}:
        return f"{value} ({format_bytes(value)})"
    if name == "timeout_seconds":
        return f"{value:g} ({format_seconds(value)})"
    if name == "schedule":
        return schedule_name(value)
    if name == "partition" and value == "auto":
        return "by the optimizer"
    if name == "norm_type" and choices["max_norm"].value is None:
        return f"{value:g} (if clipping by norm)"
    return _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return "; ".join(f"{key}: {item}" for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _groups(layout: Layout) -> Iterator[tuple[str, str]]:
    """The groups of each axis above 1, and of data parallel as a whole where it has two axes."""
    wanted: list[tuple[str, ...]] = [(axis.name,) for axis in layout.axes if axis.size > 1]
    wanted += [
        pair
        for pair in combinations(layout.axis_names, 2)
        if set(pair) == {"dp_replicate", "dp_shard"} and all(layout.degree(axis) > 1 for axis in pair)
    ]
    for axes in wanted:
        groups = layout.groups(axes)
        shown = " ".join(_ranks(group) for group in groups[:_MOST_GROUPS])
        more = f" … ({len(groups)} groups)" if len(groups) > _MOST_GROUPS else ""
        yield " × ".join(axes), shown + more


def _ranks(group: tuple[int, ...]) -> str:
    """`(0 1 2 3)`, or with a stride where that is shorter: `(0 4 … 60)`."""
    if len(group) <= _MOST_GROUPS:
        return f"({' '.join(map(str, group))})"
    return f"({group[0]} {group[1]} {group[2]} … {group[-1]}: {len(group)} ranks)"
