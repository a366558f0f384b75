"""Arithmetic on cut logits, and what needs a few numbers of the other ranks: the loss, the largest logit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from hybrid.collectives.autograd import copy_to, gather_from, scatter_to
from hybrid.errors import ModelError
from hybrid.tensor.logits import (
    VocabParallelLogits,
    Vocabulary,
    getters,
    handles,
    is_last,
    methods,
    plain,
    whole_shape,
    wrapped,
)
from hybrid.tensor.loss import cross_entropy, local_cross_entropy

__all__: list[str] = []  # the handlers register themselves

# -- each element by itself --------------------------------------------------------------------------------------


@handles(
    *methods("float", "double", "half", "bfloat16", "to", "type", "type_as", "cpu", "cuda"),
    *methods("contiguous", "clone", "detach", "alias"),
    *methods(
        "neg", "negative", "__neg__", "__pos__", "positive", "abs", "exp", "tanh", "sigmoid", "relu", "nan_to_num"
    ),
    *getters("data"),
    functional.tanh,
    functional.sigmoid,
    functional.relu,
)
def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    if not args or "out" in kwargs:
        return NotImplemented
    if not isinstance(args[0], VocabParallelLogits):
        # Another tensor takes over the dtype and the device.
        return plain(func, *args, **kwargs) if func in methods("to", "type_as") else NotImplemented
    result = plain(func, *args, **kwargs)
    return wrapped(result, args[0].vocabulary) if isinstance(result, torch.Tensor) else result


@handles(
    *methods("mul", "multiply", "div", "divide", "true_divide", "add", "sub", "subtract", "clamp", "pow"),
    *methods("__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__add__", "__radd__", "__sub__", "__rsub__"),
    *methods("__pow__", "rsub", "clamp_min", "clamp_max"),
)
def _arithmetic(func: Any, *args: Any, **kwargs: Any) -> Any:
    """With numbers, with logits cut alike, and with tensors that have one value, or one for each id, per token."""
    operands = [*args, *kwargs.values()]
    logits = [operand for operand in operands if isinstance(operand, VocabParallelLogits)]
    if not logits or "out" in kwargs:
        return NotImplemented
    cut = logits[0].vocabulary
    from_right = plain(torch.Tensor.dim, logits[0]) - cut.dim
    if any(
        one.vocabulary.size != cut.size
        or one.vocabulary.group is not cut.group
        or plain(torch.Tensor.dim, one) - one.vocabulary.dim != from_right
        for one in logits
    ):
        return NotImplemented

    def part(operand: Any) -> Any:
        if not isinstance(operand, torch.Tensor) or isinstance(operand, VocabParallelLogits):
            return operand
        if operand.dim() >= from_right and operand.shape[-from_right] != 1:
            return scatter_to(operand, group=cut.group, dim=operand.dim() - from_right, sizes=cut.sizes)
        return copy_to(operand, group=cut.group)  # its gradient is summed over the whole vocabulary

    if any(
        operand.dim() >= from_right and operand.shape[-from_right] not in (1, cut.size)
        for operand in operands
        if isinstance(operand, torch.Tensor) and not isinstance(operand, VocabParallelLogits)
    ):
        return NotImplemented  # torch has the error for it
    result = plain(func, *map(part, args), **{name: part(value) for name, value in kwargs.items()})
    if not isinstance(result, torch.Tensor):
        return result
    return wrapped(result, replace(cut, dim=result.dim() - from_right))


# -- over the vocabulary -----------------------------------------------------------------------------------------


@handles(functional.cross_entropy)
def _torch_cross_entropy(
    _: Any,
    input: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if not isinstance(input, VocabParallelLogits) or isinstance(target, VocabParallelLogits):
        return NotImplemented
    num_dims = plain(torch.Tensor.dim, input)
    class_dim = 0 if num_dims == 1 else 1
    shape = whole_shape(input)
    if (
        input.vocabulary.dim != class_dim
        or weight is not None
        or size_average is not None
        or reduce is not None
        or target.dtype not in (torch.int64, torch.uint8)
        or list(target.shape) != shape[:class_dim] + shape[class_dim + 1 :]
    ):
        return NotImplemented
    return _loss(
        input.local().movedim(class_dim, -1),
        target,
        input.vocabulary,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


@handles(cross_entropy)
def _own_cross_entropy(_: Any, logits: Any, target: torch.Tensor, **options: Any) -> Any:
    if not is_last(logits):
        raise ModelError("cross_entropy: the vocabulary is the last dim of the logits")
    return _loss(logits.local(), target, logits.vocabulary, **options)


def _loss(local: torch.Tensor, target: torch.Tensor, cut: Vocabulary, **options: Any) -> torch.Tensor:
    return local_cross_entropy(
        local, target, group=cut.group, start=cut.start, vocab_size=cut.size, is_hidden=cut.is_hidden, **options
    )


@handles(*methods("argmax"))
def _argmax(_: Any, logits: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Each rank's own largest logit and its id travel; torch's rules (first of equal ones, NaN is largest) hold."""
    if not isinstance(logits, VocabParallelLogits) or not isinstance(dim, int):
        return NotImplemented
    num_dims, cut = plain(torch.Tensor.dim, logits), logits.vocabulary
    if not -num_dims <= dim < num_dims or dim % num_dims != cut.dim:
        return NotImplemented
    local = logits.local().detach()
    if cut.local_size:
        value, index = local.max(cut.dim)
    else:
        value = local.new_full([size for at, size in enumerate(local.shape) if at != cut.dim], -torch.inf)
        index = torch.zeros_like(value, dtype=torch.int64)
    sizes = [1] * cut.group.size
    values = gather_from(value[None], group=cut.group, dim=0, sizes=sizes, partial=False)
    ids = gather_from((index + cut.start)[None], group=cut.group, dim=0, sizes=sizes, partial=False)
    best = ids.gather(0, values.argmax(0, keepdim=True))[0]
    return best.unsqueeze(cut.dim) if keepdim else best
