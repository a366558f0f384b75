"""The action lists of `contracts/schedule.py` as plain numbers.

A search looks at hundreds of schedules of ten thousand actions, and objects for them take longer than all else that it
does with them. A test compares these numbers with the lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hybrid.contracts.schedule import v_parts

__all__ = [
    "WEIGHTS",
    "Alternation",
    "Step",
    "Steps",
    "alternation",
    "gathers_of_runs",
    "rank_orders",
    "runs_of_chunks",
    "split_steps",
]

WEIGHTS = 2
Step = tuple[int, int, int]
"""(which of the rank's chunks, kind, micro-batch). Kind: 1 a forward, 0 a backward or half I, `WEIGHTS` W."""

Steps = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
"""Many steps, column by column."""

_KINDS = np.array([1, 0, WEIGHTS], np.int32)
_WORDS = MappingProxyType({"Fd": 0, "Id": 1, "Wd": 2, "Fu": 3, "Iu": 4, "Wu": 5})

# Forwards before the first backward of a rank, where forwards and backwards alternate from then on.
_WARMUPS: Mapping[str, Callable[[int, int, int, int], int]] = MappingProxyType(
    {
        "gpipe": lambda rank, p, m, v: m,
        "1f1b": lambda rank, p, m, v: p - 1 - rank,
        "interleaved": lambda rank, p, m, v: 2 * (p - 1 - rank) + (v - 1) * p,
    }
)


@dataclass(frozen=True, slots=True)
class Alternation:
    """Every rank runs `forwards` and `backwards` in these orders, and rank r begins with `warmups[r]` forwards."""

    forwards: tuple[Step, ...]
    backwards: tuple[Step, ...]
    warmups: tuple[int, ...]


@lru_cache(maxsize=256)
def alternation(name: str, p: int, m: int, v: int) -> Alternation | None:
    """Of a schedule of p ranks, m micro-batches and v chunks per rank; None for one that does not alternate."""
    warmup = _WARMUPS.get(name)
    if warmup is None:
        return None
    if v == 1:
        places = [(0, micro_batch) for micro_batch in range(m)]
    else:
        places = [
            (turn, micro_batch)
            for first in range(0, m, p)
            for turn in range(v)
            for micro_batch in range(first, first + p)
        ]
    return Alternation(
        forwards=tuple((turn, True, micro_batch) for turn, micro_batch in places),
        backwards=tuple((v - 1 - turn, False, micro_batch) for turn, micro_batch in places),
        warmups=tuple(min(warmup(rank, p, m, v), len(places)) for rank in range(p)),
    )


def rank_orders(name: str, p: int, m: int, v: int) -> list[list[Step]]:
    """What each rank runs, in order."""
    found = alternation(name, p, m, v)
    if found is None:
        return [
            list(zip(*(column.tolist() for column in split_steps(name, p, m, rank)), strict=True)) for rank in range(p)
        ]
    orders = []
    size = len(found.forwards)
    for warmup in found.warmups:
        order = [*found.forwards, *found.backwards]
        order[warmup : 2 * size - warmup : 2] = found.forwards[warmup:]
        order[warmup + 1 : 2 * size - warmup : 2] = found.backwards[: size - warmup]
        orders.append(order)
    return orders


def split_steps(name: str, p: int, m: int, rank: int) -> Steps:
    """What a rank runs, in order, under a schedule that splits each backward."""
    words = _words_v(p, m, rank) if name == "zbv" else _words_h1(p, m, rank)
    place = np.zeros(len(words), np.int32)
    for word in range(6):  # a word is said for one micro-batch after the other
        own = words == word
        place[own] = np.arange(np.count_nonzero(own))
    is_there = place < m
    words, place = words[is_there], place[is_there]
    return words // 3, _KINDS[words % 3], place


def _words_h1(p: int, m: int, rank: int) -> NDArray[np.int32]:
    """3 · (which chunk) + (0 F, 1 I, 2 W), as `contracts/schedule.py` has them."""
    warmup = min(p - 1 - rank, m)
    rounds = np.tile(np.array([0, 1, 2], np.int32), (m, 1))
    is_there = np.ones_like(rounds, bool)
    is_there[m - warmup :, 0] = False
    is_there[:rank, 2] = False
    return np.concatenate([np.zeros(warmup, np.int32), rounds[is_there], np.full(min(rank, m), 2, np.int32)])


def _words_v(p: int, m: int, rank: int) -> NDArray[np.int32]:
    parts = v_parts(rank, num_stages=p, num_micro_batches=m)
    return np.array([_WORDS[word] for repeats, words in parts for word in words.split() * repeats], np.int32)


@lru_cache(maxsize=1024)
def gathers_of_runs(name: str, p: int, m: int, v: int) -> tuple[float, float]:
    """How often a chunk is gathered for a forward, and for a backward, per micro-batch, where it stays whole as long as
    its rank works on it: the mean of all chunks.

    A long step repeats its middle, of which so many micro-batches as there are ranks are looked at.
    """
    if v == 1:
        return 1 / m, 0.0
    played = m if m <= 4 * p else 4 * p - (4 * p - m) % p
    counts = _runs(name, p, played, v)
    if played < m:
        before = _runs(name, p, played - p, v)
        turns = (m - played) / p
        counts = counts[0] + turns * (counts[0] - before[0]), counts[1] + turns * (counts[1] - before[1])
    return counts[0] / (m * p * v), counts[1] / (m * p * v)


def runs_of_chunks(name: str, p: int, m: int, v: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Of each rank, for each of its chunks: runs of steps on it that begin with a forward, and with a backward.

    W reads no parameters; one of another chunk than the step before it lets go of what is there.
    """
    if v == 1:
        yield from (((1, 0),),) * p
        return
    for turns, kinds in _turns_and_kinds(name, p, m, v):
        is_read = kinds != WEIGHTS
        of_last = turns[is_read][np.maximum(np.cumsum(is_read) - 1, 0)]
        left = np.cumsum(~is_read & (turns != of_last))[is_read]
        own, kind = turns[is_read], kinds[is_read]
        begins = np.ones(len(own), bool)
        begins[1:] = (own[1:] != own[:-1]) | (left[1:] != left[:-1])
        forwards, backwards = (np.bincount(own[begins & (kind == which)], minlength=v) for which in (1, 0))
        yield tuple(zip(forwards.tolist(), backwards.tolist(), strict=True))


def _runs(name: str, p: int, m: int, v: int) -> tuple[float, float]:
    """Of all ranks and chunks together."""
    forwards, backwards = zip(*(one for rank in runs_of_chunks(name, p, m, v) for one in rank), strict=True)
    return sum(forwards), sum(backwards)


def _turns_and_kinds(name: str, p: int, m: int, v: int) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Of each rank, in the order of its steps."""
    found = alternation(name, p, m, v)
    if found is None:
        yield from (split_steps(name, p, m, rank)[:2] for rank in range(p))
        return
    forwards, backwards = (
        np.array([turn for turn, _, _ in steps], np.int32) for steps in (found.forwards, found.backwards)
    )
    size = len(forwards)
    is_forward = np.repeat(np.array([1, 0], np.int32), size)
    for warmup in found.warmups:
        turns, kinds = np.concatenate([forwards, backwards]), is_forward.copy()
        turns[warmup : 2 * size - warmup : 2], kinds[warmup : 2 * size - warmup : 2] = forwards[warmup:], 1
        turns[warmup + 1 : 2 * size - warmup : 2] = backwards[: size - warmup]
        kinds[warmup + 1 : 2 * size - warmup : 2] = 0
        yield turns, kinds
