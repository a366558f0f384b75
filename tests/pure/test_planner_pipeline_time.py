"""The fast timer of pipelines beside the one that names every action."""

from __future__ import annotations

import random
from itertools import groupby

import pytest

from hybrid.contracts.schedule import ActionKind, make_schedule
from hybrid.contracts.schedule_timing import time_schedule
from hybrid.planner.action_numbers import WEIGHTS, gathers_of_runs, rank_orders
from hybrid.planner.in_flight import in_flight
from hybrid.planner.pipeline_time import pipeline_seconds

KINDS = {ActionKind.F: 1, ActionKind.B: 0, ActionKind.I: 0, ActionKind.W: WEIGHTS}
SPLIT = ("zb-h1", "zbv")
NAMES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2)]


def _both(
    name: str,
    p: int,
    m: int,
    v: int,
    forward: list[float],
    backward: list[float],
    transfer: list[float],
    *,
    is_gradient_first: bool = False,
) -> tuple[list[float], list[float]]:
    """When each rank ends: the fast way, and by playing every action of `contracts/schedule.py`.

    Of a split backward W takes a third on the first chunk, less on each one after it; as much of a whole one follows
    when the input's gradient has been sent, where that leaves first.
    """
    later = [seconds / (3 + place) * is_gradient_first for place, seconds in enumerate(backward)]
    weights = [seconds / (3 + place) for place, seconds in enumerate(backward)] if name in SPLIT else []
    halves = [whole - later for whole, later in zip(backward, weights, strict=True)] if weights else backward
    fast = pipeline_seconds(
        name, num_stages=p, num_micro_batches=m, virtual_stages=v,
        forward_seconds=forward, backward_seconds=halves, weight_seconds=weights, transfer_seconds=transfer,
        later_seconds=later,
    )  # fmt: skip
    schedule = make_schedule(name, num_stages=p, num_micro_batches=m, virtual_stages=v)
    whole = time_schedule(
        schedule, forward_seconds=forward, backward_seconds=backward, weight_seconds=weights or None,
        transfer_seconds=transfer or 0.0, later_seconds=later,
    )  # fmt: skip
    assert list(fast.busy_seconds) == pytest.approx(list(whole.busy_seconds))
    return list(fast.end_seconds), [order[-1].end_seconds for order in whole.timed]


@pytest.mark.parametrize(("name", "v"), NAMES)
def test_short_schedules_are_played_whole(name: str, v: int) -> None:
    """Up to three rounds of micro-batches nothing is estimated, whatever the costs."""
    random.seed(1)
    for p in (1, 2, 4) if name != "interleaved" else (2, 4):
        for m in (p, 2 * p, 3 * p) if name not in SPLIT else (1, p, 3 * p):
            forward, backward = ([random.uniform(0.1, 2) for _ in range(p * v)] for _ in range(2))
            transfer = [random.uniform(0, 1) for _ in range(p * v - 1)]
            for is_first in (False, True):
                fast, whole = _both(name, p, m, v, forward, backward, transfer, is_gradient_first=is_first)
                assert fast == pytest.approx(whole), (p, m)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 37), (3, 1, 64), (4, 1, 50), (8, 1, 64), (4, 2, 48), (8, 2, 64)])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5])
def test_steady_state_is_prolonged_rightly(p: int, v: int, m: int, spread: float) -> None:
    """Long schedules: exact for equal stages and messages that take no time, and for uneven ones too where each rank
    has one chunk; the rest within 2 %. The period is that of the slowest cycle, which a search for balanced splits
    rests on."""
    random.seed(p * m)
    for name in ("1f1b", "zb-h1") if v == 1 else ("interleaved", "zbv"):
        _prolong(name, p, v, m, spread)


def _prolong(name: str, p: int, v: int, m: int, spread: float) -> None:
    forward = [1 + spread * random.random() for _ in range(p * v)]
    backward = [2 + 2 * spread * random.random() for _ in range(p * v)]
    for seconds in (0.0, 0.02, 0.3):
        for is_first in (False, True):
            fast, whole = _both(
                name, p, m, v, forward, backward, [seconds] * (p * v - 1), is_gradient_first=is_first
            )  # fmt: skip
            is_exact = seconds == 0.0 and (v == 1 or spread == 0.0) and name not in SPLIT and not is_first
            assert fast == pytest.approx(whole, rel=1e-9 if is_exact else 0.02), seconds


def test_gpipe_waits_for_each_phase() -> None:
    """Forwards wait for the slowest forward, backwards for the slowest backward, which may be another rank's."""
    fast, whole = _both("gpipe", 3, 40, 1, [1, 3, 1], [5, 2, 1], [0.0, 0.0])
    assert fast == pytest.approx(whole)
    assert max(fast) == pytest.approx(40 * (3 + 5) + 1 + 1 + 2 + 1)


@pytest.mark.parametrize(("name", "v"), NAMES)
def test_the_planners_numbers_are_the_lists_that_run(name: str, v: int) -> None:
    """A schedule that is priced, or whose memory is counted, in another order than it runs is another schedule."""
    few = [] if name == "interleaved" else [(4, 1), (3, 2), (4, 7)]
    for p, m in [(2, 2), (2, 6), (3, 3), (3, 12), (4, 4), (5, 10), *few]:
        schedule = make_schedule(name, num_stages=p, num_micro_batches=m, virtual_stages=v)
        numbers = [
            [(action.chunk // p, KINDS[action.kind], action.micro_batch) for action in order]
            for order in schedule.actions
        ]
        assert rank_orders(name, p, m, v) == numbers
        for order, held in zip(numbers, in_flight(name, p, m, v).ranks, strict=True):
            # Behind the micro-batches that wait for a backward those between the halves of one.
            kept, waiting, halved = [0] * v * (1 + (name in SPLIT)), [], []
            for turn, kind, _ in order:
                if kind == WEIGHTS:
                    kept[v + turn] -= 1
                    continue
                kept[turn] += kind
                if not kind:
                    waiting.append(tuple(kept))
                    kept[turn] -= 1
                    if name in SPLIT:
                        kept[v + turn] += 1
                        halved.append(tuple(kept))
            for vectors, rows in ((waiting[:1], held.before), (waiting[1:], held.after), (halved, held.between)):
                told = list(map(tuple, rows.tolist()))
                assert set(told) <= set(vectors)
                assert all(any(all(a <= b for a, b in zip(one, it, strict=True)) for it in told) for one in vectors)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zbv"])
def test_parameters_kept_for_a_run_are_gathered_for_each_run_of_their_chunk(name: str) -> None:
    """Fault: one gather a step was priced for chunks that ranks leave and come back to all the time."""
    v = 2 if name in {"interleaved", "zbv"} else 1
    for p, m in [(2, 4), (4, 8), (4, 64), (3, 30)]:
        schedule = make_schedule(name, num_stages=p, num_micro_batches=m, virtual_stages=v)
        runs = [list(run) for order in schedule.actions for _, run in groupby(order, lambda action: action.chunk)]
        begun = [next((one.kind for one in run if one.kind is not ActionKind.W), None) for run in runs]
        found = gathers_of_runs(name, p, m, v)
        if v == 1:
            assert found == (1 / m, 0)
        else:
            both = (begun.count(ActionKind.F), begun.count(ActionKind.B) + begun.count(ActionKind.I))
            assert found == pytest.approx(tuple(count / (m * p * v) for count in both))
