"""Collectives as differentiable functions: what tensor-parallel layers are made of.

                        forward                       backward
    copy_to             the input                     all-reduce of the gradient
    reduce_from         all-reduce                    the gradient
    gather_from         all-gather along a dim        reduce-scatter (partial=True), or the own slice
    scatter_to          own slice along a dim         all-gather
    reduce_scatter_from reduce-scatter along a dim    all-gather

All are out of place, and return their input where the group has one rank. Underneath lie three operations of torch's
own registry, `hybrid::all_reduce`, `hybrid::all_gather` and `hybrid::reduce_scatter`: so fake tensors know their
shapes, and selective recompute can keep their results instead of sending twice.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist

from hybrid.collectives import ops
from hybrid.collectives.group import Group

__all__ = [
    "COLLECTIVE_OPERATIONS",
    "IMPLEMENTATIONS",
    "all_reduce_max",
    "all_reduce_sum",
    "copy_to",
    "forget_groups",
    "freeing_summed",
    "gather_from",
    "held_by_others",
    "make_known",
    "reduce_from",
    "reduce_scatter_from",
    "scatter_to",
    "split_sizes",
    "start_all_reduce",
    "start_reduce_scatter",
]

# Operations of torch's registry take plain values, so a group goes in by its number.
_groups: dict[int, Group] = {}


def make_known(group: Group) -> None:
    """Operations of compiled graphs may name this group; others make theirs known by themselves."""
    _groups[group.number] = group


def _number(group: Group) -> int:
    if not torch.compiler.is_compiling():  # a compiler would take note of the dict, and of all that is in it
        make_known(group)
    return group.number


@contextmanager
def held_by_others() -> Iterator[None]:
    """Inside, no group lives since it is known here; afterwards those that still live are known again."""
    known = {number: weakref.ref(group) for number, group in _groups.items()}
    _groups.clear()
    try:
        yield
    finally:
        for number, reference in known.items():
            group = reference()
            if group is not None:
                _groups.setdefault(number, group)


def forget_groups(ended: Collection[dist.ProcessGroup] | None = None) -> None:
    """Let go of groups, or of all: their process groups are gone, and graphs that send over them cannot be used."""
    gone = [number for number, group in _groups.items() if ended is None or group.process_group in ended]
    for number in gone:
        del _groups[number]


def split_sizes(size: int, num_parts: int) -> list[int]:
    """`size` in `num_parts` parts that differ by one at most, the longer ones first."""
    return [size // num_parts + (part < size % num_parts) for part in range(num_parts)]


# -- under way ---------------------------------------------------------------------------------------------------


def start_all_reduce(tensor: torch.Tensor, *, group: Group, op: str = "sum") -> Callable[[], torch.Tensor]:
    """Launch the all-reduce of a contiguous tensor, in place; the tensor may be used once the result was asked for."""
    handle = ops.all_reduce(tensor.view(-1), group=group, op=op)

    def finish() -> torch.Tensor:
        handle.wait()
        return tensor

    return finish


def start_reduce_scatter(
    tensor: torch.Tensor,
    *,
    group: Group,
    dim: int,
    sizes: Sequence[int] | None = None,
    bias: torch.Tensor | None = None,
) -> Callable[[], torch.Tensor]:
    """Launch the reduce-scatter of a copy of the tensor along `dim`; the result is this rank's part, plus the bias."""
    dim = dim % tensor.dim()
    sizes = split_sizes(tensor.shape[dim], group.size) if sizes is None else sizes
    front = tensor.movedim(dim, 0)
    row = math.prod(front.shape[1:])
    bounds = [row * start for start in itertools.accumulate(sizes, initial=0)]
    flat = front.clone(memory_format=torch.contiguous_format).view(-1)
    handle = ops.reduce_scatter(flat, bounds=bounds, group=group)

    def finish() -> torch.Tensor:
        handle.wait()
        own = flat[bounds[group.rank] : bounds[group.rank + 1]]
        own = own.view(sizes[group.rank], *front.shape[1:]).movedim(0, dim)
        # A copy: the own range must not keep the rest of the buffer alive.
        result = torch.empty(own.shape, dtype=own.dtype, device=own.device)
        return result.copy_(own) if bias is None else torch.add(own, bias, out=result)

    return finish


# -- operations of torch's registry ------------------------------------------------------------------------------

# Defined by a Library, not by `torch.library.custom_op`: a call costs 10 µs and not 60, and there are four and more
# of them in each block of a model.
_LIBRARY = torch.library.Library("hybrid", "DEF")
_LIBRARY.define("all_reduce(Tensor tensor, Tensor? bias, int group, str op) -> Tensor")
_LIBRARY.define("all_gather(Tensor tensor, int group, int dim, int[] sizes) -> Tensor")
_LIBRARY.define("reduce_scatter(Tensor tensor, Tensor? bias, int group, int dim, int[] sizes) -> Tensor")


@torch.library.impl(_LIBRARY, "all_reduce", "CompositeExplicitAutograd")
def _all_reduce(tensor: torch.Tensor, bias: torch.Tensor | None, group: int, op: str) -> torch.Tensor:
    """The bias is added in place: in memory of its own, the sum would be written and read once more."""
    result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    ops.all_reduce(tensor.contiguous().view(-1), group=_groups[group], op=op, out=result.view(-1)).wait()
    return result if bias is None else result.add_(bias)


@torch.library.register_fake("hybrid::all_reduce")
def _(tensor: torch.Tensor, bias: torch.Tensor | None, group: int, op: str) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@torch.library.impl(_LIBRARY, "all_gather", "CompositeExplicitAutograd")
def _all_gather(tensor: torch.Tensor, group: int, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Rank r has `sizes[r]` along `dim`; the result has their sum."""
    members = _groups[group]
    front = tensor.movedim(dim, 0)
    row = math.prod(front.shape[1:])
    bounds = [row * start for start in itertools.accumulate(sizes, initial=0)]
    flat = torch.empty(bounds[-1], dtype=tensor.dtype, device=tensor.device)
    flat[bounds[members.rank] : bounds[members.rank + 1]].view(front.shape).copy_(front)
    ops.all_gather(flat, bounds=bounds, group=members).wait()
    return flat.view(sum(sizes), *front.shape[1:]).movedim(0, dim).contiguous()


@torch.library.register_fake("hybrid::all_gather")
def _(tensor: torch.Tensor, group: int, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = sum(sizes)
    return tensor.new_empty(shape)


@torch.library.impl(_LIBRARY, "reduce_scatter", "CompositeExplicitAutograd")
def _reduce_scatter(
    tensor: torch.Tensor, bias: torch.Tensor | None, group: int, dim: int, sizes: Sequence[int]
) -> torch.Tensor:
    """Rank r gets the sum of its `sizes[r]` along `dim`."""
    return start_reduce_scatter(tensor, group=_groups[group], dim=dim, sizes=sizes, bias=bias)()


@torch.library.register_fake("hybrid::reduce_scatter")
def _(tensor: torch.Tensor, bias: torch.Tensor | None, group: int, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = sizes[_groups[group].rank]
    return tensor.new_empty(shape)


# Operation -> what it does. A dispatch mode that stands in for all kernels (`dry/values.py`) calls these by hand.
IMPLEMENTATIONS: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.ops.hybrid.all_reduce.default: _all_reduce,
    torch.ops.hybrid.all_gather.default: _all_gather,
    torch.ops.hybrid.reduce_scatter.default: _reduce_scatter,
}
# What selective recompute keeps rather than sends again.
COLLECTIVE_OPERATIONS = tuple(IMPLEMENTATIONS)


def _reduced(tensor: torch.Tensor, group: Group, op: str = "sum", bias: torch.Tensor | None = None) -> torch.Tensor:
    return cast(torch.Tensor, torch.ops.hybrid.all_reduce.default(tensor, bias, _number(group), op))


def _gathered(tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    return cast(torch.Tensor, torch.ops.hybrid.all_gather.default(tensor, _number(group), dim, list(sizes)))


def _reduce_scattered(
    tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int], bias: torch.Tensor | None
) -> torch.Tensor:
    return cast(torch.Tensor, torch.ops.hybrid.reduce_scatter.default(tensor, bias, _number(group), dim, list(sizes)))


def _own_slice(tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    return tensor.narrow(dim, sum(sizes[: group.rank]), sizes[group.rank]).contiguous()


# -- what is summed and never read again -------------------------------------------------------------------------

_freeing: list[bool] = []


@contextmanager
def freeing_summed() -> Iterator[None]:
    """Inside, sums free the memory of what is given up to them: someone keeps all products, these for nobody."""
    _freeing.append(True)
    try:
        yield
    finally:
        _freeing.pop()


def _give_up(tensor: torch.Tensor) -> None:
    # Its shape stays: a second forward passes it on to a sum whose result is kept.
    if _freeing and not torch.compiler.is_compiling():
        tensor.untyped_storage().resize_(0)


# -- autograd ----------------------------------------------------------------------------------------------------

# Each backward is itself one of these functions, so that gradients of gradients are right too.


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_from(gradients[0], group=ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, bias: torch.Tensor | None, group: Group) -> torch.Tensor:
        ctx.group = group
        return _reduced(tensor, group, bias=bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (gradient,) = gradients
        of_bias = _of_bias(gradient) if ctx.needs_input_grad[1] else None
        return copy_to(gradient, group=ctx.group) if torch.is_grad_enabled() else gradient, of_bias, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int], partial: bool
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.sizes, ctx.partial = group, dim, sizes, partial
        return _gathered(tensor, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        back = reduce_scatter_from if ctx.partial else scatter_to
        return back(gradients[0], group=ctx.group, dim=ctx.dim, sizes=ctx.sizes), None, None, None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _own_slice(tensor, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        back = gather_from(gradients[0], group=ctx.group, dim=ctx.dim, sizes=ctx.sizes, partial=False)
        return back, None, None, None


class _ReduceScatterFrom(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, bias: torch.Tensor | None, group: Group, dim: int, sizes: Sequence[int]
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _reduce_scattered(tensor, group, dim, sizes, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
        of_bias = _of_bias(gradients[0]) if ctx.needs_input_grad[1] else None
        back = gather_from(gradients[0], group=ctx.group, dim=ctx.dim, sizes=ctx.sizes, partial=True)
        return back, of_bias, None, None, None


def _of_bias(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.reshape(-1, gradient.shape[-1]).sum(0)


def copy_to(tensor: torch.Tensor, *, group: Group) -> torch.Tensor:
    """The tensor, where each rank of the group computes a part of what comes of it: its gradients are summed."""
    if group.size == 1:
        return tensor
    return cast(torch.Tensor, _CopyTo.apply(tensor, group))


def reduce_from(
    tensor: torch.Tensor, *, group: Group, bias: torch.Tensor | None = None, given_up: bool = False
) -> torch.Tensor:
    """The sum over the group, with which each rank goes on alike, and the bias (of the last dim) added once.

    `given_up`: nobody reads the tensor again.
    """
    if group.size == 1:
        return tensor if bias is None else tensor + bias
    result = cast(torch.Tensor, _ReduceFrom.apply(tensor, bias, group))
    if given_up:
        _give_up(tensor)
    return result


def gather_from(
    tensor: torch.Tensor, *, group: Group, dim: int, sizes: Sequence[int] | None = None, partial: bool
) -> torch.Tensor:
    """The tensors of all ranks joined along `dim`.

    Args:
        tensor: this rank's part.
        group: the ranks that hold the parts, in their order.
        dim: dim to join along.
        sizes: size of each rank's part along `dim`; None: all are as this one.
        partial: whether each rank will have only a part of the result's gradient (they are summed), or all of it.
    """
    if group.size == 1:
        return tensor
    dim = dim % tensor.dim()
    parts = list(sizes) if sizes is not None else [tensor.shape[dim]] * group.size
    return cast(torch.Tensor, _GatherFrom.apply(tensor, group, dim, parts, partial))


def scatter_to(tensor: torch.Tensor, *, group: Group, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """This rank's part along `dim` of a tensor that all ranks of the group hold alike (default: even parts)."""
    if group.size == 1:
        return tensor
    dim = dim % tensor.dim()
    parts = list(sizes) if sizes is not None else split_sizes(tensor.shape[dim], group.size)
    return cast(torch.Tensor, _ScatterTo.apply(tensor, group, dim, parts))


def reduce_scatter_from(
    tensor: torch.Tensor,
    *,
    group: Group,
    dim: int,
    sizes: Sequence[int] | None = None,
    bias: torch.Tensor | None = None,
    given_up: bool = False,
) -> torch.Tensor:
    """This rank's part along `dim` of the sum over the group (default: even parts), and the bias added once.

    `given_up`: nobody reads the tensor again.
    """
    if group.size == 1:
        return tensor if bias is None else tensor + bias
    dim = dim % tensor.dim()
    parts = list(sizes) if sizes is not None else split_sizes(tensor.shape[dim], group.size)
    result = cast(torch.Tensor, _ReduceScatterFrom.apply(tensor, bias, group, dim, parts))
    if given_up:
        _give_up(tensor)
    return result


def all_reduce_sum(tensor: torch.Tensor, *, group: Group) -> torch.Tensor:
    """The sum over the group; no gradient passes."""
    with torch.no_grad():
        return tensor.detach() if group.size == 1 else _reduced(tensor.detach(), group)


def all_reduce_max(tensor: torch.Tensor, *, group: Group) -> torch.Tensor:
    """The largest of the group's values, element by element; no gradient passes."""
    with torch.no_grad():
        return tensor.detach() if group.size == 1 else _reduced(tensor.detach(), group, "max")
