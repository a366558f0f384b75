"""The clock of a profile: every moment of a step is counted once, to what is innermost."""

from __future__ import annotations

import threading

from hybrid.collectives.ranges import RangeKind
from hybrid.profile.step_clock import StepClock, covered_seconds


class Hand:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_moment_counts_once_to_the_innermost_kind() -> None:
    """Protects the table: parts and exposed communication add up to the step, whatever lies within what."""
    hand = Hand()
    clock = StepClock(hand)
    clock.begin_step()
    hand.now += 1  # other
    clock.enter(RangeKind.BACKWARD)
    hand.now += 2
    clock.enter(RangeKind.PLAIN)  # "reduce bucket 0" says nothing of its own
    hand.now += 4
    clock.enter(RangeKind.COMMUNICATION, "dp_shard", "reduce_scatter")
    hand.now += 8
    clock.leave()
    clock.leave()
    hand.now += 16
    clock.leave()
    clock.end_step()
    assert clock.of_kind(RangeKind.PLAIN) == 1
    assert clock.of_kind(RangeKind.BACKWARD) == 2 + 4 + 16
    assert clock.communication() == {("dp_shard", "reduce_scatter"): (8.0,)}
    told = [(kind, start - 100.0, end - 100.0) for (kind, _, _), start, end in clock.stretches]
    assert told == [
        (RangeKind.PLAIN, 0, 1),
        (RangeKind.BACKWARD, 1, 7),  # the range without a kind is no border
        (RangeKind.COMMUNICATION, 7, 15),
        (RangeKind.BACKWARD, 15, 31),
    ]
    assert clock.step_seconds == [31]
    assert clock.blocked == {"dp_shard": [(107.0, 115.0)]}


def test_time_between_steps_and_other_threads_do_not_count() -> None:
    """Protects the step from the data loader before it, and from a save that communicates beside it."""
    hand = Hand()
    clock = StepClock(hand)
    clock.enter(RangeKind.FORWARD)  # of an evaluation before the first step
    hand.now += 5
    clock.leave()
    for _ in range(2):
        clock.begin_step()
        hand.now += 1
        beside = threading.Thread(target=clock.enter, args=(RangeKind.COMMUNICATION, "world", "control"))
        beside.start()
        beside.join()
        hand.now += 1
        clock.end_step()
        hand.now += 3
    assert clock.step_seconds == [2, 2]
    assert clock.between_seconds == [3]
    assert clock.communication() == {}


def test_intervals_that_overlap_are_covered_once() -> None:
    """Protects 'under way': two messages at once take no longer than one."""
    assert covered_seconds([]) == 0
    assert covered_seconds([(0, 2), (1, 3), (1, 2), (5, 6)]) == 4
    assert covered_seconds([(0, 2), (1, 3), (5, 6)], within=(1.5, 5.5)) == 2.0
    assert covered_seconds([(0, 1)], within=(2, 3)) == 0
