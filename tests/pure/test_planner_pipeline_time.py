"""The fast timer of pipelines beside the one that names every action."""

from __future__ import annotations

import random

import pytest

from hybrid.contracts.schedule import ActionKind, make_schedule
from hybrid.contracts.schedule_timing import time_schedule
from hybrid.planner.action_numbers import rank_orders
from hybrid.planner.memory_activations import in_flight
from hybrid.planner.pipeline_time import pipeline_seconds


def _both(
    name: str, p: int, m: int, v: int, forward: list[float], backward: list[float], transfer: list[float]
) -> tuple[list[float], list[float]]:
    """When each rank ends: the fast way, and by playing every action of `contracts/schedule.py`."""
    fast = pipeline_seconds(
        name, num_stages=p, num_micro_batches=m, virtual_stages=v,
        forward_seconds=forward, backward_seconds=backward, transfer_seconds=transfer,
    )  # fmt: skip
    schedule = make_schedule(name, num_stages=p, num_micro_batches=m, virtual_stages=v)
    whole = time_schedule(
        schedule, forward_seconds=forward, backward_seconds=backward, transfer_seconds=transfer or 0.0
    )
    assert list(fast.busy_seconds) == pytest.approx(list(whole.busy_seconds))
    return list(fast.end_seconds), [order[-1].end_seconds for order in whole.timed]


@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_short_schedules_are_played_whole(name: str, v: int) -> None:
    """Up to three rounds of micro-batches nothing is estimated, whatever the costs."""
    random.seed(1)
    for p in (1, 2, 4) if name != "interleaved" else (2, 4):
        for m in (p, 2 * p, 3 * p):
            forward, backward = ([random.uniform(0.1, 2) for _ in range(p * v)] for _ in range(2))
            transfer = [random.uniform(0, 1) for _ in range(p * v - 1)]
            fast, whole = _both(name, p, m, v, forward, backward, transfer)
            assert fast == pytest.approx(whole), (p, m)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 37), (3, 1, 64), (4, 1, 50), (8, 1, 64), (4, 2, 48), (8, 2, 64)])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5])
def test_steady_state_is_prolonged_rightly(p: int, v: int, m: int, spread: float) -> None:
    """Long schedules: exact for equal stages and messages that take no time, and for uneven ones too where each rank
    has one chunk; the rest within 2 %. The period is that of the slowest cycle, which a search for balanced splits
    rests on."""
    random.seed(p * m)
    name = "1f1b" if v == 1 else "interleaved"
    forward = [1 + spread * random.random() for _ in range(p * v)]
    backward = [2 + 2 * spread * random.random() for _ in range(p * v)]
    for seconds in (0.0, 0.02, 0.3):
        fast, whole = _both(name, p, m, v, forward, backward, [seconds] * (p * v - 1))
        is_exact = seconds == 0.0 and (v == 1 or spread == 0.0)
        assert fast == pytest.approx(whole, rel=1e-9 if is_exact else 0.02), seconds


def test_gpipe_waits_for_each_phase() -> None:
    """Forwards wait for the slowest forward, backwards for the slowest backward, which may be another rank's."""
    fast, whole = _both("gpipe", 3, 40, 1, [1, 3, 1], [5, 2, 1], [0.0, 0.0])
    assert fast == pytest.approx(whole)
    assert max(fast) == pytest.approx(40 * (3 + 5) + 1 + 1 + 2 + 1)


@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_the_planners_numbers_are_the_lists_that_run(name: str, v: int) -> None:
    """A schedule that is priced, or whose memory is counted, in another order than it runs is another schedule."""
    for p, m in [(2, 2), (2, 6), (3, 3), (3, 12), (4, 4), (5, 10), *([] if v > 1 else [(4, 1), (3, 2), (4, 7)])]:
        schedule = make_schedule(name, num_stages=p, num_micro_batches=m, virtual_stages=v)
        numbers = [
            [(action.chunk // p, action.kind is ActionKind.F, action.micro_batch) for action in order]
            for order in schedule.actions
        ]
        assert rank_orders(name, p, m, v) == numbers
        for order, held in zip(numbers, in_flight(name, p, m, v).ranks, strict=True):
            kept, waiting = [0] * v, []
            for turn, is_forward, _ in order:
                kept[turn] += is_forward
                if not is_forward:
                    waiting.append(tuple(kept))
                    kept[turn] -= 1
            for vectors, told in ((waiting[:1], held.before), (waiting[1:], held.after)):
                assert set(told) <= set(vectors)
                assert all(any(all(a <= b for a, b in zip(one, it, strict=True)) for it in told) for one in vectors)
