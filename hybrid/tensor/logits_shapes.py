"""The shape of cut logits, and arrangements of their dims that leave the vocabulary whole."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from hybrid.tensor.logits import (
    VocabParallelLogits,
    getters,
    handles,
    holds_logits,
    is_last,
    methods,
    plain,
    whole_shape,
    wrapped,
)

__all__: list[str] = []  # the handlers register themselves

# -- shapes ------------------------------------------------------------------------------------------------------


@handles(*getters("shape"))
def _get_shape(_: Any, logits: VocabParallelLogits, *__: Any) -> torch.Size:
    return torch.Size(whole_shape(logits))


@handles(torch.Tensor.size)
def _size(_: Any, logits: VocabParallelLogits, dim: int | None = None) -> Any:
    shape = torch.Size(whole_shape(logits))
    return shape if dim is None else shape[dim]


@handles(torch.Tensor.stride)
def _stride(func: Any, logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    """That of whole logits whose memory is laid out as ours."""
    local = plain(torch.Tensor.stride, logits)
    own, cut = local[logits.vocabulary.dim], logits.vocabulary
    whole = [step // cut.local_size * cut.size if step > own and cut.local_size else step for step in local]
    return func(torch.empty(0).as_strided([0] * len(whole), whole), *args, **kwargs)


@handles(*methods("numel", "nelement"), *getters("nbytes"))
def _numel(func: Any, logits: VocabParallelLogits, *_: Any) -> int:
    count = math.prod(whole_shape(logits))
    return count * logits.itemsize if func in getters("nbytes") else count


@handles(torch.Tensor.__len__)
def _len(_: Any, logits: VocabParallelLogits) -> int:
    return whole_shape(logits)[0]


# -- other shapes ------------------------------------------------------------------------------------------------


@handles(*methods("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as"))
def _regroup(func: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Another arrangement of the leading dims, the vocabulary whole behind them."""
    if not is_last(logits) or holds_logits([args, kwargs]) or any(isinstance(arg, torch.dtype) for arg in args):
        return NotImplemented
    # On a tensor without values: torch works out the shape, with its own errors.
    shape = func(torch.empty(whole_shape(logits), device="meta"), *_to_meta(args), **_to_meta(kwargs)).shape
    cut = logits.vocabulary
    if not shape or shape[-1] != cut.size or math.prod(shape) != math.prod(whole_shape(logits)):
        return NotImplemented
    # view stays view: where torch needs a copy, it says so.
    arrange = torch.Tensor.view if func in _VIEWS else torch.Tensor.reshape
    result = plain(arrange, logits, (*shape[:-1], cut.local_size))
    return wrapped(result, replace(cut, dim=len(shape) - 1))


_VIEWS = (torch.Tensor.view, torch.Tensor.view_as)


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, device="meta")
    if isinstance(value, tuple):
        return tuple(_to_meta(item) for item in value)
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    return value


@handles(*methods("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t"), *getters("mT", "T"))
def _permute(func: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(logits, VocabParallelLogits):
        return NotImplemented
    sizes = [1] * plain(torch.Tensor.dim, logits)
    sizes[logits.vocabulary.dim] = 2
    dim = list(func(torch.empty(sizes, device="meta"), *args, **kwargs).shape).index(2)
    return wrapped(plain(func, logits, *args, **kwargs), replace(logits.vocabulary, dim=dim))


@handles(torch.Tensor.__getitem__)
def _index(func: Any, logits: Any, index: Any) -> Any:
    if not is_last(logits) or holds_logits(index):
        return NotImplemented
    items = index if isinstance(index, tuple) else (index,)
    if not _leaves_last_dim(items, plain(torch.Tensor.dim, logits)):
        return NotImplemented
    result = plain(func, logits, index)
    return wrapped(result, replace(logits.vocabulary, dim=result.dim() - 1))


def _leaves_last_dim(items: Iterable[Any], num_dims: int) -> bool:
    """Whether an index leaves the last dim as it is, and last."""
    behind = 0  # dims of the source that the items from the last Ellipsis on take
    last: Any = Ellipsis
    from_ellipsis = False
    for item in items:
        if item is Ellipsis:
            behind, from_ellipsis = 0, True
        elif isinstance(item, bool):
            return False
        elif item is not None:
            is_mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
            behind += item.dim() if is_mask else 1
        last = item
    reaches_last = behind > 0 if from_ellipsis else behind >= num_dims
    if reaches_last:
        return isinstance(last, slice) and last == slice(None)
    return not (from_ellipsis and last is None)


@handles(*methods("narrow", "select", "index_select", "split", "chunk", "unbind"))
def _pick(func: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Parts along a dim that is not the vocabulary."""
    if not isinstance(logits, VocabParallelLogits) or holds_logits([args, kwargs]):
        return NotImplemented
    num_dims, cut = plain(torch.Tensor.dim, logits), logits.vocabulary
    place = 1 if func in methods("split", "chunk") else 0
    dim = kwargs.get("dim", args[place] if len(args) > place else 0)
    if not isinstance(dim, int) or not -num_dims <= dim < num_dims or dim % num_dims == cut.dim:
        return NotImplemented
    result = plain(func, logits, *args, **kwargs)
    drops_dim = func in methods("select", "unbind") and dim % num_dims < cut.dim
    after = replace(cut, dim=cut.dim - drops_dim)
    if isinstance(result, torch.Tensor):
        return wrapped(result, after)
    return type(result)(wrapped(one, after) for one in result)
