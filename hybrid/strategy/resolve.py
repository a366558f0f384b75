"""Work a strategy out for a world size: solve, check everything, collect every problem.

The order of the passes is the order in which their problems are reported:

    gather     one value per setting, from all places         -> contradictions
    features   flags and sections                             -> sections without their flag
    effects    settings that would do nothing                 -> refused by name
    degrees    the world equation                             -> layout
    batch      the batch equation
    available  what this version cannot do yet
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hybrid.contracts.layout import Axis, Layout
from hybrid.contracts.schedule import usual_virtual_stages
from hybrid.contracts.schedule_choice import choose_schedule
from hybrid.errors import StrategyError
from hybrid.strategy.availability import not_available
from hybrid.strategy.axis_order import read_order
from hybrid.strategy.batch import solve_batch
from hybrid.strategy.choice import Choice
from hybrid.strategy.degrees import solve_degrees
from hybrid.strategy.effects import check_clipping, check_effects
from hybrid.strategy.features import find_features, settle_stage
from hybrid.strategy.gather import Gathered, gather
from hybrid.strategy.resolved import (
    AmpSettings,
    CompileSettings,
    GradientClipping,
    PipelineSettings,
    ProfileSettings,
    RecomputeSettings,
    ResolvedStrategy,
    TensorParallelSettings,
)
from hybrid.strategy.values import whole

if TYPE_CHECKING:
    from hybrid.strategy.strategy import DistributedStrategy

__all__ = [
    "WorkedOut",
    "amp_settings",
    "compile_settings",
    "recompute_settings",
    "resolve",
    "resolved_from",
    "work_out",
]

_DEGREE_SETTINGS = frozenset({"pp", "dp_replicate", "shard_size", "cp", "tp", "zero_stage"})
_BATCH_SETTINGS = frozenset({"micro_batch_size", "accumulate_steps", "global_batch_size"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkedOut:
    """All that is known about a strategy; `layout` is None without a world size or with a wrong product."""

    world_size: int | None
    choices: Mapping[str, Choice]
    features: Mapping[str, Choice]
    layout: Layout | None
    gathered: Gathered
    problems: tuple[str, ...]
    remarks: tuple[str, ...]
    """What was decided for the user beyond single values."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The remarks, and what became of each of Fleet's fields."""
        fleet = (f"{path} = {value!r}: {note}" for path, value, note in self.gathered.fleet)
        return (*self.remarks, *fleet)

    @property
    def data_parallel_size(self) -> int | None:
        if self.layout is None:
            return None
        return self.layout.degree("dp_replicate") * self.layout.degree("dp_shard")


def work_out(strategy: DistributedStrategy, world_size: int | None) -> WorkedOut:
    """Solve and check as far as possible; without a world size the two equations stay open."""
    found = gather(strategy)
    features = find_features(strategy, found)
    choices = found.choices
    choices["zero_stage"] = settle_stage(strategy, features, found)
    order, order_problems = read_order(choices["order"], choices)
    found.problems.extend(order_problems)
    choices["grad_reduce"] = _settle_grad_reduce(choices)
    choices["virtual_stages"] = _settle_virtual_stages(choices)

    layout: Layout | None = None
    data_parallel_size: int | None = None
    if world_size is not None:
        world_size = _read_world_size(world_size, found)
    if world_size is not None and not _DEGREE_SETTINGS & found.contested:
        degrees = solve_degrees(choices, world_size)
        found.problems.extend(degrees.problems)
        choices.update(degrees.choices)
        data_parallel_size = degrees.data_parallel_size  # known even where shard_size does not fit
        if degrees.by_axis is not None:
            layout = Layout(tuple(Axis(name=axis, size=degrees.by_axis[axis]) for axis in order))
    if data_parallel_size is not None and not _BATCH_SETTINGS & found.contested:
        batch = solve_batch(choices, data_parallel_size)
        found.problems.extend(batch.problems)
        choices.update(batch.choices)
    elif choices["accumulate_steps"].value is None and choices["global_batch_size"].value is None:
        choices["accumulate_steps"] = replace(choices["accumulate_steps"], value=1)

    found.problems.extend(check_effects(choices))
    found.problems.extend(_schedule_problems(choices, layout))
    found.problems.extend(check_clipping(strategy))
    found.problems.extend(not_available(choices))
    return WorkedOut(
        world_size=world_size,
        choices=choices,
        features=features,
        layout=layout,
        gathered=found,
        problems=tuple(dict.fromkeys(found.problems)),
        remarks=tuple(_remarks(found, choices, layout)),
    )


def resolve(strategy: DistributedStrategy, world_size: int) -> ResolvedStrategy:
    """The strategy for this world size, or one `StrategyError` with all problems."""
    result = work_out(strategy, world_size)
    if result.problems:
        raise StrategyError(result.problems)
    return resolved_from(result, clipping=_clipping(strategy))


def resolved_from(result: WorkedOut, *, clipping: GradientClipping | None) -> ResolvedStrategy:
    """Of a strategy that is worked out without a problem, for a world size."""
    layout, data_parallel_size = result.layout, result.data_parallel_size
    assert layout is not None and data_parallel_size is not None  # without a problem there is a layout
    value = {name: choice.value for name, choice in result.choices.items()}
    return ResolvedStrategy(
        world_size=layout.world_size,
        layout=layout,
        data_parallel_size=data_parallel_size,
        zero_stage=value["zero_stage"],
        shard_size=layout.degree("dp_shard"),
        bucket_bytes=value["bucket_bytes"],
        overlap_comm=value["overlap_comm"],
        overlap_param_gather=value["overlap_param_gather"],
        grad_reduce=value["grad_reduce"],
        grad_dtype=value["grad_dtype"],
        reduce_dtype=value["reduce_dtype"],
        partition=value["partition"],
        units=value["units"],
        prefetch=value["prefetch"],
        reshard_after=value["reshard_after"],
        offload=value["offload"],
        micro_batch_size=value["micro_batch_size"],
        accumulate_steps=value["accumulate_steps"],
        global_batch_size=value["global_batch_size"],
        gradient_clipping=clipping,
        loss_reduction=value["loss_reduction"],
        amp=amp_settings(value),
        recompute=recompute_settings(value),
        tensor_parallel=tensor_settings(value, degree=layout.degree("tp")),
        pipeline=pipeline_settings(value, degree=layout.degree("pp")),
        compile=compile_settings(value),
        profile=profile_settings(value),
        seed=value["seed"],
        timeout_seconds=value["timeout_seconds"],
        notes=result.notes,
    )


def _read_world_size(world_size: object, found: Gathered) -> int | None:
    try:
        return whole(1)(world_size)
    except ValueError as error:
        found.problems.append(f"world_size = {world_size!r}: {error}")
        return None


def _settle_grad_reduce(choices: Mapping[str, Choice]) -> Choice:
    """`auto` decided: stages 2 and 3 keep no whole gradients, so they reduce every micro-batch."""
    choice, stage = choices["grad_reduce"], choices["zero_stage"].value
    if choice.value != "auto":
        return choice
    asked = f" ({choice.where} = 'auto')" if choice.given else ""
    value = "every_micro_batch" if stage >= 2 else "last_micro_batch"
    return replace(choice, value=value, origin="derived", why=f"zero_stage {stage}{asked}")


def _settle_virtual_stages(choices: Mapping[str, Choice]) -> Choice:
    """Of a schedule that has them fixed."""
    choice, schedule = choices["virtual_stages"], choices["schedule"]
    usual = usual_virtual_stages(schedule.value)
    if choice.given or choice.value == usual:
        return choice
    return replace(choice, value=usual, origin="derived", why=f"schedule {schedule.value!r}")


def _clipping(strategy: DistributedStrategy) -> GradientClipping | None:
    given = strategy.gradient_clipping
    if given is None:
        return None
    if given.max_norm is not None:
        return GradientClipping(kind="norm", max_norm=given.max_norm, norm_type=given.norm_type)
    return GradientClipping(kind="value", clip_value=given.clip_value)


def amp_settings(value: Mapping[str, Any]) -> AmpSettings | None:
    """Mixed precision out of the values of all settings; None while it is off."""
    if not value["amp"]:
        return None
    return AmpSettings(
        dtype=value["amp_dtype"],
        level=value["amp_level"],
        custom_fp32=tuple(value["amp_custom_fp32"] or ()),
        buffer_dtype=value["amp_buffer_dtype"],
        init_loss_scaling=value["amp_init_loss_scaling"],
        growth_interval=value["amp_growth_interval"],
        growth_factor=value["amp_growth_factor"],
        backoff_factor=value["amp_backoff_factor"],
    )


def recompute_settings(value: Mapping[str, Any]) -> RecomputeSettings | None:
    """Recompute out of the values of all settings; None while it is off."""
    if not value["recompute"]:
        return None
    units = value["recompute_units"]
    return RecomputeSettings(
        units=None if units is None else tuple(units),
        policy=value["recompute_policy"],
        preserve_rng=value["recompute_preserve_rng"],
    )


def compile_settings(value: Mapping[str, Any]) -> CompileSettings | None:
    """Compilation out of the values of all settings; None while it is off."""
    if not value["compile"]:
        return None
    units = value["compile_units"]
    return CompileSettings(
        units=None if units is None else tuple(units),
        backend=value["compile_backend"],
        mode=value["compile_mode"],
        dynamic=value["compile_dynamic"],
        fullgraph=value["compile_fullgraph"],
    )


def profile_settings(value: Mapping[str, Any]) -> ProfileSettings | None:
    """Profiling out of the values of all settings; None while it is off."""
    if not value["profile"]:
        return None
    return ProfileSettings(
        steps=value["profile_steps"], warmup=value["profile_warmup"], directory=value["profile_directory"]
    )


def tensor_settings(value: Mapping[str, Any], *, degree: int) -> TensorParallelSettings | None:
    """Tensor parallel out of the values of all settings; None at degree 1."""
    if degree == 1:
        return None
    return TensorParallelSettings(
        degree=degree,
        sequence_parallel=value["sequence_parallel"],
        plan=value["tensor_plan"],
        verify=value["tensor_verify"],
    )


def pipeline_settings(value: Mapping[str, Any], *, degree: int) -> PipelineSettings | None:
    """The pipeline out of the values of all settings; None at degree 1."""
    if degree == 1:
        return None
    return PipelineSettings(
        degree=degree,
        schedule=value["schedule"],
        virtual_stages=value["virtual_stages"],
        split=value["split"],
        memory_limit_bytes=value["memory_limit_bytes"],
    )


def _schedule_problems(choices: Mapping[str, Choice], layout: Layout | None) -> list[str]:
    """What speaks against the schedule with these sizes, before anything starts."""
    steps = choices["accumulate_steps"].value
    if layout is None or layout.degree("pp") == 1 or steps is None:
        return []
    try:
        schedule = choose_schedule(
            choices["schedule"].value,
            num_stages=layout.degree("pp"),
            num_micro_batches=steps,
            virtual_stages=choices["virtual_stages"].value,
        )
    except StrategyError as error:
        return [f"pipeline_configs: {text}" for text in error.problems]
    if schedule.splits_backward and choices["compile"].value:
        return [
            f"{choices['schedule'].said} splits each backward in two, and {choices['compile'].where} = True makes one "
            "program of the backward of a layer; use '1f1b' or 'interleaved', or leave compile out"
        ]
    return []


def _remarks(found: Gathered, choices: Mapping[str, Choice], layout: Layout | None) -> list[str]:
    notes = list(found.notes)
    reduce = choices["reduce_dtype"]
    scaled = choices["amp"].value and choices["amp_dtype"].value == "float16"
    if reduce.value == "float16" and not scaled:
        notes.append(
            f"{reduce.said}: gradients travel in float16 without a loss scale of the strategy's, so those below about "
            f"6e-8 become zero; bfloat16 has the range of float32"
        )
    if layout is None:
        return notes
    shard, stage = layout.degree("dp_shard"), choices["zero_stage"]
    if stage.value >= 1 and shard == 1 and layout.world_size > 1 and choices["offload"].value != "parameters":
        notes.append(f"shard_size is 1, so stage {stage.value} cuts nothing: this is plain data parallel")
    uses_fleet = any(choices[name].where.startswith("hybrid_configs") for name in ("dp_replicate", "pp"))
    both = min(layout.degree("pp"), layout.degree("dp_replicate")) > 1
    if uses_fleet and both and choices["order"].value is None:
        notes.append(
            "axes run pp, dp, sharding, sep, mp from outer to inner; Fleet's default has dp outermost: set order"
        )
    return notes
