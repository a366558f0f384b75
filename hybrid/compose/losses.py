"""From a micro-batch to the loss that backward starts from: a sum, and the samples or tokens behind it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hybrid.compose.batch import num_samples, num_tokens
from hybrid.compose.label_counts import NUM_LABEL_SUMS, label_sums
from hybrid.errors import BatchError
from hybrid.pipeline.layers import PipelineLayer, is_chain

__all__ = ["ForwardStep", "LossFunction", "add_loss", "check_functions", "run_forward"]

LossFunction = Callable[..., Any]
ForwardStep = Callable[[nn.Module, Any], Any]


def check_functions(call: str, **given: object) -> None:
    """That each of these can be called with two arguments.

    To be called on all ranks: of a pipeline only the last stage calls them, and all others would wait for it.

    Raises:
        BatchError: one cannot.
    """
    for name, function in given.items():
        if function is None:
            continue
        arguments = "model, micro_batch" if name == "forward_step" else "output, labels"
        wanted = f"{call}: {name} must be a function {name}({arguments})"
        if not callable(function):
            hint = ""
            if name == "metrics" and isinstance(function, Mapping):
                hint = '; it returns the mapping: lambda output, labels: {"accuracy": (correct, seen)}'
            raise BatchError(f"{wanted}, got {type(function).__name__}{hint}")
        try:
            inspect.signature(function.forward if isinstance(function, nn.Module) else function).bind(None, None)
        except ValueError:  # of some functions in C nobody knows the arguments
            continue
        except TypeError as error:
            raise BatchError(f"{wanted}, and it cannot be called with two arguments: {error}") from None


def run_forward(
    model: nn.Module,
    micro_batch: Any,
    loss_fn: LossFunction | None,
    forward_step: ForwardStep | None,
    totals: torch.Tensor,
    loss_reduction: str,
) -> torch.Tensor | None:
    """Run forward and loss; add to `totals`; return the sum to run backward on, None if there is no sample."""
    samples = num_samples(micro_batch)
    if samples == 0:
        return None
    return add_loss(_call(model, micro_batch, loss_fn, forward_step), micro_batch, totals, loss_reduction)


def add_loss(output: Any, micro_batch: Any, totals: torch.Tensor, loss_reduction: str) -> torch.Tensor:
    """Add what the loss function gave for a micro-batch to `totals`; returns the sum to run backward on.

    Args:
        output: a scalar mean over the samples, or a pair (sum, count).
        micro_batch: for the number of its samples and tokens.
        totals: (loss sum, weight, samples, tokens, ..., label sums), fp64.
        loss_reduction: "mean" or "sum".

    Raises:
        BatchError: anything else.
    """
    samples = num_samples(micro_batch)
    tokens: int | torch.Tensor = num_tokens(micro_batch)
    if isinstance(output, tuple | list) and len(output) == 2:
        loss_sum, count = output
        _check_scalar(loss_sum)
        loss_sum = loss_sum.reshape(())
        _check_count(count)
        weight = tokens = count.detach().double().reshape(()) if isinstance(count, torch.Tensor) else count
    else:
        _check_scalar(output)
        output = output.reshape(())
        loss_sum = output if loss_reduction == "sum" else output * samples
        weight = samples
        if loss_reduction == "mean":
            totals[-NUM_LABEL_SUMS:] += label_sums(micro_batch, samples, device=totals.device)
    totals[:4] += torch.stack(
        [
            v.to(totals)
            if isinstance(v, torch.Tensor)
            else torch.full((), v, dtype=totals.dtype, device=totals.device)  # a copy to CUDA would keep the host
            for v in (loss_sum.detach(), weight, samples, tokens)
        ]
    )
    result: torch.Tensor = loss_sum
    return result


def _call(model: nn.Module, micro_batch: Any, loss_fn: LossFunction | None, forward_step: ForwardStep | None) -> Any:
    if forward_step is not None:
        if loss_fn is not None:
            raise BatchError(
                "give forward_step or loss_fn, not both: forward_step(model, micro_batch) returns the loss"
            )
        return forward_step(model, micro_batch)
    if isinstance(micro_batch, Mapping):
        if loss_fn is not None:
            raise BatchError(
                "a dict batch calls model(**batch) and takes its .loss, so loss_fn would be ignored; give "
                "forward_step=lambda model, batch: loss_fn(model(...), ...) instead"
            )
        output = model(**micro_batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise BatchError(
                f"model(**batch) returned a {type(output).__name__} without a loss; put labels into the batch, or give "
                "forward_step(model, micro_batch)"
            )
        return loss
    if loss_fn is None and isinstance(model, PipelineLayer):
        loss_fn = model.loss_fn
    if isinstance(micro_batch, tuple | list) and len(micro_batch) == 2 and loss_fn is not None:
        inputs, labels = micro_batch
        if is_chain(model):  # also one of several tensors, as its first layer does in a pipeline
            is_one = isinstance(inputs, tuple | list) and len(inputs) == 1
            return loss_fn(model(inputs[0] if is_one else inputs), labels)
        if isinstance(inputs, Mapping):
            return loss_fn(model(**inputs), labels)
        return loss_fn(model(*inputs) if isinstance(inputs, tuple | list) else model(inputs), labels)
    raise BatchError(
        f"do not know how to get a loss from a batch of type {type(micro_batch).__name__}: give a dict (calls "
        "model(**batch) and takes .loss), (inputs, labels) with loss_fn=, or forward_step(model, micro_batch)"
    )


def _check_count(count: Any) -> None:
    if isinstance(count, torch.Tensor):
        fine = count.numel() == 1 and not count.is_complex() and bool(count >= 0)
    else:
        fine = isinstance(count, int | float) and count >= 0 and float(count).is_integer()
    if not fine:
        raise BatchError(
            f"the second of a pair is the number of samples or tokens behind the sum, and {count!r} cannot be one; "
            "return (loss.sum(), count), or the mean loss alone"
        )


def _check_scalar(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise BatchError(
            f"the loss must be one number, or a pair (sum, count); got {what}: reduce it with .mean(), or return "
            "(loss.sum(), number of tokens)"
        )
