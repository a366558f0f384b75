"""Gradients of several chunks on one rank, some of which are reduced before others come."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.contracts.schedule_choice import schedule_splits_backward
from hybrid.planner.action_numbers import rank_orders
from hybrid.planner.job import Candidate
from hybrid.planner.memory_state import StateBytes

__all__ = ["are_reduced_apart", "gradients_that_meet"]


def are_reduced_apart(candidate: Candidate, rank: int) -> bool:
    """Whether some chunk's gradients are reduced, or on the host, before another one of the rank has any."""
    is_once = candidate.grad_reduce == "last_micro_batch" and candidate.num_micro_batches > 1
    if candidate.virtual_stages == 1 or not is_once or not (candidate.zero_stage or candidate.is_offloaded):
        return False
    spans = _spans(candidate, rank)
    return max(first for first, _ in spans) > min(last for _, last in spans)


def gradients_that_meet(candidate: Candidate, rank: int, chunks: Sequence[StateBytes]) -> tuple[int, int] | None:
    """Behind the backward that leaves most: (bytes of whole gradients, bytes of reduced ones).

    Args:
        chunks: of the rank, in its order.

    Returns:
        None where all meet, or where this is not known: halves of a backward make some of a chunk's gradients each,
        a weight that two chunks share is reduced with the later one, and offload takes shards away.
    """
    if not are_reduced_apart(candidate, rank) or candidate.is_offloaded or schedule_splits_backward(candidate.schedule):
        return None
    if any(chunk.waiting for chunk in chunks):
        return None
    spans = _spans(candidate, rank)
    most = (0, 0)
    for place in sorted(edge for span in spans for edge in span):
        of_all = list(zip(spans, chunks, strict=True))
        whole = sum(chunk.gradients for (first, last), chunk in of_all if first <= place < last)
        reduced = sum(chunk.gradient_shards for (_, last), chunk in of_all if last <= place)
        if whole + reduced > sum(most):
            most = whole, reduced
    return most


def _spans(candidate: Candidate, rank: int) -> list[tuple[int, int]]:
    """Of each chunk of the rank, the places of its first and its last backward among the rank's actions."""
    order = rank_orders(candidate.schedule, candidate.pp, candidate.num_micro_batches, candidate.virtual_stages)[rank]
    found: list[tuple[int, int]] = []
    for own in range(candidate.virtual_stages):
        places = [place for place, (turn, kind, _) in enumerate(order) if turn == own and kind != 1]
        found.append((places[0], places[-1]))
    return found
