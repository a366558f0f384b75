"""`distributed_optimizer`: an ordinary optimizer that steps on this rank's shards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch

from hybrid import shims
from hybrid.collectives import ops
from hybrid.compose import context
from hybrid.compose.model_state import over_stages
from hybrid.compose.runtime import Runtime
from hybrid.errors import OptimizerError
from hybrid.sharding import state_view
from hybrid.sharding.optimizer_state import MASTER, OptimizerShards, Shard
from hybrid.strategy import DistributedStrategy

__all__ = ["DistributedOptimizer", "distributed_optimizer"]


def distributed_optimizer(
    optimizer: torch.optim.Optimizer, strategy: DistributedStrategy | None = None
) -> DistributedOptimizer:
    """Let an optimizer work on the shards of a wrapped model. Returns the same object, its class extended.

    It may be built before or after `distributed_model`, fresh or with state from earlier training; param groups,
    options, their order and learning-rate schedulers keep working. `param_groups` keep the model's own
    parameters; the optimizer's state exists for this rank's slices only.

    Args:
        optimizer: built from the parameters of a model that `distributed_model` has wrapped.
        strategy: may repeat the one given to `distributed_model`.

    Raises:
        OptimizerError: parameters of no wrapped model, or of several; an optimizer that cannot step on shards.
        StrategyError: a strategy that differs from the one in force.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(f"distributed_optimizer needs a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, DistributedOptimizer):
        raise OptimizerError("this optimizer has already been given to distributed_optimizer")
    if strategy is not None:
        context.check_same_strategy(strategy)
    runtime = _runtime_of(optimizer)
    _drop_elsewhere(optimizer, runtime)
    shards = runtime.adopt_optimizer(optimizer)
    base = type(optimizer)
    # A scheduler built earlier has put its counting wrapper around the base class's step on the instance.
    if hasattr(optimizer.__dict__.get("step"), shims.SCHEDULER_STEP_MARK):
        del optimizer.__dict__["step"]
    setattr(optimizer, shims.UNSCALES_BY_ITSELF, False)
    optimizer.__class__ = _extended(base)
    extended = cast(DistributedOptimizer, optimizer)
    extended.hybrid_runtime = runtime
    extended.hybrid_shards = shards
    return extended


class DistributedOptimizer(torch.optim.Optimizer):
    """What `distributed_optimizer` adds to an optimizer's class."""

    hybrid_runtime: Runtime
    hybrid_shards: OptimizerShards

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what is not reduced yet, clip as the strategy says, update own shards, send them to the others.

        Step hooks of the optimizer run around this, with the model's own parameters in `param_groups`.
        """
        setattr(self, shims.SCHEDULER_STEP_CALLED, True)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        runtime, shards = self.hybrid_runtime, self.hybrid_shards
        runtime.engine.check_unchanged()
        runtime.engine.adopt_hand_made_changes()
        runtime.check_parts()
        runtime.check_plain_step()
        runtime.synchronise_and_clip(shards=shards)
        runtime.check_unscaled()
        self._update_shards(deferred=runtime.strategy.overlap_param_gather)
        return result

    @torch.optim.Optimizer.profile_hook_step
    def step_settled(self, *, deferred: bool) -> None:
        """The step of train_batch, whose gradients are settled and clipped already; runs step hooks like `step`."""
        setattr(self, shims.SCHEDULER_STEP_CALLED, True)
        self._update_shards(deferred=deferred)

    def _update_shards(self, *, deferred: bool) -> None:
        runtime, shards = self.hybrid_runtime, self.hybrid_shards
        runtime.engine.before_update(shards.buckets())
        base_step = _base_step(type(self))
        shards.step(lambda: base_step(self))
        runtime.mark_stepped(shards)
        runtime.engine.after_update(shards.buckets(), deferred=deferred)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empty gradients, local and reduced, of this optimizer's parameters."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.hybrid_runtime.zero_grad(parameters, set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the wrapped model that no group holds yet."""
        super().add_param_group(param_group)
        if "hybrid_shards" in self.__dict__:
            try:
                self.hybrid_shards.add(self.param_groups[-1]["params"])
            except OptimizerError:
                self.param_groups.pop()
                raise

    def full_state_dict(self) -> dict[str, Any]:
        """Whole state by fqn: {"state": {fqn: {key: value}}, "param_groups": [{..., "params": [fqn, ...]}]}.

        The state of a low-precision parameter has its fp32 master beside the optimizer's own, as "master".
        Collective: every rank of the world calls it, and gets all of it.
        """
        state = state_view.whole_optimizer_state(self.hybrid_shards, self)
        for fqn, values in state.items():
            state[fqn] = self._over_tp(fqn, values, self.hybrid_runtime.whole)
        runtime = self.hybrid_runtime
        if runtime.stages is not None:
            state = over_stages(state, runtime, order=runtime.stages.whole.order)
        return {"state": state, "param_groups": self.whole_groups()}

    def whole_groups(self) -> list[dict[str, Any]]:
        """Options and fqns of every param group, those of other pipeline stages among them. Collective over them."""
        runtime, groups = self.hybrid_runtime, self._named_groups()
        if runtime.stages is not None:
            everyone = ops.all_gather_object([group["params"] for group in groups], group=runtime.mesh.group("pp"))
            for index, group in enumerate(groups):
                held = {fqn for names in everyone for fqn in names[index]}
                group["params"] = [fqn for fqn in runtime.stages.whole.order if fqn in held]
        return groups

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state by fqn, with the ranges that it holds; not collective."""
        state = self.hybrid_shards.own_state()
        parts = {shard.fqn: shard.part for shard in self.hybrid_shards.shards() if shard.part is not None}
        ranges = {fqn: (parts[fqn].start, parts[fqn].stop) for fqn in state}
        mesh = self.hybrid_runtime.mesh
        place = {} if self.hybrid_runtime.cuts is None else {"tp": (mesh.coordinate("tp"), mesh.degree("tp"))}
        return {"state": state, "ranges": ranges, **place, "param_groups": self._named_groups()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take `full_state_dict()` of any layout, or `state_dict()` of the same rank of the same layout.

        Masters in it become the masters here, and the parameters follow. All ranks call it.

        Raises:
            OptimizerError: parameters, groups or ranges that do not fit, all named.
        """
        shards = {shard.fqn: shard for shard in self.hybrid_shards.shards()}
        groups = state_dict.get("param_groups", [])
        mine = self._named_groups()
        problems = []
        stages = self.hybrid_runtime.stages
        if stages is not None and "ranges" not in state_dict:  # of the whole model: what other stages hold is theirs
            own_fqns = set(self.hybrid_runtime.engine.parameters)
            known = set(stages.whole.order)
            groups = [
                {**group, "params": [fqn for fqn in group.get("params", ()) if fqn in own_fqns or fqn not in known]}
                for group in groups
            ]
            for group, own in zip(groups, mine, strict=False):
                if set(group["params"]) == set(own["params"]):
                    group["params"] = own["params"]
            kept = {fqn: v for fqn, v in state_dict.get("state", {}).items() if fqn in own_fqns or fqn not in known}
            state_dict = {**state_dict, "state": kept}
        if [group.get("params") for group in groups] != [group["params"] for group in mine]:
            problems.append(
                f"param groups differ: saved {[group.get('params') for group in groups]}, "
                f"here {[group['params'] for group in mine]}"
            )
        ranges = state_dict.get("ranges")
        state = state_dict.get("state", {})
        mesh = self.hybrid_runtime.mesh
        saved_at, here = tuple(state_dict.get("tp", (0, 1))), (mesh.coordinate("tp"), mesh.degree("tp"))
        if ranges is not None and saved_at != here:
            problems.append(
                f"it was saved by tensor-parallel rank {saved_at[0]} of {saved_at[1]}, this is rank {here[0]} of "
                f"{here[1]}: save full_state_dict() to change the layout"
            )
        if ranges is None:
            state = {fqn: self._over_tp(fqn, values, self.hybrid_runtime.part) for fqn, values in state.items()}
        for fqn, values in state.items():
            shard = shards.get(fqn)
            if shard is None:
                problems.append(f"state of {fqn!r}: no trainable parameter of this optimizer has that name")
            elif ranges is not None:
                part = None if shard.part is None else (shard.part.start, shard.part.stop)
                if part != tuple(ranges[fqn]):
                    problems.append(
                        f"state of {fqn!r} covers elements {tuple(ranges[fqn])}, this rank owns {part}: it was saved "
                        "by another rank or layout; save full_state_dict() to change the layout"
                    )
            if shard is not None:
                problems += _misfits_of_master(shard, values.get(MASTER), is_own=ranges is not None)
        if problems:
            raise OptimizerError("the optimizer state does not fit: " + "; ".join(problems))
        loaded: dict[torch.Tensor, dict[str, Any]] = {}  # whole before anything is replaced: cutting may refuse
        masters: dict[str, torch.Tensor] = {}
        for fqn, values in state.items():
            shard = shards[fqn]
            if MASTER in values:
                masters[fqn] = values[MASTER]
                values = {key: value for key, value in values.items() if key != MASTER}
            if shard.tensor is None or not values:
                continue
            if ranges is None:
                loaded[shard.tensor] = self.hybrid_shards.cut_state(shard, values)
            else:
                copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
                loaded[shard.tensor] = copies
        self.state.clear()
        self.state.update(loaded)
        if ranges is not None:
            self.hybrid_shards.set_own_masters(masters)
        for fqn in masters if ranges is None else ():
            self.hybrid_shards.set_whole_master(fqn, masters[fqn])
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _over_tp(self, fqn: str, values: dict[str, Any], change: Callable[..., torch.Tensor]) -> dict[str, Any]:
        """State with every tensor of the parameter's shape joined over tp, or cut for this rank."""
        runtime = self.hybrid_runtime
        if runtime.cuts is None or runtime.cuts.own(fqn) is None:
            return values
        shapes = (tuple(runtime.engine.parameters[fqn].shape), runtime.global_shape(fqn))
        wanted = shapes[0] if change == runtime.whole else shapes[1]
        return {
            key: change(fqn, value) if isinstance(value, torch.Tensor) and tuple(value.shape) == wanted else value
            for key, value in values.items()
        }

    def _named_groups(self) -> list[dict[str, Any]]:
        fqn_of = self.hybrid_runtime.engine.fqn_of
        return [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [fqn_of[id(p)] for p in group["params"]]}
            for group in self.param_groups
        ]

    def __reduce__(self) -> Any:
        raise OptimizerError(
            "a distributed optimizer cannot be copied or pickled: it belongs to process groups; save "
            "optimizer.full_state_dict(), or copy the optimizer before distributed_optimizer"
        )


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


# So that a scheduler built later finds its counting already done (see shims).
setattr(DistributedOptimizer.step, shims.SCHEDULER_STEP_MARK, True)
DistributedOptimizer.step.hooked = True  # type: ignore[attr-defined]

_extended_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def _extended(base: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    if base not in _extended_classes:
        _extended_classes[base] = type(f"Distributed{base.__name__}", (DistributedOptimizer, base), {})
    extended: type[torch.optim.Optimizer] = _extended_classes[base]
    return extended


def _base_step(extended: type) -> Callable[..., Any]:
    """The user's optimizer's own step, without the hook wrapper that torch puts around it (ours runs the hooks)."""
    place = extended.__mro__.index(DistributedOptimizer)
    step: Callable[..., Any] = next(c.__dict__["step"] for c in extended.__mro__[place + 1 :] if "step" in c.__dict__)
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def _drop_elsewhere(optimizer: torch.optim.Optimizer, runtime: Runtime) -> None:
    """Parameters that other pipeline stages train, and their state, are theirs."""
    if runtime.stages is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in runtime.engine.fqn_of]
    for parameter in [p for p in optimizer.state if id(p) not in runtime.engine.fqn_of]:
        del optimizer.state[parameter]
    stages_of = {fqn: held for fqn, held in runtime.stages.whole.stages_of.items() if len(held) > 1}
    tied = {
        fqn: (index, {key: value for key, value in group.items() if isinstance(value, _COMPARED)})
        for index, group in enumerate(optimizer.param_groups)
        for fqn in (runtime.engine.fqn_of[id(parameter)] for parameter in group["params"])
        if fqn in stages_of
    }
    everyone = ops.all_gather_object((len(optimizer.param_groups), tied), group=runtime.mesh.group("pp"))
    counts = [count for count, _ in everyone]
    if len(set(counts)) > 1:
        raise OptimizerError(
            f"the stages of the pipeline have {', '.join(map(str, counts))} param groups: each needs the same ones, "
            "empty where it has no parameters of a group. Keep empty groups, or build the optimizer before "
            "distributed_model"
        )
    for fqn, held in stages_of.items():
        found = [everyone[stage][1].get(fqn) for stage in held]
        if any(other != found[0] for other in found):
            options = [one[1] for one in found if one is not None]
            unlike = {key for each in options for key in each if any(each[key] != other.get(key) for other in options)}
            shown = "; ".join(
                f"stage {stage}: not in the optimizer"
                if one is None
                else f"stage {stage}: group {one[0]}" + "".join(f", {key} {one[1].get(key)}" for key in sorted(unlike))
                for stage, one in zip(held, found, strict=True)
            )
            raise OptimizerError(
                f"{fqn!r} is one parameter on pipeline stages {', '.join(map(str, held))}, and is not updated alike "
                f"there ({shown}): give it to the same group with the same options on each of them, or to none"
            )


_COMPARED = (bool, int, float, str, tuple, type(None))


def _knows(runtime: Runtime, parameter: torch.Tensor) -> bool:
    stages = runtime.stages
    return id(parameter) in runtime.engine.fqn_of or (
        stages is not None and (id(parameter) in stages.elsewhere or parameter is stages.stand_in)
    )


def _runtime_of(optimizer: torch.optim.Optimizer) -> Runtime:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    runtimes = context.runtimes()
    owners = [next((r for r in runtimes if _knows(r, p)), None) for p in parameters]
    missing = [p for p, owner in zip(parameters, owners, strict=True) if owner is None]
    if missing:
        raise OptimizerError(
            f"{len(missing)} of the optimizer's {len(parameters)} parameters (the first has shape "
            f"{tuple(missing[0].shape)}) belong to no model given to distributed_model; wrap the model first, and "
            "build the optimizer from that model's parameters()"
        )
    found = {id(owner): owner for owner in owners if owner is not None}
    if not parameters:
        return _runtime_without_parameters(runtimes)
    if len(found) != 1:
        raise OptimizerError(
            f"the optimizer holds parameters of {len(found)} wrapped models; give each model an optimizer of its own"
        )
    return next(iter(found.values()))


def _runtime_without_parameters(runtimes: list[Runtime]) -> Runtime:
    """Of an optimizer whose groups are empty here: its parameters are on other stages of the one pipeline there is."""
    staged = [runtime for runtime in runtimes if runtime.stages is not None]
    if len(staged) > 1:  # those of which this stage trains nothing, if that tells
        staged = [runtime for runtime in staged if not runtime.engine.buckets] or staged
    if len(staged) == 1:
        return staged[0]
    if not staged:
        raise OptimizerError(
            "the optimizer holds no parameters: build it from the parameters() of a model given to distributed_model"
        )
    raise OptimizerError(
        f"the optimizer holds no parameters on this rank, and {len(staged)} pipelines could be meant: build it from "
        "model.parameters(), which has an empty one on a stage that trains none, or before distributed_model"
    )
