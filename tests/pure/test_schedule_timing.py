"""The timer: closed forms, a longest path as the other way to tell, and times worked out by hand."""

from __future__ import annotations

from itertools import pairwise, product

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.contracts.schedule import Schedule, dependencies, make_schedule
from hybrid.contracts.schedule_check import Transport, check_schedule, find_deadlock
from hybrid.contracts.schedule_text import from_text
from hybrid.contracts.schedule_timing import Timeline, closed_form, time_schedule
from hybrid.errors import StrategyError
from tests.pure.test_schedule_check import SIZES, made, schedules


@pytest.mark.parametrize("backward", [1, 2, 0.5])
def test_closed_forms(backward: float) -> None:
    """Bubble, step time and what is kept, for every size; the formulas written out once more."""
    for size in SIZES:
        name, p, m, v = size
        timeline = time_schedule(made(size), forward_seconds=1, backward_seconds=backward)
        assert timeline.total_seconds == (v * m + p - 1) * (1 + backward), size
        bubble = (p - 1) / (m + p - 1) if name != "interleaved" else (p - 1) / (v * m + p - 1)
        kept = {
            "gpipe": [m] * p,
            "1f1b": [min(m, p - rank) for rank in range(p)],
            "interleaved": [min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1) for rank in range(p)],
        }[name]
        assert timeline.bubble_fraction == pytest.approx(bubble, abs=1e-12), size
        assert timeline.bubble_fractions == pytest.approx([bubble] * p, abs=1e-12), size
        assert list(timeline.max_in_flight) == kept, size
        form = closed_form(timeline.schedule)
        assert form is not None
        assert (form.bubble_fraction, list(form.in_flight)) == (pytest.approx(bubble), kept)


def test_closed_forms_are_for_made_schedules_only() -> None:
    """A file may carry a known name and another order."""
    assert closed_form(from_text("schedule name=1f1b\nF0.0 F0.1 B0.0 B0.1")) is None
    assert closed_form(from_text("schedule name=1f1b\nF0.0 B0.0 F0.1 B0.1")) is not None
    assert closed_form(from_text("F0.0 B0.0 F0.1 B0.1")) is None
    assert closed_form(from_text("schedule name=interleaved\nF0.0 B0.0")) is None


def test_zb_h1_has_a_third_of_the_bubble_in_the_memory_of_1f1b() -> None:
    """Whatever the transport; also in its own closed form, which holds from as many micro-batches as stages on."""
    for p, m in product((1, 2, 3, 4, 8), (1, 2, 4, 8, 9, 20)):
        schedule = make_schedule("zb-h1", num_stages=p, num_micro_batches=m)
        for transport in Transport:
            check_schedule(schedule, transport=transport)
        timeline = time_schedule(schedule, forward_seconds=1, backward_seconds=2)
        assert timeline.max_in_flight == (min(p, m),) * p
        form = closed_form(schedule)
        assert (form is None) == (m < p)
        if form is not None:
            assert timeline.total_seconds == 3 * m + p - 1
            assert form.bubble_fraction == pytest.approx(timeline.bubble_fraction, abs=1e-12)
            assert form.in_flight == timeline.max_in_flight
        assert timeline.total_seconds <= 3 * (m + p - 1)


def test_zbv_has_a_sixth_of_the_bubble_in_the_memory_of_1f1b() -> None:
    """In halves of a stage, each of which takes one second a piece; from 2p-1 micro-batches on, all ranks alike."""
    for p, m in product((1, 2, 3, 4, 8), (1, 2, 4, 7, 8, 15, 20)):
        schedule = make_schedule("zbv", num_stages=p, num_micro_batches=m)
        check_schedule(schedule)
        stuck = {transport.name for transport in Transport if find_deadlock(schedule, transport=transport)}
        assert stuck == ({"PAIR", "DIRECTION", "BLOCKING"} if p > 1 < m else set()), (p, m)
        timeline = time_schedule(schedule, forward_seconds=1, backward_seconds=2)
        assert max(timeline.max_in_flight) <= 2 * p
        form = closed_form(schedule)
        assert (form is None) == (m < 2 * p - 1)
        if form is not None:
            assert timeline.total_seconds == 6 * m + p - 1
            assert form.bubble_fraction == pytest.approx(timeline.bubble_fraction, abs=1e-12)
            assert form.in_flight == timeline.max_in_flight == (2 * p,) * p
        halves = time_schedule(
            make_schedule("zb-h1", num_stages=p, num_micro_batches=m), forward_seconds=2, backward_seconds=4
        )
        assert timeline.total_seconds <= halves.total_seconds, (p, m)


def test_zbv_bears_halves_of_unequal_length() -> None:
    """An order that is as short for equal halves, but meets more waiting with each micro-batch, would show here."""
    for inputs in (0.8, 1.2):
        schedule = make_schedule("zbv", num_stages=4, num_micro_batches=32)
        timeline = time_schedule(schedule, forward_seconds=1, backward_seconds=2, input_seconds=inputs)
        assert timeline.bubble_fraction < 0.03, (inputs, timeline.bubble_fraction)


def test_a_split_backward_fills_the_bubble() -> None:
    """By hand, F = I = W = 1: one idle second per rank, a third of 1f1b's (planners call this order ZB-H1)."""
    split = from_text("F0.0 F0.1 I0.0 W0.0 I0.1 W0.1\nF1.0 I1.0 F1.1 I1.1 W1.0 W1.1")
    timeline = time_schedule(split, forward_seconds=1, backward_seconds=2)
    assert [[timed.start_seconds for timed in order] for order in timeline.timed] == [
        [0, 1, 3, 4, 5, 6],
        [1, 2, 3, 4, 5, 6],
    ]
    assert (timeline.total_seconds, timeline.bubble_fractions) == (7, pytest.approx((1 / 7, 1 / 7)))
    uneven = time_schedule(split, forward_seconds=1, backward_seconds=2, input_seconds=1.5)
    assert uneven.busy_seconds == (6, 6), "weight gradients take what is left of the whole backward"


def test_uneven_chunks_and_transfers_by_hand() -> None:
    """Two stages, the second twice as slow, a message takes half a second."""
    timeline = time_schedule(
        make_schedule("1f1b", num_stages=2, num_micro_batches=2),
        forward_seconds=[1, 2],
        backward_seconds=[2, 4],
        transfer_seconds=0.5,
    )
    assert [[(str(t.action), t.start_seconds, t.end_seconds) for t in order] for order in timeline.timed] == [
        [("F0.0", 0, 1), ("F0.1", 1, 2), ("B0.0", 8, 10), ("B0.1", 14, 16)],
        [("F1.0", 1.5, 3.5), ("B1.0", 3.5, 7.5), ("F1.1", 7.5, 9.5), ("B1.1", 9.5, 13.5)],
    ]
    assert [str(timed.action) for timed in timeline.critical_path] == ["F0.0", "F1.0", "B1.0", "F1.1", "B1.1", "B0.1"]
    assert timeline.bubble_fractions == pytest.approx((10 / 16, 4 / 16))
    assert timeline.bubble_fraction == pytest.approx(14 / 32)


def test_a_gradient_that_leaves_before_the_backward_ends_by_hand() -> None:
    """Of the second stage's backward of three, one second computes gradients of weights that nobody waits for."""
    timeline = time_schedule(
        make_schedule("1f1b", num_stages=2, num_micro_batches=2),
        forward_seconds=1,
        backward_seconds=[2, 3],
        transfer_seconds=0.5,
        later_seconds=[1, 1],
    )
    assert [[(str(t.action), t.start_seconds, t.end_seconds) for t in order] for order in timeline.timed] == [
        [("F0.0", 0, 1), ("F0.1", 1, 2), ("B0.0", 5, 7), ("B0.1", 9, 11)],
        [("F1.0", 1.5, 2.5), ("B1.0", 2.5, 5.5), ("F1.1", 5.5, 6.5), ("B1.1", 6.5, 9.5)],
    ]
    assert timeline.busy_seconds == (6, 8)
    assert [str(timed.action) for timed in timeline.critical_path] == ["F0.0", "F1.0", "B1.0", "F1.1", "B1.1", "B0.1"]
    with pytest.raises(StrategyError, match="later_seconds is more than backward_seconds"):
        time_schedule(timeline.schedule, forward_seconds=1, backward_seconds=1, later_seconds=2)


def test_transfers_may_differ_by_cut() -> None:
    made_ = make_schedule("gpipe", num_stages=3, num_micro_batches=1)
    costs = {"forward_seconds": 1.0, "backward_seconds": 1.0}
    assert time_schedule(made_, **costs, transfer_seconds=[10, 100]).total_seconds == 6 + 220
    one_rank = make_schedule("interleaved", num_stages=1, num_micro_batches=1, virtual_stages=3)
    assert time_schedule(one_rank, **costs, transfer_seconds=100).total_seconds == 6, "nothing is sent within a rank"


def test_kept_per_chunk() -> None:
    timeline = time_schedule(
        make_schedule("interleaved", num_stages=2, num_micro_batches=4, virtual_stages=2),
        forward_seconds=1,
        backward_seconds=1,
    )
    assert timeline.max_in_flight == (5, 3)
    assert timeline.max_in_flight_per_chunk == (4, 3, 2, 1)


# ---------------------------------------------------------------- any costs

seconds = st.integers(1, 9)


@st.composite
def timelines(draw: st.DrawFn) -> tuple[Timeline, list[int], list[int], list[int]]:
    schedule: Schedule = draw(schedules)
    size = schedule.num_chunks
    forward, backward, delay = (
        draw(st.lists(numbers, min_size=n, max_size=n))
        for numbers, n in ((seconds, size), (seconds, size), (st.integers(0, 5), size - 1))
    )
    timeline = time_schedule(schedule, forward_seconds=forward, backward_seconds=backward, transfer_seconds=delay)
    return timeline, forward, backward, delay


@given(timelines())
def test_the_step_is_the_longest_path(given_: tuple[Timeline, list[int], list[int], list[int]]) -> None:
    timeline, forward, backward, delay = given_
    schedule = timeline.schedule
    length = {t.action: t.end_seconds - t.start_seconds for order in timeline.timed for t in order}
    assert all(length[a] == (forward if a.kind.letter == "F" else backward)[a.chunk] for a in length)
    graph = networkx.DiGraph()
    for action, sources in dependencies(schedule).items():
        for source in sources:
            is_sent = schedule.rank_of(source.chunk) != schedule.rank_of(action.chunk)
            wait = delay[min(source.chunk, action.chunk)] if is_sent else 0
            graph.add_edge(source, action, weight=length[source] + wait)
    for order in schedule.actions:
        for before, after in pairwise(order):
            known = graph.get_edge_data(before, after, {"weight": 0})["weight"]
            graph.add_edge(before, after, weight=max(known, length[before]))
        graph.add_edge(order[-1], "end", weight=length[order[-1]])
    assert timeline.total_seconds == networkx.dag_longest_path_length(graph)


@given(timelines())
def test_the_step_is_never_below_its_bounds(given_: tuple[Timeline, list[int], list[int], list[int]]) -> None:
    """A rank's own work, between the first arrival and the last way back; and one micro-batch all the way."""
    timeline, forward, backward, delay = given_
    schedule = timeline.schedule
    sent = delay if schedule.num_stages > 1 else [0] * len(delay)
    assert timeline.total_seconds >= sum(forward) + sum(backward) + 2 * sum(sent)
    for rank, busy in enumerate(timeline.busy_seconds):
        around = sum(forward[:rank]) + sum(backward[:rank]) + 2 * sum(sent[:rank])
        assert timeline.total_seconds >= around + busy
        assert busy == schedule.num_micro_batches * sum(forward[c] + backward[c] for c in schedule.chunks_of(rank))
    assert all(0 <= fraction < 1 for fraction in timeline.bubble_fractions)


@given(timelines())
def test_the_critical_path_leads_from_start_to_end(given_: tuple[Timeline, list[int], list[int], list[int]]) -> None:
    timeline, _, _, delay = given_
    path = timeline.critical_path
    assert path[0].start_seconds == 0
    assert path[-1].end_seconds == timeline.total_seconds
    for before, after in pairwise(path):
        chunks = before.action.chunk, after.action.chunk
        wait = delay[min(chunks)] if before.rank != after.rank else 0
        assert after.start_seconds == before.end_seconds + wait


@given(timelines())
def test_what_is_kept_is_what_the_clock_says(given_: tuple[Timeline, list[int], list[int], list[int]]) -> None:
    timeline = given_[0]
    for order, kept in zip(timeline.timed, timeline.max_in_flight, strict=True):
        starts = [(timed.start_seconds, 1) for timed in order if timed.action.kind.letter == "F"]
        ends = [(timed.end_seconds, -1) for timed in order if timed.action.kind.letter == "B"]
        now = most = 0
        for _, change in sorted(starts + ends):  # at the same second the end comes first
            now += change
            most = max(most, now)
        assert (now, most) == (0, kept)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"forward_seconds": [1, 2, 3]}, ["forward_seconds has 3 values for 2 chunks"]),
        ({"backward_seconds": -1}, ["backward_seconds = -1.0"]),
        ({"weight_seconds": float("nan")}, ["weight_seconds = nan"]),
        ({"transfer_seconds": [1, 2]}, ["transfer_seconds has 2 values for 1 cut between chunks"]),
        ({"transfer_seconds": float("inf")}, ["transfer_seconds = inf"]),
    ],
)
def test_impossible_costs_are_refused(costs: dict[str, float], words: list[str]) -> None:
    schedule = make_schedule("1f1b", num_stages=2, num_micro_batches=2)
    with pytest.raises(StrategyError) as caught:
        time_schedule(schedule, **({"forward_seconds": 1.0, "backward_seconds": 1.0} | costs))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_schedule_that_cannot_end_says_why() -> None:
    costs = {"forward_seconds": 1.0, "backward_seconds": 1.0}
    with pytest.raises(StrategyError, match=r"deadlock .* rank 0 waits before B0\.0"):
        time_schedule(from_text("F0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.0 B1.1"), **costs)
    with pytest.raises(StrategyError, match=r"rank 1 lacks F1\.0"):
        time_schedule(from_text("F0.0 B0.0\nB1.0"), **costs)
