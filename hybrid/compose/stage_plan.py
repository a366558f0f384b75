"""How a pipeline cuts a model, decided before anything starts, on each rank alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from hybrid.compose.memory_limits import limits_of
from hybrid.compose.own_forward import plan_own
from hybrid.compose.stage_memory import Measured, balance, check_can_be_held, measure_layers
from hybrid.contracts.schedule import Schedule
from hybrid.contracts.stage_memory import StageBytes
from hybrid.contracts.stage_split import split_by_costs, split_by_counts, split_by_marks, split_by_names, split_evenly
from hybrid.errors import StrategyError
from hybrid.pipeline.costs import layer_costs, parameter_costs
from hybrid.pipeline.layers import PipelineLayer, is_chain
from hybrid.pipeline.plan import OwnForwardPlan, as_inputs
from hybrid.pipeline.root_hooks import around_units, check_backward_hooks, check_backward_hooks_around
from hybrid.strategy import ResolvedStrategy

__all__ = [
    "PlannedStages",
    "all_on_meta",
    "build_layers",
    "layers_by_name",
    "measure_chain",
    "plan_own_stages",
    "plan_stages",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStages:
    """Which layers each chunk has, and the order of work.

    Args:
        chunks: layers of a chain, or calls of units.
        schedule: each rank's actions.
        own_forward: how the model is cut, if it is by its own forward.
        memory: what each stage needs, where that is known.
    """

    chunks: tuple[range, ...]
    schedule: Schedule
    own_forward: OwnForwardPlan | None = None
    memory: tuple[StageBytes, ...] = ()


_SPLIT = "pipeline_configs.split"
_NO_SAMPLE = "{} says which layers each chunk has, so a sample would do nothing: leave it out, or split by 'auto'"


def plan_stages(
    model: nn.Module,
    resolved: ResolvedStrategy,
    *,
    sample: Any = None,
    is_here: bool = True,
    weighs_memory: bool = True,
) -> PlannedStages | None:
    """Cut the model's layers into chunks; None without a pipeline.

    Args:
        sample: an input of the first layer: the layers' flops and memory are measured on it, without computing
            anything. A model that is no chain of layers is called with it.
        is_here: whether it will run on this machine, whose memory is the limit if the strategy has none.
        weighs_memory: False: by time alone, since nothing but `pipeline` is known of the strategy.

    Raises:
        ModelError: no sample of a model that is no chain of layers; one whose forward cannot be followed.
        StrategyError: more chunks than layers, counts that do not add up, a schedule that cannot run; no split that
            fits the memory.
    """
    settings = resolved.pipeline
    if settings is None:
        return None
    check_backward_hooks(model)
    num_chunks = settings.num_chunks
    schedule = settings.order(resolved.accumulate_steps)
    if isinstance(model, PipelineLayer):
        if settings.split is not None:
            raise StrategyError(
                f"pipeline_configs.split = {settings.split!r} with a PipelineLayer, which has its own seg_method = "
                f"{model.seg_method!r}: leave one of them out"
            )
        if model.seg_method != "auto":
            if sample is not None:
                raise StrategyError(_NO_SAMPLE.format(f"seg_method = {model.seg_method!r}"))
            if settings.memory_limit_bytes is not None:
                raise StrategyError(
                    f"pipeline_configs.memory_limit_bytes = {settings.memory_limit_bytes} is kept where layers are "
                    f"balanced, and seg_method = {model.seg_method!r} says which each chunk has: leave one of them out"
                )
            return PlannedStages(chunks=model.segments(num_chunks), schedule=schedule)
        try:
            whole = all_on_meta(model)
        except Exception as error:  # a constructor that cannot run there: numbers of parameters, from what can be built
            check_can_be_held(Measured(memory=None, note=str(error)), settings)
            return PlannedStages(chunks=model.segments(num_chunks), schedule=schedule)
        return _balanced(model, whole, resolved, schedule, sample, is_here, weighs_memory)
    if not is_chain(model):
        own = plan_own_stages(model, resolved, sample=sample, is_here=is_here, weighs_memory=weighs_memory)
        check_backward_hooks_around(around_units(model, own.units))
        memory = () if own.memory is None else own.memory.of_stages(own.chunks)
        return PlannedStages(chunks=own.chunks, schedule=schedule, own_forward=own, memory=memory)
    layers = list(layers_by_name(model).values())
    split = settings.split
    if sample is not None and split not in {None, "auto"}:
        raise StrategyError(_NO_SAMPLE.format(f"pipeline_configs.split = {split!r}"))
    if split is None or split == "auto":
        return _balanced(model, model, resolved, schedule, sample, is_here, weighs_memory)
    if split == "uniform":
        chunks = split_evenly(len(layers), num_chunks)
    elif not isinstance(split, str) and isinstance(split[0], str):
        chunks = split_by_names(list(map(str, split)), list(layers_by_name(model)), num_chunks, setting=_SPLIT)
    elif isinstance(split, str):
        names = [type(layer).__name__ for layer in layers]
        chunks = split_by_marks(names, split.removeprefix("layer:"), num_chunks, setting=_SPLIT)
    else:
        chunks = split_by_counts([int(count) for count in split], len(layers), num_chunks, setting=_SPLIT)
    return PlannedStages(chunks=tuple(chunks), schedule=schedule)


def _balanced(
    model: nn.Module,
    whole: nn.Module,
    resolved: ResolvedStrategy,
    schedule: Schedule,
    sample: Any,
    is_here: bool,
    weighs_memory: bool,
) -> PlannedStages:
    """A chain whose chunks are as cheap as they can be, and fit."""
    costs = _costs(model, list(layers_by_name(whole).values()), sample)
    measured = Measured(memory=None)
    if weighs_memory:
        measured = measure_chain(whole, resolved, sample)
        check_can_be_held(measured, resolved.pipeline)
    if measured.memory is None:
        return PlannedStages(chunks=split_by_costs(costs, schedule.num_chunks), schedule=schedule)
    found = balance(costs, measured, resolved, limits_of(resolved, is_here=is_here))
    return PlannedStages(chunks=found.chunks, schedule=schedule, memory=found.stages)


def measure_chain(whole: nn.Module, resolved: ResolvedStrategy, sample: Any) -> Measured:
    """What each layer of a chain needs that has all of them, on an input of the first one."""
    names = list(layers_by_name(whole))
    return measure_layers(
        whole,
        resolved,
        inputs=None if sample is None else ((sample,), {}),
        units=names,
        others=[()] * len(names),
        calls=names,
        is_chain=True,
    )


def plan_own_stages(
    model: nn.Module,
    resolved: ResolvedStrategy,
    *,
    sample: Any,
    is_here: bool = True,
    weighs_memory: bool = True,
    measures: bool = False,
) -> OwnForwardPlan:
    """A model that is cut by its own forward.

    Args:
        is_here, weighs_memory: as `plan_stages` has them.
        measures: also of a split that was given it is to be known what each call needs.

    Raises:
        ModelError, StrategyError: as `plan_stages` does.
    """
    settings = resolved.pipeline
    assert settings is not None
    is_balanced = settings.split in {None, "auto"}

    def balanced(plan: OwnForwardPlan) -> OwnForwardPlan:
        measured = _measure_own(model, plan, resolved, sample)
        check_can_be_held(measured, settings)
        if measured.memory is None or not is_balanced:
            return replace(plan, memory=measured.memory)
        found = balance(plan.costs.weights, measured, resolved, limits_of(resolved, is_here=is_here))
        return replace(plan, memory=measured.memory, chunks=found.chunks)

    return plan_own(
        model,
        settings,
        sample=sample,
        balance=balanced if weighs_memory and (is_balanced or measures) else None,
        balanced_for=repr((resolved, is_here)),
    )


def _measure_own(model: nn.Module, plan: OwnForwardPlan, resolved: ResolvedStrategy, sample: Any) -> Measured:
    flow = plan.flow
    others = [sorted(call.parameters) for call in flow.calls]
    others[-1] = sorted({*others[-1], *flow.output_parameters})
    return measure_layers(
        model,
        resolved,
        inputs=as_inputs(sample),
        units=plan.units,
        others=others,
        calls=[call.unit for call in flow.calls],
        is_chain=False,
    )


def layers_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> layer, one that is used twice under both of its names."""
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if name and "." not in name}


def _costs(model: nn.Module, layers: Sequence[nn.Module], sample: Any) -> Sequence[float]:
    if sample is not None:
        return layer_costs(cast(nn.Sequential, model), sample).weights
    return parameter_costs(model, layers)


def build_layers(model: nn.Module, planned: PlannedStages | None) -> bool:
    """Build a PipelineLayer that nothing is to be cut from; whether the model has all its layers now."""
    if not isinstance(model, PipelineLayer):
        return True
    if planned is None:
        model.build()
    return model.is_built


def all_on_meta(model: nn.Module) -> nn.Module:
    """All layers of a PipelineLayer of which nothing is built, without memory: for what must know the whole model."""
    return copy.deepcopy(model).build(device="meta") if isinstance(model, PipelineLayer) else model
