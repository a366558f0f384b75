"""What the ranks that share a layer send each other: what `unit_time.py` prices and `collectives/trace.py` counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from hybrid.planner.collectives import Collective
from hybrid.planner.model_spec import SentWidths, UnitSpec

__all__ = ["TensorMessage", "tensor_messages"]

# Of a cut loss, forward: the largest logit, the sum of exponentials, the target's logit; fp32 (`tensor/loss.py`).
_LOSS_NUMBERS, _LOSS_BYTES = 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMessage:
    """`count` times a value of `num_bytes`, whole, over the tp group."""

    kind: Collective
    num_bytes: float
    count: int = 1

    def sent_bytes(self, size: int) -> float:
        """By one of `size` ranks, by the operation's own formula."""
        return self.count * self.num_bytes * (2 if self.kind == "all_reduce" else 1) * (size - 1) / size


def tensor_messages(
    unit: UnitSpec,
    *,
    tokens: float,
    hidden: int,
    element_bytes: int,
    sequence_parallel: bool,
    is_backward: bool,
    has_cut_ends: bool = True,
) -> Iterator[TensorMessage]:
    """Of a forward or a backward of one micro-batch of so many tokens, on more than one tp rank.

    `element_bytes`: of an activation, where the unit does not say otherwise (`UnitSpec.sent`).

    `has_cut_ends`: with sequence parallel the embedding gives the cut sequence, and the head takes it (Megatron-LM).
    Here the first block cuts it and the last one joins it, so that the ends work on all of it.
    """
    elements = tokens * hidden
    same = (element_bytes,) * unit.num_tp_reductions
    sent = unit.sent or SentWidths(between=element_bytes, result=element_bytes, entries=same)
    if not unit.num_tp_reductions:
        if sequence_parallel and not has_cut_ends and unit.kind == ("embedding" if is_backward else "head"):
            yield TensorMessage(kind="all_gather", num_bytes=elements * sent.between)
        return
    # A cut embedding sums what it looked up, on the way out only; a cut head sums the gradient of its input, on the way
    # back only, and forward the three figures per token of the loss.
    if unit.kind == "embedding":
        if sequence_parallel and is_backward:
            yield TensorMessage(kind="all_gather", num_bytes=elements * sent.between)
        elif sequence_parallel and has_cut_ends:
            yield TensorMessage(kind="reduce_scatter", num_bytes=elements * sent.result)
        elif not is_backward:
            yield TensorMessage(kind="all_reduce", num_bytes=tokens * _table_width(unit, hidden) * sent.result)
        return
    if unit.kind == "head":
        if not is_backward:
            yield TensorMessage(kind="all_reduce", num_bytes=tokens * _LOSS_BYTES, count=_LOSS_NUMBERS)
        if sequence_parallel and not is_backward:
            yield TensorMessage(kind="all_gather", num_bytes=elements * sent.between)
        elif sequence_parallel and has_cut_ends:
            yield TensorMessage(kind="reduce_scatter", num_bytes=elements * sum(sent.entries))
        elif is_backward:
            width = _table_width(unit, hidden)
            yield TensorMessage(kind="all_reduce", num_bytes=tokens * width * sum(sent.entries))
        return
    # A column layer's entry gathers forward and scatters its gradient, a row layer's result the other way round.
    taken = [(elements * width, count) for width, count in Counter(sent.entries).items()]
    given = [(elements * sent.result, unit.num_tp_reductions)]
    kinds: tuple[tuple[Collective, list[tuple[float, int]]], ...]
    if sequence_parallel:
        gathered, scattered = (given, taken) if is_backward else (taken, given)
        kinds = ("all_gather", gathered), ("reduce_scatter", scattered)
    else:
        kinds = (("all_reduce", taken if is_backward else given),)
    for kind, values in kinds:
        for num_bytes, count in values:
            yield TensorMessage(kind=kind, num_bytes=num_bytes, count=count)
    for width in unit.gathered_backward if is_backward else unit.gathered_forward:
        yield TensorMessage(kind="all_gather", num_bytes=tokens * element_bytes * width)


def _table_width(unit: UnitSpec, hidden: int) -> int:
    """Of a row of the token table, which may be narrower than what crosses between blocks (OPT-350M)."""
    if unit.kind == "embedding":
        return next((one.shape[1] for one in unit.parameters if one.cut_dim == 0 and len(one.shape) == 2), hidden)
    return next((one.in_features for one in reversed(unit.matmuls) if one.cut == "column"), hidden)
