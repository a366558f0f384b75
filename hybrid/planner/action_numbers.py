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

__all__ = ["Alternation", "alternation", "rank_orders"]

Step = tuple[int, bool, int]
"""(which of the rank's chunks, is it a forward, micro-batch)"""

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
    """What each rank runs, in order; backwards that are not split."""
    found = alternation(name, p, m, v)
    if found is None:
        schedule = make_schedule(name, num_stages=p, num_micro_batches=m, virtual_stages=v)
        return [
            [(action.chunk // p, action.kind is ActionKind.F, action.micro_batch) for action in order]
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
