"""The matrix product of a column-parallel layer whose communication and computation overlap in backward.

    1. gradient of the input:   this rank's part of the sum
    2. launch its all-reduce    (sequence_dim: reduce-scatter)
    3. gradient of the weight   while the messages are under way
    4. gradient of the bias
    5. wait for 2

Forward is the plain one: an all-gather under `sequence_dim`, then the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from hybrid.collectives.autograd import copy_to, gather_from, reduce_from, start_all_reduce, start_reduce_scatter
from hybrid.collectives.group import Group
from hybrid.cpu_products import matrix_product
from hybrid.errors import ModelError
from hybrid.gradient_sinks import Sink, sink_for, write_product
from hybrid.tensor.entry import autocast_dtype
from hybrid.weight_gradients import PutOff, Rows, linear, weight_gradient

__all__ = ["overlapped_linear"]


def overlapped_linear(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    group: Group,
    sequence_dim: int | None,
    is_transposed: bool,
    part_of: Rows | None = None,
) -> torch.Tensor:
    """`linear` of what an entry makes of `tensor`, for an entry that no other layer shares."""
    dtype, original = autocast_dtype(tensor), weight
    if dtype is not None:
        tensor, weight = tensor.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    put_off = PutOff.of(tensor, original, is_transposed=is_transposed, part_of=part_of)
    sink = sink_for(tensor, weight) if put_off is None and dtype is None and tensor.dtype == weight.dtype else None
    options = _Options(group=group, sequence_dim=sequence_dim, is_transposed=is_transposed, put_off=put_off, sink=sink)
    weight = weight if put_off is None else weight.detach()
    rows = cast(torch.Tensor, _OverlappedLinear.apply(tensor, weight, bias, options))
    # A view of what the function made, so that whoever keeps that for recompute sees it being written to.
    return rows.view(*_gathered_shape(tensor, options)[:-1], rows.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    group: Group
    sequence_dim: int | None
    is_transposed: bool
    put_off: PutOff | None
    """The gradient of the weight, if it is left to the second half of a split backward."""
    sink: Sink | None
    """Where else it may be written."""


class _OverlappedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: _Options
    ) -> torch.Tensor:
        if options.sequence_dim is not None:
            tensor = gather_from(tensor, group=options.group, dim=options.sequence_dim, partial=True)
        ctx.options, ctx.shape = options, tensor.shape
        # Frozen parts: the gradient of one needs the other.
        is_trained = ctx.needs_input_grad[1] or options.put_off is not None
        ctx.save_for_backward(tensor if is_trained else None, weight if ctx.needs_input_grad[0] else None)
        rows = tensor.reshape(-1, tensor.shape[-1])
        return linear(rows, weight, bias, is_transposed=options.is_transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        # As in the backward of torch's own operations, the dtypes are those of forward.
        with torch.autocast(gradient.device.type, enabled=False):
            if torch.is_grad_enabled():
                return (*_differentiable(ctx, gradient), None)
            return (*_overlapped(ctx, gradient), None)


def _overlapped(ctx: Any, rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    options: _Options = ctx.options
    tensor, weight = ctx.saved_tensors
    of_weight, of_bias, finish = None, None, None
    if ctx.needs_input_grad[0]:
        part = _of_input(rows, weight, options).view(ctx.shape)
        if options.sequence_dim is None:
            finish = start_all_reduce(part, group=options.group)
        else:
            finish = start_reduce_scatter(part, group=options.group, dim=options.sequence_dim)
        del part  # it belongs to the collective until `finish`
    if options.put_off is not None:
        options.put_off.leave(rows, tensor)
    elif ctx.needs_input_grad[1]:
        inputs = tensor.reshape(-1, tensor.shape[-1]).conj()
        factors = (inputs.t(), rows) if options.is_transposed else (rows.t(), inputs)
        of_weight = write_product(options.sink, *factors)
    if ctx.needs_input_grad[2]:
        of_bias = rows.sum(0)
    return (finish() if finish is not None else None), of_weight, of_bias


def _differentiable(ctx: Any, rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The same by operations that have gradients themselves; nothing overlaps."""
    options: _Options = ctx.options
    tensor, weight = ctx.saved_tensors
    if options.sequence_dim is not None:
        raise ModelError(
            "a column-parallel layer under sequence parallel has no second derivative: it keeps the gathered input, "
            "which is no longer part of the graph. Turn sequence_parallel off for gradient penalties"
        )
    of_input, of_weight, of_bias = None, None, None
    if ctx.needs_input_grad[0]:
        of_input = reduce_from(_of_input(rows, weight, options).view(ctx.shape), group=options.group)
    if ctx.needs_input_grad[1]:
        tensor = copy_to(tensor, group=options.group)
        of_weight = weight_gradient(rows, tensor, is_transposed=options.is_transposed)
    if ctx.needs_input_grad[2]:
        of_bias = rows.sum(0)
    return of_input, of_weight, of_bias


def _gathered_shape(tensor: torch.Tensor, options: _Options) -> list[int]:
    shape = list(tensor.shape)
    if options.sequence_dim is not None:
        shape[options.sequence_dim] *= options.group.size
    return shape


def _of_input(rows: torch.Tensor, weight: torch.Tensor, options: _Options) -> torch.Tensor:
    return matrix_product(rows, (weight.t() if options.is_transposed else weight).conj())
