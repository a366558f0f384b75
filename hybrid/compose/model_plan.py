"""What becomes of a model, decided before anything starts: the one place where a model is held against a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hybrid.compose.compiling import check_compiler
from hybrid.compose.first_forward import check_verify
from hybrid.compose.initial_values import InitOrder, check_meta
from hybrid.compose.model_checks import check_layouts, check_model, check_not_shared
from hybrid.compose.stage_plan import PlannedStages, all_on_meta, build_layers, plan_stages
from hybrid.compose.tensor_parallel import Planned, plan_for
from hybrid.compose.whole_checks import ChosenUnits, check_whole
from hybrid.sharding.engine import ShardingEngine
from hybrid.strategy import ResolvedStrategy

__all__ = ["ModelPlan", "plan_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """How a model is cut and what is done to its modules.

    Args:
        stages: the chunks of a pipeline; None without one.
        tensor: what is cut over the tp ranks; None if nothing is.
        units: the modules to recompute and to compile.
        is_whole: whether the model has all of its layers; a PipelineLayer in a pipeline is built later, in part.
    """

    stages: PlannedStages | None
    tensor: Planned | None
    units: ChosenUnits
    is_whole: bool


def plan_model(
    model: nn.Module,
    resolved: ResolvedStrategy,
    *,
    wrapper: type[nn.Module],
    init: InitOrder | None = None,
    sample: Any = None,
    engines: Sequence[ShardingEngine] = (),
) -> ModelPlan:
    """Decide it all, on this process alone; the model is not changed, but for a PipelineLayer, which is built.

    Args:
        wrapper: the class that a distributed model gets.
        init, sample: as `distributed_model` has them.
        engines: of the models that were wrapped before.

    Raises:
        StrategyError: settings that do not fit the model.
        ModelError: a model that cannot be trained this way; the message names the parameter or module.
    """
    stages = plan_stages(model, resolved, sample=sample)
    is_whole = build_layers(model, stages)
    whole = model if is_whole else all_on_meta(model)
    check_model(whole, wrapper=wrapper)
    check_not_shared(whole, engines)
    if is_whole:
        check_meta(model, init)
    tensor = plan_for(whole, resolved)
    check_verify(model, resolved)
    check_layouts(whole, resolved)
    units = check_whole(whole, resolved, stages)
    if resolved.compile is not None:
        check_compiler(resolved.compile)
    return ModelPlan(stages=stages, tensor=tensor, units=units, is_whole=is_whole)
