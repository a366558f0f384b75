"""What stands behind one wrapped model: its engine, its mesh, its optimizers, and the state of the current step.

    gradients arrive ─► synchronise: reduce, settle, agree on norm and flags ─► clip ─► optimizers step ─► gather

Gradients are settled once, whoever asks first: a norm, a clip, a look at a gradient, or the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hybrid.checkpoint.held import HeldState
from hybrid.collectives import ops
from hybrid.compose import grad_norm
from hybrid.compose.batch import check_same_batch
from hybrid.compose.context import DATA_AXES
from hybrid.compose.copies import check_equal_gradients
from hybrid.compose.optimizer_alike import shown_rates
from hybrid.compose.optimizer_fit import OptimizerFit, fit_optimizer
from hybrid.compose.profiling import Profiling
from hybrid.compose.step_callbacks import StepCallbacks
from hybrid.compose.unscaled import UnscaledGradients
from hybrid.errors import ModelError, OptimizerError
from hybrid.mesh import Mesh
from hybrid.sharding import state_view
from hybrid.sharding.absence import set_present_class
from hybrid.sharding.engine import ShardingEngine
from hybrid.sharding.offload import check_host_update
from hybrid.sharding.optimizer_state import MASTER, OptimizerShards
from hybrid.strategy import ResolvedStrategy
from hybrid.tensor.cuts import TensorCuts
from hybrid.tensor.foreign_reads import watch_reads

if TYPE_CHECKING:
    from torch import nn

    from hybrid.compose.added_parts import AddedParts
    from hybrid.compose.pipeline import Stages
    from hybrid.compose.tied_holders import TiedHolders

__all__ = ["Runtime"]


def _make_scaler(strategy: ResolvedStrategy, mesh: Mesh) -> torch.amp.GradScaler | None:
    """The dynamic loss scale that the strategy asks for; None where the range of fp32 needs none."""
    amp = strategy.amp
    if amp is None or amp.dtype != "float16":
        return None
    return torch.amp.GradScaler(
        mesh.device.type,
        init_scale=amp.init_loss_scaling,
        growth_factor=amp.growth_factor,
        backoff_factor=amp.backoff_factor,
        growth_interval=amp.growth_interval,
    )


class Runtime:
    """Lives as `hybrid_runtime` on a wrapped model. All methods that communicate are called by all ranks alike."""

    def __init__(
        self, engine: ShardingEngine, *, mesh: Mesh, strategy: ResolvedStrategy, cuts: TensorCuts | None = None
    ) -> None:
        self.engine = engine
        self.cuts = cuts
        """Which parameters are cut over tp; None without tensor parallel."""
        self.stages: Stages | None = None
        """What this rank does of a pipeline; None without one."""
        self.parts: AddedParts | None = None
        """Knows what the model had when it was wrapped."""
        self.tied: TiedHolders | None = None
        """Parameters that several stages hold."""
        self.model: weakref.ref[nn.Module] | None = None
        """The wrapped model."""
        self.held: HeldState | None = None
        """What this rank holds, for saving and loading; it keeps what it has worked out."""
        self.num_batches = 0
        """Batches that came to this model, some of which the ranks of one sample compare."""
        self.mesh = mesh
        self.strategy = strategy
        self._optimizers: list[weakref.ref[OptimizerShards]] = []
        self._failed = ""  # what a train_batch that raised left behind: "alone", or "mixed" with what was there before
        # Samples or tokens behind the gradients that train_batch has left, summed over its calls and the world;
        # and those of which the settled gradients are the mean already, if somebody looked in between.
        self.accumulated_weight: torch.Tensor | None = None
        self._settled_weight: float | None = None
        self._rounds_dropped = 0
        self.accumulated_labels: torch.Tensor | None = None
        """Of the same calls, what tells whether all micro-batches have as many labels per sample."""
        # Whether other ranks may have gradients that are not settled, even if this one has none. Set where all ranks
        # pass alike (train_batch, step, zero_grad), cleared by a settlement: so all decide alike without asking.
        self.may_have_new = True
        self._stepped_at: dict[int, int] = {}
        self._clipped_at = -1
        self._unscaled = UnscaledGradients(engine)
        self.scaler = _make_scaler(strategy, mesh)
        self.profiling = Profiling.asked_for(strategy, mesh)
        self.step_callbacks = StepCallbacks()
        self.has_trained_batch = False
        engine.reducer.unscaler = self.unscale
        engine.reducer.holds_anywhere = self.holds_anywhere

    # -- optimizers ------------------------------------------------------------------------------------

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> OptimizerShards:
        """Choose the partition that this optimizer needs, and make its shards.

        Raises:
            OptimizerError: the optimizer cannot be used under this strategy.
        """
        if self.engine.host is not None:
            check_host_update(optimizer)
        fit = fit_optimizer(optimizer, self.engine, mesh=self.mesh, resolved=self.strategy, cuts=self.cuts)
        if fit.needs_whole_parameters and self.engine.partition_kind != "parameter":
            self._repartition(fit)
        self._cut_state(optimizer)
        shards = OptimizerShards(self.engine, optimizer, scope=fit.scope)
        self._optimizers.append(weakref.ref(shards))
        return shards

    def _cut_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Of an optimizer that has trained the plain model, each tp rank keeps the part of its parameters."""
        for parameter, values in optimizer.state.items():
            fqn = self.engine.fqn_of.get(id(parameter))
            if fqn is None or self.cuts is None or self.cuts.own(fqn) is None:
                continue
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and tuple(value.shape) == self.global_shape(fqn):
                    values[key] = self.part(fqn, value)

    def optimizers(self) -> list[OptimizerShards]:
        """Of the optimizers that are still alive."""
        return [shards for shards in (ref() for ref in self._optimizers) if shards is not None]

    def _repartition(self, fit: OptimizerFit) -> None:
        """Cut anew for an optimizer that needs whole parameters; other optimizers keep their state. *Collective.*"""
        if self.holds_anywhere(self.engine.gradient_bytes() > 0):
            raise OptimizerError(
                f"{fit.name} needs whole parameters on one rank, but the buckets hold gradients already; wrap it "
                "before the first backward, or set sharding_configs['partition'] = 'parameter'"
            )
        others = self.optimizers()
        states = [state_view.whole_optimizer_state(shards, shards.optimizer) for shards in others]
        self.engine.repartition("parameter")
        for shards, state in zip(others, states, strict=True):
            own = {fqn: {k: v for k, v in values.items() if k != MASTER} for fqn, values in state.items()}
            shards.rebuild({fqn: values for fqn, values in own.items() if values})
        self.engine.reducer.unscaler = self.unscale
        self.engine.reducer.holds_anywhere = self.holds_anywhere

    # -- one step --------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Turn sums over ranks into the gradient, with the one scale that they need.

        In a plain loop each rank's loss is a mean, so the sum is divided by the number of data-parallel ranks.
        train_batch runs backward on sums over samples (or tokens), so the sum is divided by all of these; what was
        settled before, a mean over fewer, is brought to the same divisor.
        """
        self._rounds_dropped = 0
        if self.strategy.loss_reduction == "sum" or self.accumulated_weight is None:
            is_sum = self.strategy.loss_reduction == "sum"
            self.engine.settle(1.0 if is_sum else 1.0 / self.strategy.data_parallel_size)
            return
        weight = self.accumulated_weight.item()
        if self._settled_weight is not None and weight > 0:
            self.engine.scale_settled(self._settled_weight / weight)
        self.engine.settle(1.0 / weight if weight > 0 else 1.0)
        self._settled_weight = weight

    # -- tensor parallel -------------------------------------------------------------------------------

    def global_shape(self, fqn: str) -> tuple[int, ...]:
        """Shape of a parameter in the user's model."""
        return self.engine.placements[fqn].global_shape

    def whole(self, fqn: str, local: torch.Tensor) -> torch.Tensor:
        """The whole of values of a parameter's shape of which each tp rank has its part. *Collective* over tp."""
        return local if self.cuts is None else self.cuts.whole(fqn, local)

    def part(self, fqn: str, whole: torch.Tensor) -> torch.Tensor:
        """What this tp rank holds of whole values of a parameter's shape."""
        return whole if self.cuts is None else self.cuts.part(fqn, whole)

    def watch_reads(self, model: nn.Module, cuts: TensorCuts) -> None:
        """Refuse code that computes with a part of a cut weight by itself."""
        cut = {fqn: p for fqn, p in self.engine.parameters.items() if cuts.own(fqn) is not None}
        watch_reads(model, cut, degree=cuts.group.size, set_class=set_present_class)

    def check_batch(self, batch: object) -> None:
        """That the ranks that cut each layer work on the same batch: of the first, second, fourth, eighth ... batch.

        Raises:
            BatchError: they do not.
        """
        self.num_batches += 1
        if self.num_batches & (self.num_batches - 1) == 0:
            check_same_batch(batch, group=self.mesh.group("pp", "tp"))

    def check_parts(self) -> None:
        """Refuse what was added to the model since it was wrapped, and edits that parted a tie. *Collective.*

        Raises:
            ModelError: see `AddedParts` and `TiedHolders`.
        """
        if self.parts is not None:
            self.parts.check()
        if self.tied is not None:
            self.tied.check()

    def has_gradients(self) -> bool:
        """Whether any gradient buffer is alive on this rank."""
        return self.engine.gradient_bytes() > 0

    def mark_failed(self) -> None:
        """A train_batch raised half-way: part of its gradients is there, without their weight."""
        self._failed = "alone" if self.accumulated_weight is None else "mixed"

    def recover(self) -> None:
        """Before gradients are used or added to: what a failed train_batch left is thrown away, or refused.

        Raises:
            ModelError: it lies on top of gradients of earlier calls, which would be thrown away as well.
        """
        if self._failed == "mixed":
            raise ModelError(
                "an earlier train_batch raised half-way, on top of gradients of train_batch(step=False): call "
                "model.zero_grad() and repeat the accumulation"
            )
        if self._failed == "alone":
            self.zero_grad()

    def forget_accumulation(self) -> None:
        """The gradients that train_batch left are gone, and with them their weight."""
        self.accumulated_weight = self._settled_weight = self.accumulated_labels = None
        self._rounds_dropped = self.engine.reducer.rounds_since_settlement
        self._failed = ""
        self.engine.reducer.saw_plain_backward = False

    def has_gradient_anywhere(self) -> bool:
        """Whether any parameter had a gradient on any rank, as of the last settlement."""
        return self.engine.any_gradient_anywhere

    def needs_settlement(self, shards: OptimizerShards | None = None) -> bool:
        """Whether gradients came since the last settlement, or `shards` already stepped on that one."""
        reducer = self.engine.reducer
        fresh = reducer.is_open or reducer.has_unreduced() or reducer.rounds_since_settlement > 0
        if shards is None:
            return fresh or self.may_have_new
        return fresh or self._stepped_at.get(id(shards), 0) == self.engine.settlements

    def holds_unused_gradients(self) -> bool:
        """Whether gradients came on this rank that no update has seen; those of a train_batch that raised are none."""
        if self._failed == "alone":
            return False
        reducer = self.engine.reducer
        is_fresh = reducer.has_unreduced() or reducer.rounds_since_settlement > self._rounds_dropped
        return is_fresh or self.accumulated_weight is not None

    def synchronise(
        self,
        *,
        norm_type: float | None = None,
        shards: OptimizerShards | None = None,
        norm_is_last: bool = False,
    ) -> torch.Tensor | None:
        """Settle the gradients if anything is unsettled, and return their norm if `norm_type` is given.

        Args:
            norm_is_last: nothing scales them after the norm, but the update.
        """
        self.recover()
        if self.accumulated_weight is not None and self.engine.reducer.saw_plain_backward:
            raise ModelError(
                "backward() was called between train_batch(step=False) and the step: its loss is a mean where "
                "train_batch adds up sums, so the two cannot be added. Give that loss to train_batch as well "
                "(forward_step=...), or accumulate in a plain loop only"
            )
        if self.needs_settlement(shards):
            self.engine.reduce_all()
            self._settle()
            self.may_have_new = False
            settlements = self.engine.settlements
            if self.cuts is not None and settlements & (settlements - 1) == 0:  # the first, second, fourth, eighth ...
                check_equal_gradients(self.engine, tp=self.mesh.group("tp"), world=self.mesh.world)
        else:
            self.engine.adopt_hand_made_changes()
            if norm_type is None:
                return None
        rates = () if shards is None or self.stages is not None else shown_rates(shards.optimizer)
        return grad_norm.agree(
            self.engine, world=self.mesh.world, norm_type=norm_type, rates=rates, applies_scale=norm_is_last
        )

    def synchronise_and_clip(
        self, *, shards: OptimizerShards | None = None, want_norm: bool = False
    ) -> torch.Tensor | None:
        """Settle, and clip as the strategy says. Returns the norm before clipping where it was computed."""
        clipping = self.strategy.gradient_clipping
        by_norm = clipping is not None and clipping.kind == "norm"
        norm_type: float | None = clipping.norm_type if clipping is not None and by_norm else 2.0
        norm_type = norm_type if by_norm or want_norm else None
        norm = self.synchronise(norm_type=norm_type, shards=shards, norm_is_last=not by_norm)
        if clipping is not None and self._clipped_at != self.engine.settlements:  # once, for all optimizers
            self._unscaled.check_before_clip()
            grad_norm.clip(self.engine, clipping, norm)
            self._clipped_at = self.engine.settlements
        return norm

    def unscale(self, fqns: list[str], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        """Answer `GradScaler`: unscale the gradients of the optimizer that holds `fqns`, and agree on overflow.

        Every rank then has the same `found_inf`, skips or steps alike, and keeps the same scale. *Collective.*
        """
        self.synchronise()
        grad_dtype = self.engine.bucket_of[fqns[0]].key.grad_dtype
        # The optimizer that GradScaler walks: among those that hold all of these, the one that holds least beside.
        holders = [shards for shards in self.optimizers() if shards.fqns() >= set(fqns)]
        shards = min(holders, key=lambda shards: len(shards.fqns()))
        overflow = torch.zeros(1, dtype=torch.float64, device=self.engine.device)
        overflow += 0.0 if shards.unscale(inverse_scale, grad_dtype=grad_dtype) else 1.0
        ops.all_reduce(overflow, group=self.mesh.world, op="max", control=True).wait()
        found_inf.copy_(torch.maximum(found_inf, overflow.to(found_inf.dtype).view(found_inf.shape)))
        self._unscaled.note({s.fqn for s in shards.shards() if s.bucket.key.grad_dtype == grad_dtype})

    def check_plain_step(self) -> None:
        """Raises OptimizerError: the strategy asks for what only train_batch carries out."""
        steps = self.strategy.accumulate_steps
        if steps > 1 and self.accumulated_weight is None:
            raise OptimizerError(
                f"accumulate_steps = {steps} is carried out by model.train_batch; optimizer.step() in a plain loop "
                "would ignore it. Call model.train_batch, or leave accumulate_steps out and call "
                f"backward() {steps} times before each step"
            )

    def check_unscaled(self, shards: OptimizerShards) -> None:
        """Raises OptimizerError: a step in float16 whose gradients nobody unscaled."""
        amp = self.strategy.amp
        if amp is not None and amp.dtype == "float16" and not self._unscaled.are_all(shards):
            raise OptimizerError(
                "amp_configs.dtype = 'float16' needs loss scaling: use model.train_batch, or in a plain loop "
                "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update() with "
                "scaler = torch.amp.GradScaler(...)"
            )

    def mark_stepped(self, shards: OptimizerShards) -> None:
        self._stepped_at[id(shards)] = self.engine.settlements
        self.may_have_new = True

    def holds_anywhere(self, here: bool) -> bool:
        """Whether something holds on any rank that trains the same parameters. *Collective.*"""
        flag = torch.tensor([float(here)], dtype=torch.float64, device=self.engine.device)
        ops.all_reduce(flag, group=self.mesh.group(*DATA_AXES, "tp"), op="max", control=True).wait()
        return bool(flag.item() > 0)

    def loss_of_all_ranks(self, loss: Any) -> Any:
        """The mean over the data-parallel ranks of what a closure returned; None stays None. *Collective.*

        The sum under loss_reduction "sum".
        """
        if loss is None:
            return None
        group = self.mesh.group(*DATA_AXES)
        here = torch.as_tensor(loss).detach()
        total = here.to(device=self.engine.device, dtype=torch.float64, copy=True)
        ops.all_reduce(total, group=group, control=True).wait()
        if self.strategy.loss_reduction != "sum":
            total /= group.size
        return total.to(here.dtype) if isinstance(loss, torch.Tensor) else total.item()

    # -- accumulation ----------------------------------------------------------------------------------

    @contextmanager
    def reducing(self, enabled: bool) -> Iterator[None]:
        """Inside, a backward pass reduces its gradients, or only accumulates them on this rank."""
        reducer = self.engine.reducer
        reducer.finish_round()
        before = reducer.synchronise
        reducer.synchronise = enabled
        try:
            yield
        finally:
            reducer.synchronise = before

    def zero_grad(self, parameters: list[nn.Parameter] | None = None, *, set_to_none: bool = True) -> None:
        self.engine.zero_grad(parameters, set_to_none=set_to_none)
        self.may_have_new = True
        if (
            parameters is None
            or set(map(id, parameters)).issuperset(map(id, self.engine.trainable_parameters()))
            or not self.has_gradients()
        ):
            self.forget_accumulation()

    def host_transfer_bytes(self) -> dict[str, int]:
        """Bytes copied between device and host since wrapping, by kind and direction."""
        return {} if self.engine.host is None else self.engine.host.transferred_bytes()

    def memory_bytes(self) -> dict[str, int]:
        """Live bytes on this rank of what ZeRO cuts; with offload, what of it is in host memory stands apart."""
        parameters, gradients = self.engine.parameter_bytes(), self.engine.gradient_bytes()
        state = sum(shards.state_bytes() for shards in self.optimizers())
        if self.engine.host is None:
            return {"parameters": parameters, "gradients": gradients, "optimizer_state": state}
        host_parameters, host_gradients = self.engine.host_bytes()
        return {
            "parameters": parameters - host_parameters,
            "gradients": gradients - host_gradients,
            "optimizer_state": 0,
            "host_parameters": host_parameters,
            "host_gradients": host_gradients,
            "host_optimizer_state": state,
        }
