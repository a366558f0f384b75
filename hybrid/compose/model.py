"""`distributed_model`: an ordinary model, rewritten in place into the layout of a strategy.

The order of the rewrites is visible in one function, `distributed_model`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from hybrid import shims
from hybrid.compose import context, grad_norm, model_state
from hybrid.compose import train_step as steps
from hybrid.compose.added_parts import AddedParts
from hybrid.compose.bound_model import BoundModel
from hybrid.compose.compiling import compile_units, refuse_compiled_call
from hybrid.compose.context import DATA_AXES
from hybrid.compose.first_forward import FirstForward, keep_plain
from hybrid.compose.initial_values import (
    InitOrder,
    align_values,
    check_meta,
    find_meta,
    materialise,
    move,
    stand_ins,
)
from hybrid.compose.low_precision import install_precision
from hybrid.compose.model_checks import check_aliases, check_alike_on_all_ranks
from hybrid.compose.model_plan import plan_model
from hybrid.compose.pipeline import known_here, named_once, of_all_stages, share_out, start_pipeline
from hybrid.compose.runtime import Runtime
from hybrid.compose.tensor_parallel import align_random_states, all_group_axes, cut_model, part_of, placements
from hybrid.compose.tied_holders import TiedHolders
from hybrid.compose.watched_step import watched_train_batch
from hybrid.errors import GradientAccessError, ModelError
from hybrid.precision.casting import cast_buffers
from hybrid.profile.step_record import StepCallback
from hybrid.recompute import install_recompute
from hybrid.sharding import state_view
from hybrid.sharding.engine import EngineSettings, ShardingEngine
from hybrid.sharding.units import plan_units
from hybrid.strategy import DistributedStrategy, ResolvedStrategy
from hybrid.weight_gradients import take_over_gradients

__all__ = ["DistributedModel", "distributed_model"]


def distributed_model(
    model: nn.Module, strategy: DistributedStrategy | None = None, *, init: InitOrder | None = None, sample: Any = None
) -> DistributedModel:
    """Rewrite `model` for training over all ranks. Returns the same object, its class extended.

    Starts torch.distributed if nobody has. Parameters become views into flat buckets; their values and the
    buffers are those of the first data-parallel rank everywhere. Names, `isinstance`, attributes and other
    methods of the model stay; `train_batch`, `eval_batch`, `no_sync`, `clip_grad_norm_` and others are added
    (see `DistributedModel`).

    Args:
        model: parameters on one device; on a machine with GPUs it is moved to this rank's GPU. One that was built
            under `with torch.device("meta"):` gets its memory and its initial values here, one parameter at a time.
        strategy: what to do; None takes the one given to `hybrid.init` or, under `hybrid run --strategy`, the file.
        init: for a model on the meta device, how its modules' own initialisation draws: "replay" (default) one
            parameter after the other, as building the model does; "by_name" from a seed of each parameter's name,
            which skips what this rank holds nothing of.
        sample: an input of the first layer, by which the stages of a pipeline are balanced: the flops of each layer
            are measured on its shapes. Without one, layers count by their parameters. (Alone, nothing is balanced.)
            A pipeline of a model that is no chain of layers needs one, a micro-batch as the model is called with it.

    Raises:
        StrategyError: settings that cannot work, or do not fit the model, all of them, before anything starts.
        LaunchError: the processes could not meet.
        ModelError: a model that cannot be trained this way; the message names the parameter.
    """
    plan = plan_model(
        model,
        context.foresee(strategy),
        wrapper=DistributedModel,
        init=init,
        sample=sample,
        engines=[runtime.engine for runtime in context.runtimes()],  # no name: it would keep models that are gone
    )
    planned, planned_stages, is_whole = plan.tensor, plan.stages, plan.is_whole
    scope = context.ensure(strategy)
    mesh, resolved = scope.mesh, scope.resolved
    # chunks -> tensor parallel -> recompute -> precision -> compile -> sharding
    layers = share_out(model, planned_stages, mesh) if planned_stages is not None else None
    if not is_whole:
        check_meta(model, init)
        check_aliases(model)
    move(model, mesh.device)
    everyone = mesh.world if is_whole else mesh.group(*DATA_AXES, "tp")
    check_alike_on_all_ranks(model, everyone)
    align_values(model, everyone, same_part=mesh.group(*DATA_AXES))
    meta = stand_ins(find_meta(model))
    kept = keep_plain(model, planned, resolved)
    is_staged = planned_stages is not None
    cuts = cut_model(model, planned, mesh, is_staged=is_staged) if planned is not None else None
    if resolved.compile is None:
        take_over_gradients(model)
    everything = dict(model.named_parameters())
    stages = None
    if layers is not None and planned_stages is not None:
        stages = start_pipeline(model, layers, planned_stages, mesh)
    units = plan_units(model, class_names=resolved.units) if stages is None else stages.units(model)
    parameters = named_once(model, stages)
    records = placements(model, parameters, cuts, stages)
    mesh.prepare(all_group_axes(records, mesh))
    chosen = plan.units.on(stages)
    if resolved.recompute is not None:
        policy, preserve_rng = resolved.recompute.policy, resolved.recompute.preserve_rng
        traced = chosen.recomputed_in_programs
        install_recompute(
            model, chosen.recomputed, policy=policy, preserve_rng=preserve_rng, keep_buffers=True, compiled=traced
        )
    low_dtypes = install_precision(model, resolved, mesh, stages) if resolved.amp is not None else {}
    if resolved.compile is not None:
        compile_units(model, chosen.compiled, resolved.compile, recomputed=chosen.recomputed)
    engine = ShardingEngine(
        parameters,
        placements=records,
        units=units,
        settings=_engine_settings(resolved),
        coordinates={axis.name: mesh.coordinate(axis.name) for axis in mesh.layout.axes},
        group_of=lambda axes: mesh.group(*axes),
        compute_dtypes=low_dtypes,
        planned_elements=cuts.largest_parts(parameters) if cuts is not None else None,
        world_fqns=stages.whole.trainable if stages is not None else None,
        device=mesh.device,
        peers=lambda: [runtime.engine.reducer for runtime in context.runtimes()],
        # With several backwards per step gradients lie beside activations anyway: to keep their pages costs nothing.
        neighbours=mesh.world if stages is not None or resolved.accumulate_steps > 1 else None,
    )
    if meta:
        order = init or "replay"
        with stages.staged.all_layers() if stages is not None else nullcontext():
            materialise(
                model, engine, meta, everything, order=order, mesh=mesh, seed=resolved.seed, local_part=part_of(cuts)
            )
    if stages is not None:
        stages.forget_the_rest()
        engine.result_dtype = of_all_stages(engine.result_dtype, mesh)
    if resolved.amp is not None and resolved.amp.buffer_dtype != "float32":
        custom_fp32 = known_here(resolved.amp.custom_fp32, model, stages)
        cast_buffers(model, dtype=getattr(torch, resolved.amp.buffer_dtype), custom_fp32=custom_fp32)
    engine.start_unsharding(model)
    if stages is not None and engine.unsharder is not None:
        stages.staged.on_leave = engine.unsharder.abandon_pass
    align_random_states(mesh)
    runtime = Runtime(engine, mesh=mesh, strategy=resolved, cuts=cuts)
    runtime.stages = stages
    model.__class__ = _extended(type(model))
    extended = cast(DistributedModel, model)
    extended.hybrid_runtime = runtime
    runtime.model = weakref.ref(extended)
    runtime.parts = AddedParts(extended, engine, stages)
    runtime.tied = TiedHolders(engine, stages, mesh) if stages is not None else None
    programs = chosen.compiled if chosen.recomputed_in_programs else ()
    extended.hybrid_first_forward = FirstForward.watch(model, planned, cuts, kept=kept, mesh=mesh, in_programs=programs)
    if cuts is not None:
        runtime.watch_reads(extended, cuts)
    extended.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True)
    context.remember(runtime)
    context.seed_for_training(resolved, mesh)
    return extended


class DistributedModel(BoundModel):
    """What `distributed_model` adds to a model's class. Methods marked *collective* are called by all ranks."""

    hybrid_runtime: Runtime
    hybrid_first_forward: FirstForward | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the plain model's; a forward that is left by an exception leaves a model that can go on."""
        if torch.compiler.is_compiling():
            refuse_compiled_call(type(self).__name__)
        try:
            return super().__call__(*args, **kwargs)
        except BaseException as error:
            if self.hybrid_runtime.engine.unsharder is not None:
                self.hybrid_runtime.engine.unsharder.abandon_pass()
            first = self.hybrid_first_forward
            if first is not None and (explained := first.explained(self, error)) is not None:
                raise explained from error
            raise

    def train_batch(
        self,
        batch: Any,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        scaler: Any = None,
        loss_fn: steps.LossFunction | None = None,
        step: bool = True,
        forward_step: steps.ForwardStep | None = None,
    ) -> steps.StepResult:
        """Train on this rank's batch: micro-batches, backward, reduction, clip, update, schedule. *Collective.*

        Args:
            batch: a dict (calls `model(**batch)` and takes its `.loss`), `(inputs, labels)` with `loss_fn`, or
                anything that `forward_step(model, micro_batch)` understands. Tensors have samples on dim 0; the
                batch is cut into `accumulate_steps` micro-batches. It may be shorter or empty on some ranks.
            optimizer: from `distributed_optimizer`.
            lr_scheduler: stepped once per update that was not skipped.
            scaler: a `torch.amp.GradScaler` for loss scaling; with `amp_configs.dtype = "float16"` the strategy has its
                own.
            loss_fn: `loss_fn(output, labels)` -> a scalar mean over the samples (their sum under loss_reduction
                "sum"), or a pair (sum, count) for a mean over tokens.
            step: False only accumulates; the next call with True updates with the mean over all calls.
            forward_step: returns what `loss_fn` may return.

        Raises:
            BatchError: a batch that does not fit, or no way to a loss.
            OptimizerError: an optimizer of another model, or not a distributed one.
        """
        return watched_train_batch(
            self,
            self.hybrid_runtime,
            batch,
            optimizer,
            lr_scheduler=lr_scheduler,
            scaler=scaler,
            loss_fn=loss_fn,
            step=step,
            forward_step=forward_step,
        )

    def eval_batch(
        self, batch: Any, loss_fn: steps.LossFunction | None = None, forward_step: steps.ForwardStep | None = None
    ) -> steps.EvalResult:
        """Loss of the world's batch in eval mode, without gradients; arguments as `train_batch`. *Collective.*"""
        return steps.eval_batch(self, self.hybrid_runtime, batch, loss_fn=loss_fn, forward_step=forward_step)

    def add_step_callback(self, callback: StepCallback, *, first_step: int = 1) -> Callable[[], None]:
        """`callback(StepRecord)` after each step of `train_batch`, the next of number `first_step`; returns its end."""
        return self.hybrid_runtime.step_callbacks.add(callback, first_step=first_step)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward only accumulates on this rank; the next one outside, or the step, reduces it all."""
        return self.hybrid_runtime.reducing(False)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip to a global norm over all parameters and ranks; returns the norm before. *Collective.*

        As `torch.nn.utils.clip_grad_norm_` on one process: gradients times min(1, max_norm / (norm + 1e-6)).
        """
        norm = self.hybrid_runtime.synchronise(norm_type=float(norm_type))
        assert norm is not None
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise GradientAccessError(f"the gradient norm of order {norm_type} is {norm.item()}: cannot clip by it")
        grad_norm.clip_by_norm(self.hybrid_runtime.engine, norm, max_norm=float(max_norm))
        return norm.to(self.hybrid_runtime.engine.result_dtype)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]. *Collective* (gradients are reduced first)."""
        self.hybrid_runtime.synchronise()
        grad_norm.clip_by_value(self.hybrid_runtime.engine, clip_value=float(clip_value))

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """(fqn, whole gradient) of every trainable parameter; None without one. *Collective*, to its end.

        One bucket is whole at a time; with a pipeline, all of the model's gradients.
        """
        runtime = self.hybrid_runtime
        runtime.check_parts()
        runtime.synchronise()
        own = (
            (fqn, None if gradient is None else runtime.whole(fqn, gradient))
            for bucket in runtime.engine.buckets
            for fqn, gradient in state_view.bucket_gradients(runtime.engine, bucket)
        )
        if runtime.stages is None:
            yield from own
        else:
            yield from model_state.over_stages(dict(own), runtime, order=runtime.stages.whole.trainable).items()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As the plain model's; on a pipeline stage that trains none also an empty one, to build an optimizer with."""
        stages = vars(self)["hybrid_runtime"].stages if "hybrid_runtime" in vars(self) else None
        if stages is not None and stages.elsewhere:
            yield from stages.staged.loss_scope.first_elsewhere(next(iter(stages.elsewhere.values())))
        trains = False
        for parameter in super().parameters(recurse):
            trains = trains or parameter.requires_grad
            yield parameter
        if not trains and stages is not None:
            yield stages.stand_in

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empty every gradient buffer, local and reduced."""
        self.hybrid_runtime.zero_grad(set_to_none=set_to_none)

    def describe(self) -> str:
        """The map parameter -> bucket, range, shard, and the bytes on this rank, as text."""
        runtime = self.hybrid_runtime
        sizes = ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in runtime.memory_bytes().items())
        mesh = runtime.mesh
        head = f"rank {mesh.rank} of {mesh.world_size}, stage {runtime.strategy.zero_stage}; live: {sizes}"
        return f"{head}\n{state_view.describe(runtime.engine, runtime.optimizers())}"

    def memory_bytes(self) -> dict[str, int]:
        """Live bytes: parameters (with masters), gradients, optimizer_state; under offload also host_parameters ..."""
        return self.hybrid_runtime.memory_bytes()

    def host_transfer_bytes(self) -> dict[str, int]:
        """Bytes of state copied for offload since wrapping, on this rank: "gradients to host" ...; empty without it."""
        return self.hybrid_runtime.host_transfer_bytes()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The plain model's state dict: its names and shapes, whole values.

        References as in plain torch; at stage 3, under tensor parallel and with a pipeline copies, *collective* then.
        """
        engine = self.hybrid_runtime.engine
        if self.hybrid_runtime.cuts is not None or self.hybrid_runtime.stages is not None:
            plain = functools.partial(super().state_dict, *args, **kwargs)
            return model_state.full_state_dict(self, self.hybrid_runtime, plain=plain)
        with engine.whole():
            result: dict[str, Any] = super().state_dict(*args, **kwargs)
            if engine.unsharder is not None:
                copies: dict[tuple[Any, ...], torch.Tensor] = {}  # tied parameters stay one tensor
                for name, value in result.items():
                    if isinstance(value, torch.Tensor):
                        key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
                        result[name] = copies.setdefault(key, value.clone())
        return result

    def full_state_dict(self) -> dict[str, Any]:
        """Copies on the CPU of the plain model's whole state dict, in its types, the same on every rank. *Collective.*

        A float32 parameter that computes in low precision comes as its master. Buffers (BatchNorm statistics are each
        rank's own) are those of the first data-parallel rank.
        """
        return model_state.full_state_dict(self, self.hybrid_runtime, plain=super().state_dict)

    def shard_state_dict(self) -> dict[str, tuple[tuple[int, int], torch.Tensor]]:
        """fqn -> (range of elements in memory order, this rank's slice) of each parameter that it owns a part of.

        Under tensor parallel the ranges are within the tp rank's part.
        """
        engine = self.hybrid_runtime.engine
        engine.gather.finish()
        return {
            part.fqn: ((part.start, part.stop), bucket.slice_view(bucket.own_data(), part).detach().clone())
            for bucket in engine.buckets
            for part in bucket.slices
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As the plain model's. Every rank loads the same values; masters take them in the precision given.

        Raises:
            ModelError: `assign=True`, which would put the parameters outside their buckets.
        """
        if assign:
            raise ModelError(
                "load_state_dict(assign=True) would take parameters out of their buckets; use assign=False"
            )
        load = super().load_state_dict
        with model_state.loading(self.hybrid_runtime):
            if self.hybrid_runtime.stages is not None:
                own = list(super().state_dict(keep_vars=True))
                return model_state.load_stage(self.hybrid_runtime, state_dict, own=own, strict=strict, load=load)
            return load(state_dict, strict=strict)

    def gather_parameters(
        self, parameters: str | nn.Parameter | Sequence[str | nn.Parameter] | None = None
    ) -> AbstractContextManager[None]:
        """Inside, these parameters are whole and may be read and edited in place; edits count on leaving.

        *Collective* at stage 3, and every rank must make the same edit; at stages 0–2 values are whole anyway, and
        this only carries edits into fp32 masters. A parameter that is cut over tensor-parallel ranks shows this
        rank's part (`hybrid.full_parameter` and `hybrid.set_full_parameter` join and cut).

        Args:
            parameters: fqns, names of modules, or parameters; None for all.

        Raises:
            ModelError: a name or parameter that is not in the model.
        """
        engine = self.hybrid_runtime.engine
        if parameters is None:
            return engine.whole()
        asked = [parameters] if isinstance(parameters, str | nn.Parameter) else list(parameters)
        fqns: list[str] = []
        for one in asked:
            found = (
                [fqn for fqn in engine.parameters if fqn == one or fqn.startswith(f"{one}.")]
                if isinstance(one, str)
                else [fqn for fqn in (engine.fqn_of.get(id(one)),) if fqn is not None]
            )
            if not found:
                what = repr(one) if isinstance(one, str) else f"a parameter of shape {tuple(one.shape)}"
                raise ModelError(f"gather_parameters: {what} is not in the model")
            fqns += found
        return engine.whole(fqns)


_extended_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def _extended(base: type[nn.Module]) -> type[nn.Module]:
    if base not in _extended_classes:
        # Under the name of the plain class: files that record it (a Hugging Face config) stay those of the plain model.
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        _extended_classes[base] = type(base.__name__, (DistributedModel, base), names)
    extended: type[nn.Module] = _extended_classes[base]
    return extended


def _before_forward(model: nn.Module, args: Any, kwargs: Any) -> None:
    """A backward that raised leaves a round open; close it before the next one begins (not in a recompute)."""
    if not shims.in_backward():
        runtime = cast(DistributedModel, model).hybrid_runtime
        runtime.engine.reducer.finish_round()
        runtime.engine.check_memory()
        if runtime.stages is None:  # else done by train_batch and eval_batch: a chunk's input is not the batch
            runtime.check_batch((args, kwargs))


def _engine_settings(resolved: ResolvedStrategy) -> EngineSettings:
    return EngineSettings(
        zero_stage=resolved.zero_stage,
        bucket_bytes=resolved.bucket_bytes,
        overlap_comm=resolved.overlap_comm,
        grad_dtype=resolved.grad_dtype,
        reduce_dtype=resolved.reduce_dtype,
        partition="parameter" if resolved.partition == "parameter" else "element",
        prefetch=resolved.prefetch,
        keep_for_a_run=resolved.reshard_after == "run",
        offload=resolved.offload,
    )
