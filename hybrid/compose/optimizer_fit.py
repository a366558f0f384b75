"""Whether an optimizer can be right under a layout, and the partition that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hybrid.collectives import ops
from hybrid.errors import OptimizerError
from hybrid.mesh import Mesh
from hybrid.sharding.engine import ShardingEngine
from hybrid.sharding.optimizer_kind import Scope, Trial, known_scope, try_out
from hybrid.sharding.optimizer_tables import find_own_table
from hybrid.tensor.cuts import TensorCuts

__all__ = ["OptimizerFit", "check_whole", "fit_optimizer"]

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


def fit_optimizer(
    optimizer: torch.optim.Optimizer,
    engine: ShardingEngine,
    *,
    mesh: Mesh,
    asked: Literal["auto", "element", "parameter"],
    cuts: TensorCuts | None,
    has_stages: bool,
) -> OptimizerFit:
    """Find out what an optimizer needs. *Collective* for one that is not known to be element-wise.

    Args:
        asked: the strategy's partition.
        has_stages: whether other pipeline stages hold other parameters.

    Raises:
        OptimizerError: it cannot be right here; the same on every rank.
    """
    name = type(optimizer).__name__
    _check_form(optimizer, name)
    scope = known_scope(optimizer)
    if scope is Scope.ELEMENT:
        return OptimizerFit(name=name, scope=scope, needs_whole_parameters=False)
    is_cut = any(bucket.partition.num_shards > 1 for bucket in engine.buckets)
    trial, table = Trial(), ""
    if scope is None:
        table = _problem_of_table(optimizer, name, engine, is_spread=is_cut or has_stages)
        trial = try_out(optimizer, device=engine.device)
        scope = Scope.ALL if trial.couples else Scope.PARAMETER
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    problem = (
        table
        or _problem_of_trial(name, trial, world_size=mesh.world_size, is_spread=is_cut or has_stages, asked=asked)
        or (_problem_of_spread(name, mesh, is_cut=is_cut, has_stages=has_stages) if scope is Scope.ALL else "")
        or _problem_of_cuts(name, parameters, engine, cuts, mesh)
        or _problem_of_partition(name, engine, asked=asked, is_cut=is_cut)
    )
    # Stages hold other parameters, of which only some may be cut: one answer for all.
    everyone = ops.all_gather_object(problem, group=mesh.world)
    if any(everyone):
        raise OptimizerError(problem or next(other for other in everyone if other))
    needs_whole = is_cut or engine.settings.zero_stage > 0
    return OptimizerFit(name=name, scope=scope, needs_whole_parameters=needs_whole and engine.unsharder is None)


def check_whole(
    name: str, parameters: list[torch.nn.Parameter], engine: ShardingEngine, cuts: TensorCuts | None, mesh: Mesh
) -> None:
    """Raises OptimizerError: one of these is cut over tp, for an optimizer that needs it whole."""
    problem = _problem_of_cuts(name, parameters, engine, cuts, mesh)
    if problem:
        raise OptimizerError(problem)


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


def _problem_of_table(optimizer: torch.optim.Optimizer, name: str, engine: ShardingEngine, *, is_spread: bool) -> str:
    """Of an optimizer that keeps something for each parameter outside its state."""
    table = find_own_table(optimizer)
    if table is None:
        return ""
    what = f"{name} keeps something for each parameter in .{table.attribute}, beside its state"
    instead = f"; let it keep that in self.state[p], for each p of its groups, or use {_OTHERS}"
    if not table.by_place:
        return (
            f"{what}: while it steps its groups hold slices of the parameters, which are not in there, and what is "
            f"there would be neither cut nor saved{instead}"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if is_spread or any(engine.fqn_of.get(id(parameter)) not in engine.bucket_of for parameter in parameters):
        return (
            f"{what}, by its place: while it steps its groups hold only the parameters that this rank updates, without "
            f"frozen ones, so that the places would be others{instead}"
        )
    return ""


def _problem_of_trial(name: str, trial: Trial, *, world_size: int, is_spread: bool, asked: str) -> str:
    if trial.draws and world_size > 1:
        return (
            f"the step of {name} draws random numbers, and each rank would draw others, so that the copies of a weight "
            f"part; use {_OTHERS}, or one process"
        )
    if trial.sends and world_size > 1:
        return (
            f"the step of {name} talks to the other ranks by itself ({trial.sends}), as if each of them had every "
            "parameter; use its version for one process: hybrid shares the work out"
        )
    if trial.error and is_spread and asked != "parameter":
        return (
            f"{name} is not known here, and could not be tried on small copies of its parameters ({trial.error}). If "
            "its update of each parameter depends on that parameter alone, say so: sharding_configs['partition'] = "
            f"'parameter'; else use stage 0 without a pipeline, or {_OTHERS}"
        )
    return ""


def _problem_of_spread(name: str, mesh: Mesh, *, is_cut: bool, has_stages: bool) -> str:
    """Of an optimizer that must see all parameters at once."""
    if has_stages:
        return (
            f"{name} updates each parameter by all of them together, and each of the {mesh.degree('pp')} pipeline "
            f"stages has its own: use pipeline_configs.degree = 1 with stage 0, or {_OTHERS}"
        )
    if is_cut:
        return (
            f"{name} updates each parameter by all of them together (a step or a norm over the whole model), and they "
            f"are cut over {mesh.degree('dp_shard')} ranks: use sharding_configs.stage = 0 or shard_size = 1, or "
            f"{_OTHERS}. If it only clips by a global norm, switch that off and set strategy.gradient_clipping"
        )
    return ""


def _problem_of_cuts(
    name: str, parameters: list[torch.nn.Parameter], engine: ShardingEngine, cuts: TensorCuts | None, mesh: Mesh
) -> str:
    fqns = (engine.fqn_of.get(id(parameter)) for parameter in parameters)
    cut = next((fqn for fqn in fqns if fqn in engine.bucket_of and cuts is not None and cuts.own(fqn)), None)
    if cut is None:
        return ""
    return (
        f"{name} is not known to update each element by itself, and {cut!r} is cut over "
        f"{mesh.degree('tp')} tensor-parallel ranks, so no rank has it whole: use {_OTHERS} (also for "
        "the cut parameters alone, in a second optimizer), or tensor_parallel_configs.degree = 1"
    )


def _problem_of_partition(name: str, engine: ShardingEngine, *, asked: str, is_cut: bool) -> str:
    if not is_cut or engine.partition_kind == "parameter":
        return ""
    if asked == "element":
        return (
            f"{name} is not known to update each element by itself, so it cannot step on slices that cut "
            "through a parameter: set sharding_configs['partition'] = 'parameter' (or 'auto')"
        )
    if engine.unsharder is not None:
        return (
            f"{name} is not known to update each element by itself, so at stage 3 it needs "
            f"sharding_configs['partition'] = 'parameter' from the start; or use {_OTHERS}"
        )
    return ""
