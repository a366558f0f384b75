"""The action lists of `contracts/schedule.py` as plain numbers.

A search looks at hundreds of schedules of ten thousand actions, and objects for them take longer than all else that it
does with them. A test compares these numbers with the lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from hybrid.contracts.schedule import ActionKind, make_schedule

__all__ = ["WEIGHTS", "Alternation", "alternation", "gathers_of_runs", "rank_orders"]

WEIGHTS = 2
Step = tuple[int, int, int]
"""(which of the rank's chunks, kind, micro-batch). Kind: True a forward, False a backward or half I, `WEIGHTS` W."""

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
        schedule = make_schedule(name, num_stages=p, num_micro_batches=m, virtual_stages=v)
        return [
            [(action.chunk // p, _kind(action.kind), action.micro_batch) for action in order]
            for order in schedule.actions
        ]
    orders = []
    size = len(found.forwards)
    for warmup in found.warmups:
        order = [*found.forwards, *found.backwards]
        order[warmup : 2 * size - warmup : 2] = found.forwards[warmup:]
        order[warmup + 1 : 2 * size - warmup : 2] = found.backwards[: size - warmup]
        orders.append(order)
    return orders


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


def _runs(name: str, p: int, m: int, v: int) -> tuple[float, float]:
    """Runs of all ranks on one chunk that begin with a forward, and with a backward; W reads no parameters."""
    forwards = backwards = 0
    for order in rank_orders(name, p, m, v):
        last = -1
        for turn, kind, _ in order:
            if turn == last:
                continue
            last = -1 if kind == WEIGHTS else turn
            if kind != WEIGHTS:
                forwards += bool(kind)
                backwards += not kind
    return forwards, backwards


def _kind(kind: ActionKind) -> int:
    return WEIGHTS if kind is ActionKind.W else kind is ActionKind.F
