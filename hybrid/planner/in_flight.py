"""How many micro-batches each pipeline rank keeps, at the moments that may be fullest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from hybrid.planner.action_numbers import WEIGHTS, Steps, alternation, split_steps

__all__ = ["Held", "InFlight", "Rows", "in_flight"]

Rows = NDArray[np.int32]
"""Moments × chunks of a rank: micro-batches kept."""

_NONE: Rows = np.zeros((0, 1), np.int32)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Held:
    """Micro-batches kept of each chunk of a rank; one moment in a row. Moments like others, and those at which another
    one keeps more of all chunks, may be left out.

    Where backward is split, behind the micro-batches that wait for it come those of each chunk between its halves.

    Args:
        before: when the rank's first backward begins.
        after: when a later one begins.
        between: at the end of the first half of a backward, where it is split; no row where it is not.
    """

    before: Rows
    after: Rows
    between: Rows


class InFlight:
    """What each pipeline rank keeps, worked out when it is asked for; one object for each schedule, which is its own
    key in tables."""

    def __init__(self, schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int) -> None:
        self._schedule, self._num_stages = schedule, num_stages
        self._num_micro_batches, self._virtual_stages = num_micro_batches, virtual_stages
        self._known: dict[int, Held] = {}

    @property
    def ranks(self) -> tuple[Held, ...]:
        """Of all of them."""
        return tuple(map(self.of, range(self._num_stages)))

    def of(self, rank: int) -> Held:
        """Of one rank."""
        known = self._known.get(rank)
        if known is None:
            known = self._known[rank] = self._of(rank)
        return known

    def _of(self, rank: int) -> Held:
        p, m, v = self._num_stages, self._num_micro_batches, self._virtual_stages
        if p == 1:
            return _rows([[1] * v], [[1] * v] * (m > 1))
        if self._schedule == "gpipe":
            return _rows([[m]], [[m - 1]] * (m > 1))
        if self._in_turn is None:
            return _held(split_steps(self._schedule, p, m, rank), v)
        warmups, begun, done = self._in_turn
        size, warmup = len(done) - 1, warmups[rank]
        # While each backward runs. Until all forwards have begun this repeats, and from then on it only falls.
        steady = size - warmup
        places = [place for place in (*range(min(steady, p * v + 1)), max(steady, 0), 1) if place < size]
        kept = begun[np.minimum(np.array(places) + warmup + 1, size)] - done[places]
        return Held(before=kept[:1], after=kept[1:], between=_NONE)

    @cached_property
    def _in_turn(self) -> tuple[tuple[int, ...], Rows, Rows] | None:
        """Where forwards and backwards alternate: forwards before the first backward of each rank, and how many of each
        chunk have begun and are done after so many."""
        v = self._virtual_stages
        plain = alternation(self._schedule, self._num_stages, self._num_micro_batches, v)
        if plain is None:
            return None
        begun, done = (
            np.concatenate([np.zeros((1, v), np.int32), np.cumsum(one_hot[[turn for turn, _, _ in steps]], 0)])
            for one_hot in (np.eye(v, dtype=np.int32),)
            for steps in (plain.forwards, plain.backwards)
        )
        return plain.warmups, begun, done


def in_flight(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int) -> InFlight:
    """For each pipeline rank, from its list of actions.

    A long step repeats its middle, so of more than four rounds of `num_stages` micro-batches only so many are looked
    at; `gpipe` keeps all of them.
    """
    if num_stages == 1:
        num_micro_batches = min(num_micro_batches, 2)
    elif schedule != "gpipe":
        limit = 4 * num_stages  # two rounds until the last chunk's first backward, one that repeats, one to the end
        if num_micro_batches > limit:
            num_micro_batches = limit - (limit - num_micro_batches) % num_stages
    return _in_flight(schedule, num_stages, num_micro_batches, virtual_stages)


@lru_cache(maxsize=1024)
def _in_flight(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int) -> InFlight:
    return InFlight(schedule, num_stages, num_micro_batches, virtual_stages)


def _held(steps: Steps, virtual_stages: int) -> Held:
    """Of a schedule that splits each backward."""
    turns, kinds, _ = steps
    places = np.arange(len(turns))
    is_forward, is_weights = kinds == 1, kinds == WEIGHTS
    changes = np.zeros((len(turns), 2 * virtual_stages), dtype=np.int32)
    changes[places, turns] = np.where(is_weights, 0, 2 * is_forward - 1)
    changes[places, virtual_stages + turns] = np.where(is_forward, 0, 2 * ~is_weights - 1)
    ends = np.cumsum(changes, axis=0)
    halves = ~is_forward & ~is_weights
    begins = (ends - changes)[halves]
    return Held(before=begins[:1], after=begins[1:], between=ends[halves])


def _rows(before: list[list[int]], after: list[list[int]]) -> Held:
    width = len(before[0])
    return Held(before=np.array(before, np.int32), after=np.array(after, np.int32).reshape(-1, width), between=_NONE)
