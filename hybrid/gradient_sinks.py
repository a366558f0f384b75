"""Where the gradient of a weight is to lie, for layers whose backward can write it there.

    autograd's way   the product in fresh memory ── handed over ── copied or added to the buffer ── freed
    with a sink      the product is added to the buffer where it is computed; autograd hands over nothing

Who collects gradients offers a sink for each parameter (`offer`); a layer asks for it in forward, and once more in
backward whether it is open: a backward that is asked for other gradients, or for a graph of them, or that somebody
watches, goes autograd's way.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol, cast

import torch
from torch.nn import functional

from hybrid import shims
from hybrid.cpu_products import fast_product, is_plain, matrix_product

__all__ = [
    "Leaves",
    "Sink",
    "embedding",
    "has_sink",
    "keeps_what_it_saves",
    "note_passing_memory",
    "offer",
    "product",
    "sink_for",
    "stays",
    "write_product",
]


class Sink(Protocol):
    """Takes the addends of one parameter's gradient."""

    def is_open(self, dtype: torch.dtype) -> bool:
        """In backward, without a graph: whether an addend of this dtype may come here instead of through autograd."""

    def add_product(
        self, left: torch.Tensor, right: torch.Tensor, *, rows: tuple[int, int] | None = None, may_wait: bool = False
    ) -> None:
        """Add left @ right, of the parameter's shape, or of that of its rows from `rows[0]` to before `rows[1]`.

        With `may_wait` it may be computed after this backward, for which both are kept (`later_products`).
        """

    def add_rows(self, indices: torch.Tensor, rows: torch.Tensor) -> None:
        """Add each of `rows` (n, width) to the row of the parameter that `indices` (n,) names."""


# id of a parameter -> its sink. An entry lives as long as the sink, whose owner keeps the parameter alive. Every layer
# asks it in every forward, so it is a plain dict.
_sinks: dict[int, weakref.ref[Sink]] = {}


def offer(parameter: torch.Tensor, sink: Sink) -> None:
    """From now on layers may write the gradient of this parameter there. The caller keeps the sink alive."""
    key = id(parameter)

    def end(reference: weakref.ref[Sink]) -> None:
        if _sinks.get(key) is reference:
            del _sinks[key]

    _sinks[key] = weakref.ref(sink, end)


def has_sink(weight: torch.Tensor) -> bool:
    """Whether anybody offers one for it."""
    return id(weight) in _sinks


def sink_for(tensor: torch.Tensor, weight: torch.Tensor) -> Sink | None:
    """Where a layer in whose forward `tensor` meets `weight` may write the gradient of the weight, in backward.

    None also where the graph must be torch's own: in a compiled forward, transforms of torch.func, forward mode; and
    for tensors of other classes.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    reference = _sinks.get(id(weight))
    sink = None if reference is None else reference()
    if sink is None or not weight.requires_grad or torch.jit.is_tracing():
        return None
    if not is_plain(weight):
        weight.detach()  # values that are elsewhere come now, while it can be seen that backward will need them, too
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return None if shims.in_function_transform() or shims.in_forward_mode() else sink


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def write_product(
    sink: Sink | None,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    rows: tuple[int, int] | None = None,
    may_wait: bool = False,
) -> torch.Tensor | None:
    """In backward: left @ right, or None if the sink took it.

    Args:
        rows: of the parameter, if not all of them.
        may_wait: the product hides no message, and what it needs was kept since forward (`keeps_what_it_saves`).
    """
    if sink is not None and not torch.is_grad_enabled() and sink.is_open(left.dtype):
        sink.add_product(left, right, rows=rows, may_wait=may_wait)
        return None
    return matrix_product(left, right)


def keeps_what_it_saves() -> bool:
    """In forward: whether backward finds what is saved now in memory that has been held all the time.

    Not if it is computed again or fetched from elsewhere: to hold it longer would cost what that saves.
    """
    return not (shims.saves_through_hooks() or shims.in_backward())


# The number of memory that is freed and filled again while tensors lie in it -> who does that.
_passing: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note_passing_memory(buffer: torch.Tensor, owner: object) -> None:
    """`owner` frees the memory of `buffer` and fills it again, as long as it lives: gathered parameters."""
    _passing[shims.memory_of(buffer)] = owner


def stays(tensor: torch.Tensor) -> bool:
    """Whether its values are there as long as it is: what is put off may keep it."""
    return shims.memory_of(tensor) not in _passing


# ---------------------------------------------------------------- linear layers


class Leaves(Protocol):
    """Takes what the gradient of a weight is to be computed from, later."""

    def leave(self, gradient: torch.Tensor, rows: torch.Tensor) -> None:
        """Gradients of the output and inputs, both with one row per product."""


def product(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_transposed: bool,
    sink: Sink | None = None,
    leaves: Leaves | None = None,
) -> torch.Tensor:
    """tensor @ weight.T + bias, (..., in) -> (..., out), of one dtype; a transposed weight is (in, out).

    The gradient of the weight goes into `sink`, if that is open, or to `leaves`: then autograd sees no weight.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    keeper: list[Any] = [None]
    seen = weight if leaves is None else weight.detach()
    if rows.requires_grad:
        rows = _Kept.apply(rows, seen, keeper)
    output = cast(torch.Tensor, _Product.apply(rows, seen, bias, keeper[-1], sink, leaves, is_transposed))
    return output.view(*tensor.shape[:-1], output.shape[1])


class _Kept(torch.autograd.Function):
    """Keeps the factors of a product before it is computed: recompute stops where the last value is kept."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, keeper: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        keeper.append(ctx)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*gradients, None, None)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kept: Any,
        sink: Sink | None,
        leaves: Leaves | None,
        is_transposed: bool,
    ) -> torch.Tensor:
        ctx.kept, ctx.sink, ctx.leaves, ctx.is_transposed = kept, sink, leaves, is_transposed
        ctx.may_wait = sink is not None and keeps_what_it_saves()
        if kept is None:  # nobody needs the weight in backward
            ctx.save_for_backward(rows)
        # The same memory under another name: the parameter itself may be marked as absent when backward comes.
        ctx.weight = weight.detach() if kept is not None and leaves is None else None
        columns = weight if is_transposed else weight.t()
        product = fast_product(rows, columns, bias)
        if product is not None:
            return product
        return rows @ columns if bias is None else torch.addmm(bias, rows, columns)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        rows, weight = (*ctx.saved_tensors, None) if ctx.kept is None else ctx.kept.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False):
            if not torch.is_grad_enabled() and ctx.weight is not None:
                weight = ctx.weight
            of_rows, of_weight, of_bias = None, None, None
            if ctx.needs_input_grad[0]:
                of_rows = matrix_product(gradient, (weight.t() if ctx.is_transposed else weight).conj())
            if ctx.leaves is not None:
                ctx.leaves.leave(gradient, rows)
            elif ctx.needs_input_grad[1]:
                rows = rows.conj()
                factors = (rows.t(), gradient) if ctx.is_transposed else (gradient.t(), rows)
                of_weight = write_product(ctx.sink, *factors, may_wait=ctx.may_wait)
            if ctx.needs_input_grad[2]:
                of_bias = gradient.sum(0)
        return of_rows, of_weight, of_bias, None, None, None, None


# ---------------------------------------------------------------- embeddings


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None, sink: Sink) -> torch.Tensor:
    """Row `ids` of `weight` each, (...) -> (..., width); the gradient of row `padding_idx` (0 or more) stays zero."""
    rows = cast(torch.Tensor, _Rows.apply(ids.reshape(-1), weight, padding_idx, sink))
    return rows.view(*ids.shape, weight.shape[1])


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None, sink: Sink) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.padding_idx, ctx.sink, ctx.num_rows = padding_idx, sink, weight.shape[0]
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        (ids,) = ctx.saved_tensors
        if ctx.padding_idx is not None:
            gradient = gradient.masked_fill((ids == ctx.padding_idx).unsqueeze(-1), 0.0)
        if not torch.is_grad_enabled() and ctx.sink.is_open(gradient.dtype):
            ctx.sink.add_rows(ids, gradient)
            return None, None, None, None
        whole = gradient.new_zeros(ctx.num_rows, gradient.shape[1])
        return None, whole.index_add(0, ids, gradient), None, None
