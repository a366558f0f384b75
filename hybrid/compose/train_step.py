"""One training step over a batch: micro-batches, loss, gradient scaling, clip, update, schedule.

This is the one place where gradients are scaled. Each micro-batch's backward runs on a *sum* (its mean loss
times its samples, or the sum that the loss function gave); the sum over micro-batches, calls and ranks is
divided once, by the samples or tokens behind it in the whole world. So batches that do not divide, ranks with
fewer samples and ranks with none give what one process gives on the whole batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid.collectives import ops
from hybrid.collectives.ranges import RangeKind, named_range
from hybrid.compose.batch import num_samples, on_device, split_batch
from hybrid.compose.context import DATA_AXES
from hybrid.compose.label_counts import NUM_LABEL_SUMS, check_even_labels, check_item_count
from hybrid.compose.loss_scale import record_overflow, unscale_gradients
from hybrid.compose.losses import ForwardStep, LossFunction, check_functions, run_forward
from hybrid.compose.optimizer import DistributedOptimizer
from hybrid.compose.pipeline_step import evaluate_pipeline, reduces_after, train_pipeline
from hybrid.compose.runtime import Runtime
from hybrid.compose.short_batch import warn_of_short_batch
from hybrid.errors import BatchError, ModelError, OptimizerError

__all__ = ["NUM_TOTALS", "EvalResult", "StepResult", "eval_batch", "evaluating", "mean_of", "train_batch"]

NUM_TOTALS = 6 + NUM_LABEL_SUMS
"""Numbers of a step that are summed over the world: loss, weight, samples, tokens, two flags, and of the labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did. Tensors are 0-d and equal on all ranks; nothing waits for the device until they are read.

    loss: mean over all samples (or tokens) of the world's batch; the sum under loss_reduction "sum"; 0 if there
        were none.
    grad_norm: global norm before clipping, in the strategy's norm type; None with `step=False`.
    skipped: whether the update was left out (no sample or token in the whole batch; overflow under loss scaling).
    seconds: wall time of the call on this rank.
    totals: fp64 tensor (loss sum, weight, samples, tokens), summed over the world.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    skipped: bool
    seconds: float
    totals: torch.Tensor

    @property
    def samples(self) -> int:
        """Samples of the whole world's batch."""
        return int(self.totals[2].item())

    @property
    def tokens(self) -> int:
        """Tokens of the whole world's batch: the count the loss function gave; else elements of the first integer
        tensor of the batch with two dims or more; else samples."""
        return int(self.totals[3].item())


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Loss over the world's batch (0 if it is empty), and the samples or tokens that it is the mean of."""

    loss: torch.Tensor
    count: torch.Tensor


def train_batch(
    model: nn.Module,
    runtime: Runtime,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    *,
    lr_scheduler: Any = None,
    scaler: Any = None,
    loss_fn: LossFunction | None = None,
    step: bool = True,
    forward_step: ForwardStep | None = None,
) -> StepResult:
    """See `DistributedModel.train_batch`."""
    started_seconds = time.perf_counter()
    if not torch.is_grad_enabled():
        raise ModelError(
            "train_batch inside torch.no_grad() or torch.inference_mode(): nothing could be trained there. Call it "
            "outside, or eval_batch for a loss without gradients"
        )
    runtime.recover()
    runtime.engine.adopt_hand_made_changes()
    _check_arguments(runtime, optimizer, step)
    runtime.check_parts()
    _check_forward_step(runtime, forward_step)
    if runtime.stages is not None:
        check_functions("train_batch", loss_fn=loss_fn)
    _check_item_count(runtime, batch, adds_up=not step or runtime.accumulated_weight is not None)
    runtime.check_batch(batch)
    if step and runtime.accumulated_weight is None:  # over several calls the sizes are those of each call
        warn_of_short_batch(runtime, batch)
    runtime.has_trained_batch = True
    scaler = _choose_scaler(runtime, scaler)
    strategy, reducer = runtime.strategy, runtime.engine.reducer
    micro_batches = split_batch(
        batch, accumulate_steps=strategy.accumulate_steps, micro_batch_size=strategy.micro_batch_size
    )
    micro_batches = on_device(micro_batches, runtime.engine.device)
    totals = torch.zeros(NUM_TOTALS, dtype=torch.float64, device=runtime.engine.device)
    _check_samples_everywhere(runtime, micro_batches)
    totals[4] = float(reducer.dropped_by_hand)
    reducer.dropped_by_hand = False
    totals_handle: ops.Handle | None = None
    last = len(micro_batches) - 1
    reducer.defer_end = True
    runtime.may_have_new = True
    try:
        if runtime.stages is not None:
            train_pipeline(runtime, micro_batches, loss_fn, totals, scaler=scaler, step=step)
            totals_handle = ops.all_reduce(totals, group=runtime.mesh.group(*DATA_AXES, "pp"), control=True)
        for index, micro_batch in enumerate(micro_batches if runtime.stages is None else ()):
            reduce_now = reduces_after(strategy.grad_reduce, index=index, last=last, step=step)
            with named_range("forward micro-batch", index, RangeKind.FORWARD):
                loss_sum = run_forward(model, micro_batch, loss_fn, forward_step, totals, strategy.loss_reduction)
            if index == last:
                # Under way during the last backward, so that its latency costs nothing.
                totals_handle = ops.all_reduce(totals, group=runtime.mesh.group(*DATA_AXES), control=True)
            with named_range("backward micro-batch", index, RangeKind.BACKWARD), runtime.reducing(reduce_now):
                if loss_sum is not None:
                    (loss_sum if scaler is None else scaler.scale(loss_sum)).backward()
                if reduce_now:
                    reducer.full_round()  # also where this rank had no sample: every rank makes the same rounds
    except BaseException:
        runtime.mark_failed()
        raise
    finally:
        reducer.defer_end = False
    runtime.engine.end_run()
    assert totals_handle is not None
    totals_handle.wait()
    if runtime.stages is not None:
        _check_graph(runtime, totals[5])
    loss = mean_of(totals[0], totals[1], strategy.loss_reduction).to(runtime.engine.result_dtype)
    before = runtime.accumulated_weight if totals[4].item() == 0 else None
    _check_labels(runtime, totals[-NUM_LABEL_SUMS:], micro_batches, adds_up=before is not None)
    runtime.accumulated_weight = totals[1].clone() if before is None else before + totals[1]
    grad_norm, skipped = None, False
    if step:
        assert isinstance(optimizer, DistributedOptimizer)
        grad_norm, skipped = _update(runtime, optimizer, scaler)
        if lr_scheduler is not None and not skipped:
            _advance(lr_scheduler, loss)
    return StepResult(
        loss=loss,
        grad_norm=None if grad_norm is None else grad_norm.to(runtime.engine.result_dtype),
        skipped=skipped,
        seconds=time.perf_counter() - started_seconds,
        totals=totals[:4],
    )


def eval_batch(
    model: nn.Module,
    runtime: Runtime,
    batch: Any,
    *,
    loss_fn: LossFunction | None = None,
    forward_step: ForwardStep | None = None,
) -> EvalResult:
    """See `DistributedModel.eval_batch`."""
    strategy = runtime.strategy
    _check_forward_step(runtime, forward_step)
    if runtime.stages is not None:
        check_functions("eval_batch", loss_fn=loss_fn)
    runtime.check_parts()
    _check_item_count(runtime, batch, adds_up=False)
    runtime.check_batch(batch)
    totals = torch.zeros(NUM_TOTALS, dtype=torch.float64, device=runtime.engine.device)
    with evaluating(model), torch.no_grad():
        pieces = split_batch(
            batch,
            accumulate_steps=strategy.accumulate_steps,
            micro_batch_size=strategy.micro_batch_size,
            training=False,
        )
        pieces = on_device(pieces, runtime.engine.device)
        _check_samples_everywhere(runtime, pieces)
        if runtime.stages is not None:
            evaluate_pipeline(runtime, pieces, loss_fn, totals)
        for micro_batch in pieces if runtime.stages is None else ():
            run_forward(model, micro_batch, loss_fn, forward_step, totals, strategy.loss_reduction)
    ops.all_reduce(totals, group=runtime.mesh.group(*DATA_AXES, "pp"), control=True).wait()
    check_even_labels(totals[-NUM_LABEL_SUMS:], pieces)
    loss = mean_of(totals[0], totals[1], strategy.loss_reduction).to(runtime.engine.result_dtype)
    return EvalResult(loss=loss, count=totals[1])


def _check_samples_everywhere(runtime: Runtime, micro_batches: list[Any]) -> None:
    """At stage 3 every rank takes part in gathering for each forward, so each needs a sample; asked of all ranks.

    Raises:
        BatchError: a rank has an empty micro-batch; raised on every rank.
    """
    if runtime.engine.unsharder is None and runtime.stages is None:
        return
    where, other = ("at stage 3", ", or stage 2") if runtime.stages is None else ("with a pipeline", "")
    has_samples = [float(num_samples(micro_batch) > 0) for micro_batch in micro_batches]
    ranks_with = torch.tensor(has_samples, dtype=torch.float64, device=runtime.engine.device)
    ops.all_reduce(ranks_with, group=runtime.mesh.world, control=True).wait()
    for index, count in enumerate(ranks_with.tolist()):
        if 0 < count < runtime.mesh.world_size:  # empty on every rank is fine: nobody runs a forward
            own = "has samples" if has_samples[index] else "is empty"
            raise BatchError(
                f"an empty micro-batch {where}: number {index + 1} of {len(micro_batches)} {own} on this rank, and "
                f"has samples on {count:.0f} of {runtime.mesh.world_size} ranks; all ranks work on each micro-batch "
                "together there, so each needs a sample. Use a sampler whose tail is not empty (tail='fold'), or fewer "
                f"accumulate_steps{other}"
            )


def _check_graph(runtime: Runtime, without: torch.Tensor) -> None:
    """Raises ModelError, on all ranks: a loss from which no backward can start; only the last stage has seen it."""
    if (count := without.item()) > 0:
        runtime.mark_failed()
        raise ModelError(
            f"the loss of {count:.0f} micro-batches (over all pipelines) does not depend on anything that is trained: "
            "loss_fn detaches the output, computes without gradients, or every parameter that the loss depends on is "
            "frozen. Return a loss that is computed from the output"
        )


def _check_item_count(runtime: Runtime, batch: Any, *, adds_up: bool) -> None:
    strategy = runtime.strategy
    is_whole = not adds_up and strategy.data_parallel_size * strategy.accumulate_steps == 1
    check_item_count(batch, is_whole=is_whole, loss_reduction=strategy.loss_reduction)


def _check_labels(runtime: Runtime, sums: torch.Tensor, micro_batches: list[Any], *, adds_up: bool) -> None:
    """Raises BatchError, on all ranks: the loss is a mean of means that is not the mean over the whole batch."""
    if adds_up and runtime.accumulated_labels is not None:
        sums = sums + runtime.accumulated_labels
    try:
        check_even_labels(sums, micro_batches)
    except BatchError:
        runtime.mark_failed()
        raise
    runtime.accumulated_labels = sums.clone()


def _choose_scaler(runtime: Runtime, scaler: Any) -> torch.amp.GradScaler | None:
    """The caller's scaler, else the strategy's (float16)."""
    if scaler is None:
        return runtime.scaler
    if not isinstance(scaler, torch.amp.GradScaler):
        raise OptimizerError(f"train_batch(scaler=...) needs a torch.amp.GradScaler, got {type(scaler).__name__}")
    if runtime.scaler is not None:
        raise OptimizerError(
            "two loss scalers: the strategy's (amp_configs.dtype = 'float16') and the one given to train_batch; "
            "leave `scaler` out, or the strategy's amp"
        )
    return scaler if scaler.is_enabled() else None


def _check_forward_step(runtime: Runtime, forward_step: ForwardStep | None) -> None:
    if runtime.stages is not None and forward_step is not None:
        raise BatchError("forward_step with a pipeline: no rank has the whole model; give (inputs, labels) and loss_fn")


def _check_arguments(runtime: Runtime, optimizer: Any, step: bool) -> None:
    if step and not isinstance(optimizer, DistributedOptimizer):
        raise OptimizerError(
            "train_batch needs the optimizer that hybrid.distributed_optimizer returned, got "
            f"{type(optimizer).__name__}; give step=False to accumulate only"
        )
    if isinstance(optimizer, DistributedOptimizer) and optimizer.hybrid_runtime is not runtime:
        raise OptimizerError("train_batch was given the optimizer of another wrapped model")
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.check_closure_free("train_batch")
    if runtime.accumulated_weight is None and runtime.engine.reducer.saw_plain_backward:
        raise ModelError(
            "train_batch found gradients of an earlier backward() in the model: call optimizer.step() and "
            "optimizer.zero_grad(), or model.zero_grad(), first"
        )


def mean_of(loss_sum: torch.Tensor, weight: torch.Tensor, loss_reduction: str) -> torch.Tensor:
    if loss_reduction == "sum":
        return loss_sum.clone()
    return torch.where(weight > 0, loss_sum / weight.clamp(min=1e-300), torch.zeros_like(loss_sum))


def _update(
    runtime: Runtime, optimizer: DistributedOptimizer, scaler: torch.amp.GradScaler | None
) -> tuple[torch.Tensor | None, bool]:
    """Settle with the one scale, unscale, clip, step, empty.

    A batch without any sample or token changes nothing; nor does one whose scaled gradients overflowed anywhere.
    """
    runtime.engine.check_unchanged()
    assert runtime.accumulated_weight is not None
    skipped = runtime.accumulated_weight.item() <= 0
    overflow: bool | None = None
    if scaler is not None:
        runtime.synchronise(shards=optimizer.hybrid_shards)
        if runtime.has_gradient_anywhere():
            overflow = unscale_gradients(runtime, scaler)
    with named_range("settle, norm and clip"):
        grad_norm = runtime.synchronise_and_clip(shards=optimizer.hybrid_shards, want_norm=True)
    if scaler is not None and overflow is not None:
        assert grad_norm is not None
        skipped = skipped or overflow or not bool(torch.isfinite(grad_norm))
        record_overflow(scaler, overflow=overflow, device=runtime.engine.device)
    if not skipped:
        with named_range("optimizer step", kind=RangeKind.OPTIMIZER):
            optimizer.step_settled(deferred=runtime.strategy.overlap_param_gather)
    if runtime.tied is not None:
        runtime.tied.note()
    runtime.zero_grad()
    return grad_norm, skipped


def _advance(lr_scheduler: Any, loss: torch.Tensor) -> None:
    if isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        lr_scheduler.step(loss.item())
    else:
        lr_scheduler.step()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module has the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
