"""Whether an optimizer can be right under a layout, and the partition that it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from hybrid.collectives import ops
from hybrid.errors import OptimizerError
from hybrid.mesh import Mesh
from hybrid.sharding.engine import ShardingEngine
from hybrid.sharding.optimizer_kind import Scope, Trial, known_scope, try_out
from hybrid.sharding.optimizer_tables import find_own_table
from hybrid.strategy import ResolvedStrategy
from hybrid.tensor.cuts import TensorCuts

__all__ = ["OptimizerFit", "OptimizerNeed", "OptimizerPlace", "check_whole", "fit_optimizer", "need_of", "refusal"]

_OTHERS = "AdamW or SGD"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFit:
    """What an optimizer needs here.

    name: of its class.
    scope: what one update depends on.
    needs_whole_parameters: whether parameters must not be cut, and they would be.
    """

    name: str
    scope: Scope
    needs_whole_parameters: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerNeed:
    """What an optimizer is.

    name: of its class.
    scope: what one update depends on.
    trial: what it did on small copies of its parameters; None of one that is known.
    """

    name: str
    scope: Scope
    trial: Trial | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPlace:
    """Where an optimizer is to work: what is cut of its parameters and state.

    world_size, pp, dp_shard, tp: degrees.
    is_cut: whether state is cut over data-parallel ranks.
    frees: whether parameters are there only while their unit computes.
    asked: the strategy's partition.
    by_parameter: whether each parameter lies whole on one rank already.
    cut_over_tp: a parameter of this optimizer that the tp ranks have a part of each; empty if there is none.
    has_strange: whether it holds parameters that no bucket has (frozen ones, those of other stages).
    """

    world_size: int
    pp: int
    dp_shard: int
    tp: int
    is_cut: bool
    frees: bool
    asked: Literal["auto", "element", "parameter"]
    by_parameter: bool
    cut_over_tp: str = ""
    has_strange: bool = False

    @classmethod
    def under(cls, resolved: ResolvedStrategy) -> OptimizerPlace:
        """As the strategy says, before the model is known."""
        return cls(
            world_size=resolved.world_size,
            pp=resolved.layout.degree("pp"),
            dp_shard=resolved.shard_size,
            tp=resolved.layout.degree("tp"),
            is_cut=resolved.zero_stage > 0 and resolved.shard_size > 1,
            frees=resolved.zero_stage == 3 and (resolved.shard_size > 1 or resolved.offload == "parameters"),
            asked=resolved.partition,
            by_parameter=resolved.partition == "parameter",
        )

    @property
    def is_spread(self) -> bool:
        """Whether no rank updates all parameters."""
        return self.is_cut or self.pp > 1


def fit_optimizer(
    optimizer: torch.optim.Optimizer,
    engine: ShardingEngine,
    *,
    mesh: Mesh,
    resolved: ResolvedStrategy,
    cuts: TensorCuts | None,
) -> OptimizerFit:
    """Find out what an optimizer needs. *Collective* for one that is not known to be element-wise.

    Raises:
        OptimizerError: it cannot be right here; the same on every rank.
    """
    need = need_of(optimizer, device=engine.device)
    if need.scope is Scope.ELEMENT:
        return OptimizerFit(name=need.name, scope=need.scope, needs_whole_parameters=False)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    place = replace(
        OptimizerPlace.under(resolved),
        by_parameter=engine.partition_kind == "parameter",
        cut_over_tp=_cut_over_tp(parameters, engine, cuts),
        has_strange=any(engine.fqn_of.get(id(parameter)) not in engine.bucket_of for parameter in parameters),
    )
    problem = refusal(optimizer, need, place)
    # Stages hold other parameters, of which only some may be cut: one answer for all.
    everyone = ops.all_gather_object(problem, group=mesh.world)
    if any(everyone):
        raise OptimizerError(problem or next(other for other in everyone if other))
    needs_whole = engine.settings.zero_stage > 0 and not place.frees
    return OptimizerFit(name=need.name, scope=need.scope, needs_whole_parameters=needs_whole)


def need_of(optimizer: torch.optim.Optimizer, *, device: torch.device) -> OptimizerNeed:
    """What its class says or, where that is not known, what it does on small copies of its parameters.

    Raises:
        OptimizerError: it can be used nowhere.
    """
    name = type(optimizer).__name__
    _check_form(optimizer, name)
    scope = known_scope(optimizer)
    if scope is not None:
        return OptimizerNeed(name=name, scope=scope, trial=None)
    trial = try_out(optimizer, device=device)
    return OptimizerNeed(name=name, scope=Scope.ALL if trial.couples else Scope.PARAMETER, trial=trial)


def refusal(optimizer: torch.optim.Optimizer, need: OptimizerNeed, place: OptimizerPlace) -> str:
    """Why it cannot be right in its place, and the way out; empty if it can."""
    if need.scope is Scope.ELEMENT:
        return ""
    return (
        _problem_of_table(optimizer, need, place)
        or _problem_of_trial(need, place)
        or _problem_of_spread(need, place)
        or _problem_of_cuts(need.name, place.cut_over_tp, tp=place.tp)
        or _problem_of_partition(need.name, place)
    )


def check_whole(
    name: str, parameters: list[torch.nn.Parameter], engine: ShardingEngine, cuts: TensorCuts | None, mesh: Mesh
) -> None:
    """Raises OptimizerError: one of these is cut over tp, for an optimizer that needs it whole."""
    problem = _problem_of_cuts(name, _cut_over_tp(parameters, engine, cuts), tp=mesh.degree("tp"))
    if problem:
        raise OptimizerError(problem)


def _cut_over_tp(parameters: list[torch.nn.Parameter], engine: ShardingEngine, cuts: TensorCuts | None) -> str:
    fqns = (engine.fqn_of.get(id(parameter)) for parameter in parameters)
    return next((fqn for fqn in fqns if fqn in engine.bucket_of and cuts is not None and cuts.own(fqn)), None) or ""


def _check_form(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raises OptimizerError: what its class or its instance says already."""
    inner = next((key for key, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)), None)
    if inner is not None:
        raise OptimizerError(
            f"{name} holds another optimizer in .{inner}, whose state would be neither cut nor saved: give "
            f"distributed_optimizer that {type(getattr(optimizer, inner)).__name__} alone, and do by hand in the loop "
            f"what {name} adds"
        )
    if "step" in vars(optimizer):
        raise OptimizerError(
            f"the step of this {name} was replaced on the object (by a wrapper, or by torch.compile), and would go "
            "past the shards: wrap the optimizer as its class made it"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise OptimizerError(
            f"{name} needs sparse gradients, and gradients that are summed over the ranks are dense: set sparse=False "
            f"in the embeddings, and use {_OTHERS}"
        )
    values = (value for held in optimizer.state.values() if isinstance(held, dict) for value in held.values())
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in values):
        raise OptimizerError(
            f"{name} made its state when it was built, from parameters on the meta device, so that it has no values: "
            "build it after distributed_model"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerError(
            f"{name} has differentiable = True: the graph of a step would end at this rank's slices; leave it out, or "
            "run the differentiable step on a plain model"
        )


def _problem_of_table(optimizer: torch.optim.Optimizer, need: OptimizerNeed, place: OptimizerPlace) -> str:
    """Of an optimizer that is not known, and keeps something for each parameter outside its state."""
    table = find_own_table(optimizer) if need.trial is not None else None
    if table is None:
        return ""
    what = f"{need.name} keeps something for each parameter in .{table.attribute}, beside its state"
    instead = f"; let it keep that in self.state[p], for each p of its groups, or use {_OTHERS}"
    if not table.by_place:
        return (
            f"{what}: while it steps its groups hold slices of the parameters, which are not in there, and what is "
            f"there would be neither cut nor saved{instead}"
        )
    if place.is_spread or place.has_strange:
        return (
            f"{what}, by its place: while it steps its groups hold only the parameters that this rank updates, without "
            f"frozen ones, so that the places would be others{instead}"
        )
    return ""


def _problem_of_trial(need: OptimizerNeed, place: OptimizerPlace) -> str:
    name, trial = need.name, need.trial or Trial()
    if trial.draws and place.world_size > 1:
        return (
            f"the step of {name} draws random numbers, and each rank would draw others, so that the copies of a weight "
            f"part; use {_OTHERS}, or one process"
        )
    if trial.sends and place.world_size > 1:
        return (
            f"the step of {name} talks to the other ranks by itself ({trial.sends}), as if each of them had every "
            "parameter; use its version for one process: hybrid shares the work out"
        )
    if trial.error and place.is_spread and place.asked != "parameter":
        return (
            f"{name} is not known here, and could not be tried on small copies of its parameters ({trial.error}). If "
            "its update of each parameter depends on that parameter alone, say so: sharding_configs['partition'] = "
            f"'parameter'; else use stage 0 without a pipeline, or {_OTHERS}"
        )
    return ""


def _problem_of_spread(need: OptimizerNeed, place: OptimizerPlace) -> str:
    """Of an optimizer that must see all parameters at once."""
    if need.scope is not Scope.ALL:
        return ""
    if place.pp > 1:
        return (
            f"{need.name} updates each parameter by all of them together, and each of the {place.pp} pipeline "
            f"stages has its own: use pipeline_configs.degree = 1 with stage 0, or {_OTHERS}"
        )
    if place.is_cut:
        return (
            f"{need.name} updates each parameter by all of them together (a step or a norm over the whole model), and "
            f"they are cut over {place.dp_shard} ranks: use sharding_configs.stage = 0 or shard_size = 1, or "
            f"{_OTHERS}. If it only clips by a global norm, switch that off and set strategy.gradient_clipping"
        )
    return ""


def _problem_of_cuts(name: str, cut: str, *, tp: int) -> str:
    if not cut:
        return ""
    return (
        f"{name} is not known to update each element by itself, and {cut!r} is cut over {tp} tensor-parallel ranks, so "
        f"no rank has it whole: use {_OTHERS} (also for the cut parameters alone, in a second optimizer), or "
        "tensor_parallel_configs.degree = 1"
    )


def _problem_of_partition(name: str, place: OptimizerPlace) -> str:
    if not place.is_cut or place.by_parameter:
        return ""
    if place.asked == "element":
        return (
            f"{name} is not known to update each element by itself, so it cannot step on slices that cut "
            "through a parameter: set sharding_configs['partition'] = 'parameter' (or 'auto')"
        )
    if place.frees:
        return (
            f"{name} is not known to update each element by itself, so at stage 3 it needs "
            f"sharding_configs['partition'] = 'parameter' from the start; or use {_OTHERS}"
        )
    return ""
