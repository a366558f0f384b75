"""The state of a wrapped optimizer as dicts by fqn: whole, or this rank's own; and taken back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hybrid import shims
from hybrid.collectives import ops
from hybrid.compose.model_state import over_stages
from hybrid.compose.runtime import Runtime
from hybrid.errors import OptimizerError
from hybrid.sharding import state_view
from hybrid.sharding.optimizer_state import MASTER, Shard, own_copy

if TYPE_CHECKING:
    from hybrid.compose.optimizer import DistributedOptimizer

__all__ = ["full_state_dict", "load_with_hooks", "own_state_dict", "whole_groups", "with_hooks"]


def with_hooks(
    optimizer: DistributedOptimizer, make: Callable[[DistributedOptimizer], dict[str, Any]]
) -> dict[str, Any]:
    """What `make` gives, with the hooks that the user registered for `state_dict` before and after."""
    hooks = shims.state_dict_hooks(optimizer)
    for before in hooks.before_saving:
        before(optimizer)
    made = make(optimizer)
    for after in hooks.after_saving:
        replaced = after(optimizer, made)
        made = made if replaced is None else replaced
    return made


def load_with_hooks(optimizer: DistributedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """`_load`, with the hooks that the user registered for `load_state_dict` before and after."""
    hooks = shims.state_dict_hooks(optimizer)
    given = dict(state_dict)
    for before in hooks.before_loading:
        replaced = before(optimizer, given)
        given = given if replaced is None else replaced
    _load(optimizer, given)
    for after in hooks.after_loading:
        after(optimizer)


def full_state_dict(optimizer: DistributedOptimizer) -> dict[str, Any]:
    """See `DistributedOptimizer.full_state_dict`."""
    runtime = optimizer.hybrid_runtime
    state = state_view.whole_optimizer_state(optimizer.hybrid_shards, optimizer)
    for fqn, values in state.items():
        state[fqn] = _over_tp(runtime, fqn, values, runtime.whole)
    if runtime.stages is not None:
        state = over_stages(state, runtime, order=runtime.stages.whole.order)
    return {"state": state, "param_groups": whole_groups(optimizer)}


def own_state_dict(optimizer: DistributedOptimizer) -> dict[str, Any]:
    """See `DistributedOptimizer.state_dict`."""
    runtime, shards = optimizer.hybrid_runtime, optimizer.hybrid_shards
    state = shards.own_state()
    parts = {shard.fqn: shard.part for shard in shards.shards() if shard.part is not None}
    ranges = {fqn: (parts[fqn].start, parts[fqn].stop) for fqn in state}
    mesh = runtime.mesh
    place = {} if runtime.cuts is None else {"tp": (mesh.coordinate("tp"), mesh.degree("tp"))}
    return {"state": state, "ranges": ranges, **place, "param_groups": _named_groups(optimizer)}


def whole_groups(optimizer: DistributedOptimizer) -> list[dict[str, Any]]:
    """See `DistributedOptimizer.whole_groups`."""
    runtime, groups = optimizer.hybrid_runtime, _named_groups(optimizer)
    if runtime.stages is None:
        return groups
    own = [dict(zip(group["params"], group.get("param_names", group["params"]), strict=True)) for group in groups]
    everyone = ops.all_gather_object(own, group=runtime.mesh.group("pp"))
    for index, group in enumerate(groups):
        held = {fqn: name for names in everyone for fqn, name in names[index].items()}
        group["params"] = [fqn for fqn in runtime.stages.whole.order if fqn in held]
        if "param_names" in group:
            group["param_names"] = [held[fqn] for fqn in group["params"]]
    return groups


def _named_groups(optimizer: DistributedOptimizer) -> list[dict[str, Any]]:
    """Copies of the options, as a rate that is a tensor changes in place."""
    fqn_of = optimizer.hybrid_runtime.engine.fqn_of
    return [
        {
            **{key: own_copy(value) for key, value in group.items() if key != "params"},
            "params": [fqn_of[id(parameter)] for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def _load(optimizer: DistributedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """See `DistributedOptimizer.load_state_dict`. All of it is checked before anything is replaced."""
    runtime, shards = optimizer.hybrid_runtime, optimizer.hybrid_shards
    mine, by_fqn = _named_groups(optimizer), {shard.fqn: shard for shard in shards.shards()}
    is_whole = "ranges" not in state_dict
    groups, state = state_dict.get("param_groups", []), dict(state_dict.get("state", {}))
    if runtime.stages is not None and is_whole:
        groups, state = _of_this_stage(runtime, groups, state, mine)
    problems = _misfits_of_groups(groups, mine)
    if is_whole:
        state = {fqn: _over_tp(runtime, fqn, values, runtime.part) for fqn, values in state.items()}
    else:
        problems += _misfits_of_place(runtime, state_dict)
    for fqn, values in state.items():
        shard = by_fqn.get(fqn)
        if shard is None:
            problems.append(f"state of {fqn!r}: no trainable parameter of this optimizer has that name")
            continue
        if not is_whole:
            problems += _misfits_of_range(shard, tuple(state_dict["ranges"][fqn]))
        problems += _misfits_of_master(shard, values.get(MASTER), is_own=not is_whole)
    everyone = ops.all_gather_object(problems, group=runtime.mesh.world)
    if problems:
        raise OptimizerError("the optimizer state does not fit: " + "; ".join(problems))
    for rank, theirs in zip(runtime.mesh.world.ranks, everyone, strict=True):
        if theirs:
            raise OptimizerError(f"the optimizer state does not fit on rank {rank}: " + "; ".join(theirs))
    masters = {fqn: values[MASTER] for fqn, values in state.items() if MASTER in values}
    loaded: dict[torch.Tensor, dict[str, Any]] = {}
    for fqn, values in state.items():
        shard, own = by_fqn[fqn], {key: value for key, value in values.items() if key != MASTER}
        if shard.tensor is not None and own:
            cut = shards.cut_state(shard, own) if is_whole else {key: own_copy(value) for key, value in own.items()}
            loaded[shard.tensor] = shards.at_home(shard, cut)
    optimizer.state.clear()
    optimizer.state.update(loaded)
    if not is_whole:
        shards.set_own_masters(masters)
    for fqn in masters if is_whole else ():
        shards.set_whole_master(fqn, masters[fqn])
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        # Names are the user's own for the parameters of this stage; they say nothing else.
        group.update({key: own_copy(value) for key, value in saved.items() if key not in ("params", "param_names")})


def _of_this_stage(
    runtime: Runtime, groups: list[dict[str, Any]], state: dict[str, Any], mine: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Of groups and state of a whole model, without what other stages of the pipeline hold."""
    assert runtime.stages is not None
    here, known = set(runtime.engine.parameters), set(runtime.stages.whole.order)

    def is_mine(fqn: str) -> bool:
        return fqn in here or fqn not in known  # what nobody knows is an error of its own

    groups = [{**group, "params": [fqn for fqn in group.get("params", ()) if is_mine(fqn)]} for group in groups]
    for group, own in zip(groups, mine, strict=False):
        if set(group["params"]) == set(own["params"]):
            group["params"] = own["params"]
    return groups, {fqn: values for fqn, values in state.items() if is_mine(fqn)}


def _over_tp(runtime: Runtime, fqn: str, values: dict[str, Any], change: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """State with every tensor of the parameter's shape joined over tp, or cut for this rank."""
    if runtime.cuts is None or runtime.cuts.own(fqn) is None:
        return values
    shapes = (tuple(runtime.engine.parameters[fqn].shape), runtime.global_shape(fqn))
    wanted = shapes[0] if change == runtime.whole else shapes[1]
    return {
        key: change(fqn, value) if isinstance(value, torch.Tensor) and tuple(value.shape) == wanted else value
        for key, value in values.items()
    }


# -- what does not fit ---------------------------------------------------------------------------------------------


def _misfits_of_groups(groups: list[dict[str, Any]], mine: list[dict[str, Any]]) -> list[str]:
    saved, here = [group.get("params") for group in groups], [group["params"] for group in mine]
    if saved == here:
        return []
    by_number = any(isinstance(one, int) for params in saved for one in params or ())
    plain = " (a plain optimizer numbers its parameters: load that state into it before distributed_optimizer)"
    return [f"param groups differ: saved {saved}, here {here}" + plain * by_number]


def _misfits_of_place(runtime: Runtime, state_dict: Mapping[str, Any]) -> list[str]:
    mesh = runtime.mesh
    saved_at, here = tuple(state_dict.get("tp", (0, 1))), (mesh.coordinate("tp"), mesh.degree("tp"))
    if saved_at == here:
        return []
    return [
        f"it was saved by tensor-parallel rank {saved_at[0]} of {saved_at[1]}, this is rank {here[0]} of "
        f"{here[1]}: save full_state_dict() to change the layout"
    ]


def _misfits_of_range(shard: Shard, saved: tuple[int, ...]) -> list[str]:
    part = None if shard.part is None else (shard.part.start, shard.part.stop)
    if part == saved:
        return []
    return [
        f"state of {shard.fqn!r} covers elements {saved}, this rank owns {part}: it was saved "
        "by another rank or layout; save full_state_dict() to change the layout"
    ]


def _misfits_of_master(shard: Shard, master: Any, *, is_own: bool) -> list[str]:
    if master is None:
        return []
    whole = shard.bucket.parameters[shard.position].shape
    wanted = tuple(shard.tensor.shape) if is_own and shard.tensor is not None else tuple(whole)
    if not isinstance(master, torch.Tensor) or tuple(master.shape) != wanted:
        got = tuple(master.shape) if isinstance(master, torch.Tensor) else type(master).__name__
        return [f"the master of {shard.fqn!r} has shape {got}, not {wanted}"]
    if is_own and shard.bucket.master is None:
        return [
            f"a master of {shard.fqn!r}, which computes in {shard.bucket.key.dtype} here and has none: it was saved in "
            "another precision; save full_state_dict() to change it"
        ]
    return []
