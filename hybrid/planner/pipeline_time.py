"""Seconds of a pipeline schedule for uneven chunks, fast enough to price thousands of layouts.

The action lists are those of `contracts/schedule.py`. They are turned into plain numbers once per shape and played
through with the costs of each layout; `contracts/schedule_timing.time_schedule` gives the same with names. Of many
micro-batches only the first are played: in the steady state each further one (each group of num_stages, where a rank
has several chunks) takes one period more.

The period of 1f1b is its longest cycle. Between the ranks r and s a micro-batch goes forth and back while the ranks'
order lets s - r + 1 others follow it, so the cycle of these ranks is

    (sum over r..s of forward and backward + twice the transfers between them) / (s - r + 1)

of which r = s, the slowest rank by itself, is the longest where transfers are short. Under zb-h1 backward is I there,
and the cycle has the W of rank r besides, which stands between two of its micro-batches. What a whole backward does
when it has sent the gradient for the stage before is on no micro-batch's way but that of rank r, whose order it is in.
A test compares with the whole schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import add

from hybrid.contracts.chunk_placement import ChunkPlacement, chunks_on
from hybrid.contracts.schedule_choice import schedule_placement
from hybrid.planner.action_numbers import WEIGHTS, rank_orders

__all__ = ["PipelineSeconds", "pipeline_seconds"]

# Micro-batches up to which a schedule is played whole, in multiples of the number of stages; and the most actions for
# which a second play is worth its time, to tell the period of several chunks.
_PLAYED_TURNS = 3
_MOST_ACTIONS = 6000


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSeconds:
    """Per pipeline rank: when its last action ends, and how long it computed."""

    end_seconds: tuple[float, ...]
    busy_seconds: tuple[float, ...]


# (rank, chunk, kind as in `Step`, index of the action of another chunk that it reads or -1, the way of that message: a
# number for each cut back, then for each forth), in an order in which all that each reads comes before it.
_Program = tuple[tuple[int, int, int, int, int], ...]


def pipeline_seconds(
    name: str,
    *,
    num_stages: int,
    num_micro_batches: int,
    virtual_stages: int,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfer_seconds: Sequence[float],
    weight_seconds: Sequence[float] = (),
    later_seconds: Sequence[float] = (),
) -> PipelineSeconds:
    """Costs per chunk, transfers per cut between chunks.

    Args:
        backward_seconds: of a whole backward, or of its half I where the schedule splits it.
        weight_seconds: of W there.
        later_seconds: of a whole backward, what follows when the gradient for the chunk before has been sent.
    """
    p, m, v = num_stages, num_micro_batches, virtual_stages
    weights = weight_seconds or (0.0,) * (p * v)
    placement = schedule_placement(name)
    busy = tuple(
        m
        * sum(
            forward_seconds[chunk] + backward_seconds[chunk] + weights[chunk]
            for chunk in chunks_on(rank, p, p * v, placement)
        )
        for rank in range(p)
    )
    if p == 1:
        return PipelineSeconds(end_seconds=busy, busy_seconds=busy)
    if placement is ChunkPlacement.V:  # where it turns nothing is sent
        transfer_seconds = [0.0 if cut % p == p - 1 else one for cut, one in enumerate(transfer_seconds)]
    back_seconds = transfer_seconds
    if later_seconds and not weight_seconds:
        back_seconds = [one - later for one, later in zip(transfer_seconds, later_seconds[1:], strict=True)]
    costs = forward_seconds, backward_seconds, weights, transfer_seconds, back_seconds
    played = m if m <= _PLAYED_TURNS * p else _PLAYED_TURNS * p
    ends = _play(_program(name, p, played, v), p, *costs)
    if played < m:
        more = m - played
        period = max(busy) / m
        if name == "gpipe":  # forwards wait for the slowest rank, backwards for the slowest of those behind
            slowest = max(forward_seconds)
            ends = [end + more * (slowest + max(backward_seconds[rank:])) for rank, end in enumerate(ends)]
            return PipelineSeconds(end_seconds=tuple(ends), busy_seconds=busy)
        if v == 1:
            period = _period(*costs)
        elif (3 if weight_seconds else 2) * p * v * played <= _MOST_ACTIONS:
            before = _play(_program(name, p, played - p, v), p, *costs)
            period = max(period, max(end - earlier for end, earlier in zip(ends, before, strict=True)) / p)
        ends = [end + more * period for end in ends]
    return PipelineSeconds(end_seconds=tuple(ends), busy_seconds=busy)


def _period(
    forward: Sequence[float],
    backward: Sequence[float],
    weights: Sequence[float],
    transfer: Sequence[float],
    back: Sequence[float],
) -> float:
    """The longest cycle of 1f1b or zb-h1 per micro-batch."""
    work = [a + b for a, b in zip(forward, backward, strict=True)]
    longest = max(a + b for a, b in zip(work, weights, strict=True))
    if not any(transfer):
        return longest
    sums = [0.0, *accumulate(work)]
    ways = [0.0, *accumulate(map(add, transfer, back))]
    size = len(work)
    for first in range(size):
        for last in range(first + 1, size):
            cycle = sums[last + 1] - sums[first] + ways[last] - ways[first] + weights[first]
            longest = max(longest, cycle / (last - first + 1))
    return longest


@lru_cache(maxsize=512)
def _program(name: str, p: int, m: int, v: int) -> _Program:
    # That a backward comes behind its own forward, and W behind I, follows from the order of its rank.
    places, num_cuts = m * p * v, p * v - 1
    orders = rank_orders(name, p, m, v)
    placed = [chunks_on(rank, p, p * v, schedule_placement(name)) for rank in range(p)]
    index = [-1] * (2 * places)
    steps: list[tuple[int, int, int, int, int]] = []
    reached = [0] * p
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, order in enumerate(orders):
            own_chunks = placed[rank]
            for turn, kind, micro_batch in order[reached[rank] :]:
                chunk, source, way = own_chunks[turn], -1, 0
                if kind != WEIGHTS:
                    own = chunk * m + micro_batch + (0 if kind else places)
                    if kind and chunk > 0:
                        source, way = index[own - m], chunk - 1 + num_cuts
                    elif not kind and chunk < p * v - 1:
                        source, way = index[own + m], chunk
                    if source < 0 and chunk != (0 if kind else p * v - 1):
                        break
                    index[own] = len(steps)
                steps.append((rank, chunk, kind, source, way))
                reached[rank] += 1
                has_moved = True
    return tuple(steps)


def _play(
    program: _Program,
    p: int,
    forward: Sequence[float],
    backward: Sequence[float],
    weights: Sequence[float],
    transfer: Sequence[float],
    back: Sequence[float],
) -> list[float]:
    """When each rank ends; `back`: from the end of a backward to the arrival of its input's gradient."""
    costs, ways = (backward, forward, weights), (*back, *transfer)
    free = [0.0] * p
    ends: list[float] = []
    append = ends.append
    for rank, chunk, kind, source, way in program:
        start = free[rank]
        if source >= 0:
            arrival = ends[source] + ways[way]
            if arrival > start:
                start = arrival
        end = start + costs[kind][chunk]
        free[rank] = end
        append(end)
    return free
