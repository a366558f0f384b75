"""`distributed_optimizer`: an ordinary optimizer that steps on this rank's shards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch

from hybrid import shims
from hybrid.compose import context
from hybrid.compose import optimizer_state_dict as states
from hybrid.compose.optimizer_alike import check_same_groups
from hybrid.compose.optimizer_fit import check_whole
from hybrid.compose.optimizer_stages import drop_elsewhere
from hybrid.compose.runtime import Runtime
from hybrid.errors import OptimizerError
from hybrid.sharding.optimizer_kind import Scope, needs_closure, unwrapped_step
from hybrid.sharding.optimizer_state import OptimizerShards
from hybrid.sharding.slice_state import SliceState
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
        OptimizerError: parameters of no wrapped model, or of several; an optimizer that cannot step on shards, or that
            is not the same on all ranks.
        StrategyError: a strategy that differs from the one in force.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(f"distributed_optimizer needs a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, DistributedOptimizer):
        raise OptimizerError("this optimizer has already been given to distributed_optimizer")
    if strategy is not None:
        context.check_same_strategy(strategy)
    runtime = _runtime_of(optimizer)
    drop_elsewhere(optimizer, runtime)
    # A scheduler built earlier has put its counting wrapper around the base class's step on the instance.
    counted = optimizer.__dict__.get("step")
    if hasattr(counted, shims.SCHEDULER_STEP_MARK):
        del optimizer.__dict__["step"]
    base = type(optimizer)
    try:
        _check_same(base.__name__, optimizer.param_groups, runtime, state=optimizer.state)
        shards = runtime.adopt_optimizer(optimizer)
    except OptimizerError:
        if counted is not None:
            optimizer.__dict__["step"] = counted
        raise
    setattr(optimizer, shims.UNSCALES_BY_ITSELF, False)
    optimizer.__class__ = _extended(base)
    extended = cast(DistributedOptimizer, optimizer)
    extended.hybrid_runtime = runtime
    extended.hybrid_shards = shards
    extended.hybrid_base_step = unwrapped_step(base)
    return extended


class DistributedOptimizer(torch.optim.Optimizer):
    """What `distributed_optimizer` adds to an optimizer's class."""

    hybrid_runtime: Runtime
    hybrid_shards: OptimizerShards
    hybrid_base_step: Callable[..., Any]
    """Its own step, without hooks."""
    hybrid_deferred: bool = False
    """Whether the update that train_batch runs next may send its results later."""

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what is not reduced yet, clip as the strategy says, update own shards, send them to the others.

        Step hooks of the optimizer run around this, with the model's own parameters in `param_groups`. An optimizer of
        torch that updates each element by itself calls a closure once, first, and gets its result back. Any other
        calls it when and as often as it likes: each time the model has the parameters of that moment on all ranks,
        and the optimizer gets the mean of the ranks' losses (their sum under loss_reduction "sum").

        Raises:
            OptimizerError: the optimizer needs a closure and there is none.
        """
        setattr(self, shims.SCHEDULER_STEP_CALLED, True)
        if closure is None:
            self.check_closure_free("optimizer.step()")
        elif self.hybrid_shards.scope is not Scope.ELEMENT:
            return self._step_with(closure)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._settle()
        self._update_shards(deferred=self.hybrid_runtime.strategy.overlap_param_gather)
        return result

    def check_closure_free(self, call: str) -> None:
        """Raises OptimizerError: this optimizer evaluates the model by itself, and `call` gives it nothing to call."""
        if needs_closure(self.hybrid_base_step):
            raise OptimizerError(
                f"{self.hybrid_shards.name} evaluates the model by itself, so {call} cannot drive it: in a plain loop, "
                "optimizer.step(closure) with a closure that empties the gradients, runs forward and backward and "
                "returns the loss"
            )

    def step_settled(self, *, deferred: bool) -> None:
        """The step of train_batch, whose gradients are settled and clipped already; runs step hooks like `step`."""
        self.hybrid_deferred = deferred
        self._hooked_update()

    @torch.optim.Optimizer.profile_hook_step
    def _hooked_update(self) -> None:
        setattr(self, shims.SCHEDULER_STEP_CALLED, True)
        self._update_shards(deferred=self.hybrid_deferred)

    def _settle(self) -> None:
        """Make the gradients final, or refuse to step on them."""
        runtime = self.hybrid_runtime
        runtime.engine.check_unchanged()
        runtime.engine.adopt_hand_made_changes()
        runtime.check_parts()
        runtime.check_plain_step()
        runtime.synchronise_and_clip(shards=self.hybrid_shards)
        runtime.check_unscaled(self.hybrid_shards)

    def _update_shards(self, *, deferred: bool, closure: Callable[[], Any] | None = None) -> Any:
        shards = self.hybrid_shards
        if added := shards.without_shard():
            self._add(added)
        self.hybrid_runtime.engine.before_update(shards.buckets())
        base_step = self.hybrid_base_step
        result = shards.step(lambda: base_step(self) if closure is None else base_step(self, closure))
        self._publish(deferred=deferred)
        return result

    def _publish(self, *, deferred: bool) -> None:
        """What was updated here becomes the parameters of all ranks."""
        runtime, shards = self.hybrid_runtime, self.hybrid_shards
        runtime.mark_stepped(shards)
        runtime.engine.after_update(shards.buckets(), deferred=deferred)

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        """The step of an optimizer that calls the closure itself, each time on the parameters as they are then."""
        runtime, shards = self.hybrid_runtime, self.hybrid_shards

        def evaluate() -> Any:
            with shards.interrupted():
                self._publish(deferred=False)
                with torch.enable_grad():
                    loss = closure()
                self._settle()
                runtime.engine.before_update(shards.buckets())
            return runtime.loss_of_all_ranks(loss)

        if runtime.holds_anywhere(runtime.has_gradients()):  # of a backward before the step
            self._settle()
        return self._update_shards(deferred=runtime.strategy.overlap_param_gather, closure=evaluate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empty gradients, local and reduced, of this optimizer's parameters."""
        shards = self.hybrid_shards
        if shards.is_in_place:  # the optimizer's own step calls it
            shards.drop_slice_gradients()
        self.hybrid_runtime.zero_grad(shards.users_parameters(), set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the wrapped model that no group holds yet. *Collective.*

        Raises:
            OptimizerError: parameters that are not the wrapped model's, or that this optimizer cannot step on; another
                group on another rank.
        """
        super().add_param_group(param_group)
        if "hybrid_shards" not in vars(self):
            return
        runtime = self.hybrid_runtime
        try:
            unknown = [p for p in self.param_groups[-1]["params"] if not _knows(runtime, p)]
            if unknown:
                raise OptimizerError(
                    f"the group holds a parameter of shape {tuple(unknown[0].shape)} that is not in the model of "
                    "this optimizer; give another model an optimizer of its own"
                )
            drop_elsewhere(self, runtime)
            _check_same(self.hybrid_shards.name, self.param_groups[-1:], runtime)
            self._add(self.param_groups[-1]["params"])
        except OptimizerError:
            self.param_groups.pop()
            raise

    def full_state_dict(self) -> dict[str, Any]:
        """Whole state by fqn: {"state": {fqn: {key: value}}, "param_groups": [{..., "params": [fqn, ...]}]}.

        The state of a low-precision parameter has its fp32 master beside the optimizer's own, as "master".
        Hooks of `state_dict` run as for that. Collective: every rank of the world calls it, and gets all of it.
        """
        return states.with_hooks(self, states.full_state_dict)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state by fqn, with the ranges that it holds; not collective."""
        return states.with_hooks(self, states.own_state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take `full_state_dict()` of any layout, or `state_dict()` of the same rank of the same layout.

        Masters in it become the masters here, and the parameters follow. All ranks call it.

        Raises:
            OptimizerError: parameters, groups or ranges that do not fit, all named.
        """
        states.load_with_hooks(self, state_dict)

    def whole_groups(self) -> list[dict[str, Any]]:
        """Options and fqns of every param group, those of other pipeline stages among them. Collective over them."""
        return states.whole_groups(self)

    def _add(self, parameters: list[torch.nn.Parameter]) -> None:
        """Raises OptimizerError: parameters of no wrapped model, or that this optimizer cannot step on."""
        runtime, shards = self.hybrid_runtime, self.hybrid_shards
        if shards.scope is not Scope.ELEMENT:
            check_whole(shards.name, parameters, runtime.engine, runtime.cuts, runtime.mesh)
        shards.add(parameters)

    def __setattr__(self, name: str, value: Any) -> None:
        """`optimizer.state = defaultdict(dict)`: the new one, too, is asked for by the parameters of the model."""
        if name == "state" and "hybrid_shards" in vars(self) and not isinstance(value, SliceState):
            state = SliceState(self.hybrid_shards, {})
            for parameter, values in value.items():
                state[parameter] = values
            value = state
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        raise OptimizerError(
            "a distributed optimizer cannot be copied or pickled: it belongs to process groups; save "
            "optimizer.full_state_dict(), or copy the optimizer before distributed_optimizer"
        )


# So that a scheduler built later finds its counting already done (see shims).
setattr(DistributedOptimizer.step, shims.SCHEDULER_STEP_MARK, True)
DistributedOptimizer.step.hooked = True  # type: ignore[attr-defined]

_extended_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def _extended(base: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    if base not in _extended_classes:
        _extended_classes[base] = type(f"Distributed{base.__name__}", (DistributedOptimizer, base), {})
    extended: type[torch.optim.Optimizer] = _extended_classes[base]
    return extended


def _check_same(
    name: str, groups: list[dict[str, Any]], runtime: Runtime, *, state: dict[Any, Any] | None = None
) -> None:
    ranks = runtime.mesh.group(*context.DATA_AXES, "tp")
    check_same_groups(name, groups, runtime.engine, ranks, state=state)


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
