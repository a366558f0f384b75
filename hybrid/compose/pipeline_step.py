"""One training step through a pipeline: the schedule's actions, with gradients reduced as the strategy says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hybrid.compose.batch import num_samples
from hybrid.compose.losses import LossFunction, add_loss
from hybrid.compose.own_forward import draw_seed, inputs_and_labels, loss_of
from hybrid.compose.runtime import Runtime
from hybrid.contracts.schedule import Action, ActionKind, fewer_micro_batches
from hybrid.errors import BatchError
from hybrid.pipeline.own_forward import OwnForwardModel

__all__ = ["evaluate_pipeline", "reduces_after", "train_pipeline"]


def reduces_after(grad_reduce: str | int, *, index: int, last: int, step: bool) -> bool:
    """Whether micro-batch `index` reduces. What is left local when the step comes is reduced there."""
    if grad_reduce == "every_micro_batch":
        return True
    if isinstance(grad_reduce, int) and (index + 1) % grad_reduce == 0:
        return True
    return index == last and step


def train_pipeline(
    runtime: Runtime,
    micro_batches: Sequence[Any],
    loss_fn: LossFunction | None,
    totals: torch.Tensor,
    *,
    scaler: torch.amp.GradScaler | None,
    step: bool,
) -> None:
    """Forward and backward of all micro-batches on this rank's chunks; the last stage adds to `totals`.

    The sixth of `totals` counts the micro-batches whose loss has no graph.
    """
    stages, reducer, strategy = runtime.stages, runtime.engine.reducer, runtime.strategy
    assert stages is not None
    stages.runner.begin()
    micro_batches = [micro_batch for micro_batch in micro_batches if num_samples(micro_batch) > 0]
    pairs, loss_fn = _pairs(runtime, micro_batches, loss_fn)
    schedule = fewer_micro_batches(stages.schedule, len(pairs)) if pairs else None
    last = len(micro_batches) - 1
    reducing: list[AbstractContextManager[None]] = []
    chunk: int | None = None

    def loss(micro_batch: int, output: Any) -> torch.Tensor:
        with stages.staged.loss_scope.running():
            loss = loss_fn(output, pairs[micro_batch][1])
        loss_sum = add_loss(loss, micro_batches[micro_batch], totals, strategy.loss_reduction)
        totals[5] += float(not loss_sum.requires_grad)
        return loss_sum if scaler is None else scaler.scale(loss_sum)

    def sends_early(action: Action) -> bool:
        # Gradients that are reduced as they come have little memory at a time: all at the end of the backward, less so.
        index = action.micro_batch
        come_alone = index == 0 or reduces_after(strategy.grad_reduce, index=index - 1, last=last, step=step)
        reduced = reduces_after(strategy.grad_reduce, index=index, last=last, step=step)
        return not (strategy.zero_stage >= 2 and reduced and come_alone)

    def before(action: Action) -> None:
        nonlocal chunk
        if action.chunk != chunk:
            runtime.engine.end_run()
            chunk = action.chunk

    def before_backward(action: Action) -> None:
        stages.staged.begin_backward(action.chunk, action.micro_batch)
        # The first half of a split backward gives nothing to reduce.
        reduce_now = action.kind is not ActionKind.I and reduces_after(
            strategy.grad_reduce, index=action.micro_batch, last=last, step=step
        )
        reducer.chunk = action.chunk if len(stages.staged.chunks_here()) > 1 else None
        reducing.append(runtime.reducing(reduce_now))
        reducing[-1].__enter__()

    def after_backward(action: Action) -> None:
        if reducer.synchronise:
            reducer.full_round()
        reducing.pop().__exit__(None, None, None)

    if scaler is not None:
        # Only the last stage has a loss; the others' scaler must know its scale as well.
        scaler.scale(torch.zeros((), device=runtime.engine.device))
    try:
        with _batch(runtime, [inputs for inputs, _ in pairs]):
            stages.runner.run(
                schedule.actions[stages.staged.stage] if schedule is not None else (),
                inputs=lambda micro_batch: pairs[micro_batch][0],
                loss=loss,
                sends_early=sends_early,
                before=before,
                before_backward=before_backward,
                after_backward=after_backward,
            )
    finally:
        while reducing:
            reducing.pop().__exit__(None, None, None)
        reducer.chunk = None


def evaluate_pipeline(
    runtime: Runtime,
    pieces: Sequence[Any],
    loss_fn: LossFunction | None,
    totals: torch.Tensor,
    *,
    note: Callable[[Any, Any], None] = lambda output, labels: None,
) -> None:
    """Forward of all micro-batches; the last stage adds to `totals`.

    Args:
        note: is told there of each output, and of its labels (of a dict, of all that is in it).
    """
    stages = runtime.stages
    assert stages is not None
    stages.runner.begin()
    pieces = [piece for piece in pieces if num_samples(piece) > 0]
    pairs, loss_fn = _pairs(runtime, pieces, loss_fn)

    def loss(micro_batch: int, output: Any) -> torch.Tensor:
        piece = pieces[micro_batch]
        note(output, piece if isinstance(piece, Mapping) else pairs[micro_batch][1])
        with stages.staged.loss_scope.running():
            loss = loss_fn(output, pairs[micro_batch][1])
        return add_loss(loss, pieces[micro_batch], totals, runtime.strategy.loss_reduction)

    actions = [
        Action(kind=ActionKind.F, chunk=chunk, micro_batch=micro_batch)
        for micro_batch in range(len(pieces))
        for chunk in stages.staged.chunks_here()
    ]
    # So that no rank waits for a micro-batch to come round to its next chunk while others could go through. What a
    # forward reads stands before it in this order, on whatever rank: nobody waits for ever.
    num_here = len(stages.staged.chunks_here())
    actions.sort(key=lambda action: action.chunk + num_here * action.micro_batch)
    with _batch(runtime, [inputs for inputs, _ in pairs]):
        stages.runner.evaluate(actions, inputs=lambda micro_batch: pairs[micro_batch][0], loss=loss)


def _batch(runtime: Runtime, inputs: Sequence[Any]) -> AbstractContextManager[None]:
    """For a model that is cut by its own forward, which every chunk calls with the inputs."""
    assert runtime.stages is not None
    staged = runtime.stages.staged
    if not isinstance(staged, OwnForwardModel):
        return nullcontext()
    return staged.batch(inputs, seed=draw_seed(runtime.mesh))


def _pairs(
    runtime: Runtime, micro_batches: Sequence[Any], loss_fn: LossFunction | None
) -> tuple[list[tuple[Any, Any]], LossFunction]:
    """((what the first layer gets or the model is called with, labels) of each micro-batch, the loss function)."""
    assert runtime.stages is not None
    if isinstance(runtime.stages.staged, OwnForwardModel):
        pairs = [inputs_and_labels(one, has_loss_fn=loss_fn is not None) for one in micro_batches]
        return pairs, loss_fn if loss_fn is not None else lambda output, _: loss_of(output)
    loss_fn = _loss_function(runtime, loss_fn)
    return [_pair(micro_batch) for micro_batch in micro_batches], loss_fn


def _loss_function(runtime: Runtime, given: LossFunction | None) -> LossFunction:
    assert runtime.stages is not None
    found = given if given is not None else runtime.stages.loss_fn
    if found is None:
        raise BatchError("a pipeline needs loss_fn(output, labels): give it to train_batch, or to hybrid.PipelineLayer")
    return found


def _pair(micro_batch: Any) -> tuple[Any, Any]:
    """(what the first layer gets, labels)."""
    if not isinstance(micro_batch, tuple | list) or len(micro_batch) != 2:
        raise BatchError(
            f"a batch of type {type(micro_batch).__name__} with a pipeline: give (inputs, labels), the inputs for the "
            "first layer and the labels for loss_fn"
        )
    inputs, labels = micro_batch
    if isinstance(inputs, tuple | list) and len(inputs) == 1:
        inputs = inputs[0]
    return inputs, labels
