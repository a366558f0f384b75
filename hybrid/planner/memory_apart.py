"""Gradients of several chunks on one rank, some of which are reduced before others come."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hybrid.planner.action_numbers import WEIGHTS, rank_orders
from hybrid.planner.job import Candidate
from hybrid.planner.memory_state import StateBytes

__all__ = ["Meeting", "gradients_that_meet", "may_be_apart"]


@dataclass(frozen=True, slots=True)
class Meeting:
    """What of a rank's gradients is there at a time, as (bytes of whole ones, bytes of reduced ones).

    Args:
        between: behind the backward that leaves most.
        during: while the fullest backward runs.
    """

    between: tuple[int, int]
    during: tuple[int, int]


def may_be_apart(candidate: Candidate) -> bool:
    """Whether, on some rank, some chunk's gradients may be reduced before another one has any."""
    pp, num_micro_batches = candidate.pp, candidate.num_micro_batches
    if candidate.virtual_stages == 1 or not candidate.zero_stage or not 1 < num_micro_batches <= 4 * pp:
        return False
    is_round = candidate.schedule == "interleaved"
    if _reduces_each_time(candidate):  # shards add up: only a weight that two chunks share comes and goes
        return not is_round
    return not is_round or num_micro_batches <= pp


def gradients_that_meet(
    candidate: Candidate,
    rank: int,
    chunks: Sequence[StateBytes],
    *,
    kept: Sequence[int],
    lenders: Sequence[Collection[int]],
) -> Meeting | None:
    """From the rank's list of actions; None where all gradients meet.

    Args:
        candidate: the layout.
        rank: of the pipeline.
        chunks: of the rank, in its order.
        kept: of each, bytes of reduced gradients that stay on the device.
        lenders: of each, the chunks of the rank that have weights of its; those are reduced with the lender's.
    """
    if not may_be_apart(candidate):
        return None
    each, has_shared = _reduces_each_time(candidate), any(chunk.waiting for chunk in chunks)
    if each and not has_shared:
        return None
    places = _places(candidate.schedule, candidate.pp, candidate.num_micro_batches, candidate.virtual_stages)[rank]
    if not has_shared:
        places = tuple(_edges(places))
    whole: set[int] = set()  # chunks with whole gradients
    shared: set[int] = set()  # lenders with a whole gradient of what they lend
    reduced: set[int] = set()
    between = during = (0, 0)
    for turn, is_last in places:
        whole.add(turn)
        shared |= {turn, *lenders[turn]}
        now = _bytes(chunks, whole, shared), sum(kept[one] for one in reduced)
        if each:
            beside = _bytes(chunks, (), shared - {turn})
            coming = min(chunks[turn].gradients, chunks[turn].two_buckets + chunks[turn].waiting)
            now = beside + coming, sum(kept[one] for one in reduced | {turn})
        during = max(during, now, key=sum)
        if each or is_last:
            whole.discard(turn)
            shared.discard(turn)
            reduced.add(turn)
        between = max(between, (_bytes(chunks, whole, shared), sum(kept[one] for one in reduced)), key=sum)
    return Meeting(between, during)


def _reduces_each_time(candidate: Candidate) -> bool:
    return candidate.zero_stage >= 2 and candidate.grad_reduce == "every_micro_batch"


def _bytes(chunks: Sequence[StateBytes], whole: Collection[int], shared: Collection[int]) -> int:
    plain = sum(chunks[one].gradients - chunks[one].waiting for one in whole)
    return plain + sum(chunks[one].waiting for one in shared)


@lru_cache(maxsize=256)
def _places(name: str, p: int, m: int, v: int) -> tuple[tuple[tuple[int, bool], ...], ...]:
    """Of each rank, what gives gradients of weights, in order: (which of its chunks, whether it is the last there)."""
    found = []
    for order in rank_orders(name, p, m, v):
        is_split = any(kind == WEIGHTS for _, kind, _ in order)
        kinds = WEIGHTS if is_split else 0
        found.append(tuple((turn, place == m - 1) for turn, kind, place in order if kind == kinds))
    return tuple(found)


def _edges(places: Sequence[tuple[int, bool]]) -> Iterator[tuple[int, bool]]:
    """The first and the last of each chunk."""
    seen: set[int] = set()
    for turn, is_last in places:
        if is_last or turn not in seen:
            seen.add(turn)
            yield turn, is_last
