"""Cross-entropy of logits that are cut over the vocabulary.

Each rank holds [tokens, vocabulary / tp] of the logits. Per token, three numbers travel instead of a vocabulary:

    1. the largest logit                                  all-reduce (max) of one number
    2. the sum of exp(logit - largest), and the target's  all-reduce (sum) of two numbers, three with label
       logit - largest, which one rank has                smoothing (the sum of the logits)

Numbers are summed in fp32 (fp64 for fp64 logits), whatever the dtype of the logits. Backward needs no communication:
it computes the softmax anew from the logits, in blocks, straight into the gradient: in their own memory, if nobody
else can see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from hybrid import shims
from hybrid.collectives.autograd import all_reduce_max, all_reduce_sum, copy_to, reduce_from
from hybrid.collectives.group import Group
from hybrid.contracts.placement import even_cut
from hybrid.errors import ModelError
from hybrid.tensor.cut_module import resolve_group
from hybrid.tensor.entry import autocast_dtype

__all__ = ["ParallelCrossEntropy", "cross_entropy"]

# Elements of a block: on the CPU it stays in the cache between the passes over it.
_BLOCK_ELEMENTS = {"cpu": 1 << 18}
_BLOCK_ELEMENTS_ELSEWHERE = 1 << 26


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    group: Group | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` where each tp rank holds a part of the vocabulary.

    The result is the same on every tp rank. For a mean over the tokens of several micro-batches or ranks take
    `reduction="sum"` and divide by the number of targets that are not `ignore_index`.

    Args:
        logits: [..., vocabulary of this rank], or the logits that a `VocabParallelHead` returned.
        target: [...] ids of the whole vocabulary, the same on every tp rank.
        group: the tp ranks; None: those of the running job. Not needed with a head's logits.
        vocab_size: of the whole vocabulary, cut as `VocabParallelHead` cuts it. Not needed with a head's logits.
        ignore_index, label_smoothing, reduction: as in torch.

    Raises:
        IndexError: a target outside the vocabulary (on the CPU).
        ModelError: logits of another width than this rank's part of the vocabulary.
    """
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "reduction": reduction,
    }
    if has_torch_function((logits,)):
        return handle_torch_function(cross_entropy, (logits,), logits, target, **options)
    group = resolve_group(group)
    if vocab_size is None:
        raise ModelError("cross_entropy: pass vocab_size, the size of the whole vocabulary")
    ((start, length),) = even_cut(0, vocab_size, rank=group.rank, degree=group.size).pieces
    if logits.shape[-1] != length:
        raise ModelError(
            f"cross_entropy: {logits.shape[-1]} logits on tp rank {group.rank}, which has {length} of a vocabulary of "
            f"{vocab_size}"
        )
    return local_cross_entropy(
        logits, target, group=group, start=start, vocab_size=vocab_size, is_hidden=False, **options
    )


class ParallelCrossEntropy(nn.Module):
    """`nn.CrossEntropyLoss` where each tp rank holds a part of the vocabulary; see `cross_entropy`."""

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        group: Group | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.group = group
        self.vocab_size = vocab_size

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(
            logits,
            target,
            group=self.group,
            vocab_size=self.vocab_size,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
        )


def local_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    group: Group,
    start: int,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    is_hidden: bool,
) -> torch.Tensor:
    """The loss of logits [..., own part of the vocabulary, which begins at `start`].

    `is_hidden`: nobody has the tensor of which `logits` is a view. Then the gradient may take the memory of both.
    """
    _check_arguments(logits, target, label_smoothing=label_smoothing, reduction=reduction)
    is_valid = target != ignore_index
    _check_targets(target, is_valid, vocab_size)
    # As torch: fp32 under autocast, else the dtype of the logits.
    dtype = torch.float32 if autocast_dtype(logits) is not None else logits.dtype
    options = _Options(group=group, start=start, vocab_size=vocab_size, smoothing=label_smoothing, is_hidden=is_hidden)
    losses = cast(
        torch.Tensor,
        _TokenLosses.apply(
            logits.reshape(target.numel(), logits.shape[-1]), target.reshape(-1), is_valid.reshape(-1), options
        ),
    )
    if reduction == "none":
        return losses.view(target.shape).to(dtype)
    total = losses.sum()
    return (total / is_valid.sum() if reduction == "mean" else total).to(dtype)


def _check_arguments(logits: torch.Tensor, target: torch.Tensor, *, label_smoothing: float, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction!r} is not a reduction; there are 'mean', 'sum' and 'none'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing = {label_smoothing} is not between 0 and 1")
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets of shape {tuple(target.shape)} for logits of shape {tuple(logits.shape)}: "
            f"expected {tuple(logits.shape[:-1])}"
        )


def _check_targets(target: torch.Tensor, is_valid: torch.Tensor, vocab_size: int) -> None:
    if target.device.type != "cpu" or target.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(target.masked_fill(~is_valid, 0)))
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise IndexError(f"target {wrong} is out of range: the vocabulary has the ids 0 to {vocab_size - 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    group: Group
    start: int
    vocab_size: int
    smoothing: float
    is_hidden: bool


class _TokenLosses(torch.autograd.Function):
    """logits [N, own vocabulary], target [N] -> loss of each token [N] in fp32 or fp64; 0 where it is not valid."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, is_valid: torch.Tensor, options: _Options
    ) -> torch.Tensor:
        dtype = _accumulation_dtype(logits)
        own_largest = _minus_infinity(logits, dtype)
        sum_exp = torch.zeros_like(own_largest)
        sum_logits = torch.zeros_like(own_largest)
        buffer: torch.Tensor | None = None
        for rows in _blocks(logits) if logits.shape[1] else ():
            # The first block is the largest; its memory serves the others, so that it stays mapped and in the cache.
            part = logits[rows]
            buffer = torch.empty_like(part, dtype=dtype) if buffer is None else buffer
            own_largest[rows] = part.amax(-1)
            shift = _finite(own_largest[rows])
            block = torch.sub(part, shift[:, None], out=buffer[: part.shape[0]])
            if options.smoothing:
                sum_logits[rows] = block.sum(-1)
            sum_exp[rows] = block.exp_().sum(-1)
        largest = all_reduce_max(own_largest, group=options.group)
        sum_exp *= (own_largest - largest).exp_()
        if options.smoothing:
            sum_logits += (_finite(own_largest) - largest) * logits.shape[1]
        column, is_own = _own_column(logits, target, options.start)
        own_logit = logits.gather(1, column[:, None])[:, 0] if logits.shape[1] else torch.zeros_like(largest)
        target_logit = (own_logit.to(dtype) - largest).masked_fill(~is_own, 0.0)
        parts = [sum_exp, target_logit, sum_logits] if options.smoothing else [sum_exp, target_logit]
        sums = all_reduce_sum(torch.stack(parts), group=options.group)
        log_sum = sums[0].log()
        losses = (log_sum - sums[1]) * (1.0 - options.smoothing)
        if options.smoothing:
            losses += (log_sum - sums[2] / options.vocab_size) * options.smoothing
        ctx.options = options
        ctx.save_for_backward(logits, target, is_valid, largest, sums[0].clone())
        return losses.masked_fill_(~is_valid, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, target, is_valid, largest, sum_exp = ctx.saved_tensors
        options: _Options = ctx.options
        scale = gradients[0].masked_fill(~is_valid, 0.0)
        if torch.is_grad_enabled():
            return _differentiable(logits, target, scale, largest, options), None, None, None
        column, is_own = _own_column(logits, target, options.start)
        of_target = (scale * (options.smoothing - 1.0)).masked_fill(~is_own, 0.0)
        dtype = _accumulation_dtype(logits)
        if options.is_hidden and logits.dtype == dtype and _is_unseen(logits):
            result = logits.detach()  # as large as the gradient, and read for the last time
        else:
            result = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for rows in _blocks(logits):
            # (softmax - smoothing / vocabulary - (1 - smoothing) [is the target]) * scale
            block = result[rows] if result.dtype == dtype else torch.empty_like(result[rows], dtype=dtype)
            torch.sub(logits[rows], largest[rows, None], out=block)
            block.exp_().mul_((scale / sum_exp)[rows, None])
            if options.smoothing:
                block.sub_((scale * (options.smoothing / options.vocab_size))[rows, None])
            if block.shape[1]:
                block.scatter_add_(1, column[rows, None], of_target[rows, None])
            if result.dtype != dtype:
                result[rows] = block
        return result, None, None, None


def _differentiable(
    logits: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, largest: torch.Tensor, options: _Options
) -> torch.Tensor:
    """The gradient by operations that have gradients themselves, for gradients of gradients."""
    group = options.group
    shifted = (logits.to(largest.dtype) - largest[:, None]).exp()
    softmax = shifted / copy_to(reduce_from(shifted.sum(-1), group=group), group=group)[:, None]
    column, is_own = _own_column(logits, target, options.start)
    wanted = torch.full_like(softmax, options.smoothing / options.vocab_size)
    if wanted.shape[1]:
        wanted.scatter_add_(1, column[:, None], (is_own * (1.0 - options.smoothing))[:, None].to(wanted.dtype))
    return ((softmax - wanted) * copy_to(scale, group=group)[:, None]).to(logits.dtype)


def _accumulation_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _is_unseen(logits: torch.Tensor) -> bool:
    """In backward: whether this is the last that reads them, and only the tensor of which they are a view is left."""
    if type(logits) is not torch.Tensor or not logits.is_contiguous() or shims.keeps_graph():
        return False
    return shims.users_of_memory(logits) == 1 + shims.is_view(logits)


def _minus_infinity(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Per token: the largest logit of a rank without ids."""
    return torch.full((logits.shape[0],), -torch.inf, dtype=dtype, device=logits.device)


def _finite(largest: torch.Tensor) -> torch.Tensor:
    """What may be taken from the logits of a token, also where all of this rank's are -inf."""
    return largest.masked_fill(largest == -torch.inf, 0.0)


def _own_column(logits: torch.Tensor, target: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each target, and whether this rank has it (0 where not)."""
    column = target.long() - start
    is_own = (column >= 0) & (column < logits.shape[1])
    return column.masked_fill(~is_own, 0), is_own


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Runs of rows small enough to work on at once."""
    elements = _BLOCK_ELEMENTS.get(logits.device.type, _BLOCK_ELEMENTS_ELSEWHERE)
    step = max(elements // max(logits.shape[1], 1), 1)
    for begin in range(0, logits.shape[0], step):
        yield slice(begin, begin + step)
