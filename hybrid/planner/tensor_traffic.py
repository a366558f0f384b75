"""What the ranks that share a layer send each other: what `unit_time.py` prices and `collectives/trace.py` counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybrid.planner.collectives import Collective
from hybrid.planner.model_spec import UnitSpec

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

    `has_cut_ends`: with sequence parallel the embedding gives the cut sequence, and the head takes it (Megatron-LM).
    Here the first block cuts it and the last one joins it, so that the ends work on all of it.
    """
    value = tokens * hidden * element_bytes
    if not unit.num_tp_reductions:
        if sequence_parallel and not has_cut_ends and unit.kind == ("embedding" if is_backward else "head"):
            yield TensorMessage(kind="all_gather", num_bytes=value)
        return
    # A cut embedding sums what it looked up, on the way out only; a cut head sums the gradient of its input, on the way
    # back only, and forward the three figures per token of the loss.
    if unit.kind == "embedding":
        if sequence_parallel and (has_cut_ends or is_backward):
            yield TensorMessage(kind="all_gather" if is_backward else "reduce_scatter", num_bytes=value)
        elif not is_backward:
            yield TensorMessage(kind="all_reduce", num_bytes=value)
        return
    if unit.kind == "head":
        if not is_backward:
            yield TensorMessage(kind="all_reduce", num_bytes=tokens * _LOSS_BYTES, count=_LOSS_NUMBERS)
        if sequence_parallel and (has_cut_ends or not is_backward):
            yield TensorMessage(kind="reduce_scatter" if is_backward else "all_gather", num_bytes=value)
        elif is_backward:
            yield TensorMessage(kind="all_reduce", num_bytes=value)
        return
    kinds: tuple[Collective, ...] = ("all_gather", "reduce_scatter") if sequence_parallel else ("all_reduce",)
    for kind in kinds:
        yield TensorMessage(kind=kind, num_bytes=value, count=unit.num_tp_reductions)
    for width in unit.gathered_backward if is_backward else unit.gathered_forward:
        yield TensorMessage(kind="all_gather", num_bytes=tokens * element_bytes * width)
