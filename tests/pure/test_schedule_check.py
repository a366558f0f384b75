"""The checker: it lets every good schedule pass, and names what is wrong with any other."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.contracts.schedule import Action, ActionKind, Schedule, dependencies, make_schedule
from hybrid.contracts.schedule_check import Transport, check_schedule, find_deadlock
from hybrid.contracts.schedule_text import from_text
from hybrid.contracts.schedule_transfers import transfers
from hybrid.errors import StrategyError

SIZES = [
    (name, num_stages, num_micro_batches, virtual_stages)
    for virtual_stages in (1, 2, 3)
    for name in (("gpipe", "1f1b") if virtual_stages == 1 else ("interleaved",))
    for num_stages in range(1, 7)
    for num_micro_batches in range(1, 13)
    if virtual_stages == 1 or num_micro_batches % num_stages == 0
]


def made(size: tuple[str, int, int, int]) -> Schedule:
    name, num_stages, num_micro_batches, virtual_stages = size
    return make_schedule(
        name, num_stages=num_stages, num_micro_batches=num_micro_batches, virtual_stages=virtual_stages
    )


schedules = st.sampled_from(SIZES).map(made)


def problems(schedule: Schedule, **options: object) -> tuple[str, ...]:
    with pytest.raises(StrategyError) as caught:
        check_schedule(schedule, **options)  # type: ignore[arg-type]
    return caught.value.problems


def changed(schedule: Schedule, actions: list[list[Action]]) -> Schedule:
    return replace(schedule, name="changed", actions=tuple(map(tuple, actions)))


# ---------------------------------------------------------------- what passes


def test_every_made_schedule_passes() -> None:
    for size in SIZES:
        check_schedule(made(size))


@pytest.mark.parametrize("transport", Transport, ids=lambda transport: transport.name)
def test_what_each_transport_can_carry(transport: Transport) -> None:
    """The table at the top of the checker: `interleaved` needs a queue per source, target and payload."""
    stuck = {size for size in SIZES if find_deadlock(made(size), transport=transport)}
    interleaved = {size for size in SIZES if size[0] == "interleaved" and size[1] > 1}
    assert (
        stuck
        == {
            Transport.BUFFERED: set(),
            Transport.CHANNEL: set(),
            Transport.PAIR: {size for size in interleaved if size[1] == 2},
            Transport.DIRECTION: interleaved,
            Transport.BLOCKING: {size for size in interleaved if size[2] > size[1]},
        }[transport]
    )


def test_a_split_backward_passes() -> None:
    check_schedule(from_text("F0.0 F0.1 I0.0 W0.0 I0.1 W0.1\nF1.0 I1.0 F1.1 I1.1 W1.0 W1.1"))
    check_schedule(from_text("F0.0 B0.0\nF1.0 I1.0 W1.0"))


# ---------------------------------------------------------------- what does not


@given(schedules, st.data())
def test_a_deleted_action_is_caught_by_name(schedule: Schedule, data: st.DataObject) -> None:
    actions = [list(order) for order in schedule.actions]
    rank = data.draw(st.integers(0, len(actions) - 1))
    gone = actions[rank].pop(data.draw(st.integers(0, len(actions[rank]) - 1)))
    assert f"rank {rank} lacks {gone}" in " ".join(problems(changed(schedule, actions)))


@given(schedules, st.data())
def test_a_repeated_action_is_caught_by_name(schedule: Schedule, data: st.DataObject) -> None:
    actions = [list(order) for order in schedule.actions]
    again = data.draw(st.sampled_from([action for order in actions for action in order]))
    rank = data.draw(st.integers(0, len(actions) - 1))
    actions[rank].insert(data.draw(st.integers(0, len(actions[rank]))), again)
    assert f"{again} is listed 2 times" in " ".join(problems(changed(schedule, actions)))


@given(schedules.filter(lambda schedule: schedule.num_stages > 1), st.data())
def test_actions_swapped_between_ranks_are_caught_by_name(schedule: Schedule, data: st.DataObject) -> None:
    actions = [list(order) for order in schedule.actions]
    a, b = data.draw(st.lists(st.integers(0, len(actions) - 1), min_size=2, max_size=2, unique=True))
    i, j = (data.draw(st.integers(0, len(actions[rank]) - 1)) for rank in (a, b))
    actions[a][i], actions[b][j] = actions[b][j], actions[a][i]
    told = " ".join(problems(changed(schedule, actions)))
    assert f"{actions[a][i]} stands on rank {a}" in told
    assert f"{actions[b][j]} stands on rank {b}" in told


@given(schedules.filter(lambda schedule: schedule.num_stages > 1 and schedule.num_micro_batches > 1), st.data())
def test_micro_batches_swapped_on_one_side_of_a_cut_are_caught(schedule: Schedule, data: st.DataObject) -> None:
    """Protects against pairing an output with another micro-batch's receive: wrong numbers without an error."""
    chunk = data.draw(st.integers(0, schedule.num_chunks - 1))
    numbers = st.integers(0, schedule.num_micro_batches - 1)
    a, b = data.draw(st.lists(numbers, min_size=2, max_size=2, unique=True))
    kind = data.draw(st.sampled_from((ActionKind.F, ActionKind.B)))
    actions = [list(order) for order in schedule.actions]
    order = actions[schedule.rank_of(chunk)]
    i, j = (order.index(Action(kind=kind, chunk=chunk, micro_batch=number)) for number in (a, b))
    order[i], order[j] = order[j], order[i]
    assert problems(changed(schedule, actions))


@given(schedules, st.lists(st.integers(0, 10_000), min_size=3, max_size=9))
def test_deadlock_is_a_circle_and_nothing_else(schedule: Schedule, draws: list[int]) -> None:
    """Against another way to tell: a circle in the graph of reads and of each rank's order, or a queue out of order."""
    actions = [list(order) for order in schedule.actions]
    for rank, i, j in zip(draws[::3], draws[1::3], draws[2::3], strict=False):
        order = actions[rank % len(actions)]
        i, j = i % len(order), (i + 1 + j % 3) % len(order)
        order[i], order[j] = order[j], order[i]
    shuffled = changed(schedule, actions)

    graph = networkx.DiGraph()
    for action, sources in dependencies(shuffled).items():
        graph.add_edges_from((source, action) for source in sources)
    for order in shuffled.actions:
        networkx.add_path(graph, order)
    is_free = networkx.is_directed_acyclic_graph(graph)
    sent, received = defaultdict(list), defaultdict(list)
    for order in transfers(shuffled):
        for step in order:
            for transfer, queues in ((step.send, sent), (step.receive, received)):
                if transfer:
                    queues[transfer.payload, transfer.source_rank, transfer.target_rank].append(transfer)

    for transport, expected in ((Transport.BUFFERED, is_free), (Transport.CHANNEL, is_free and sent == received)):
        try:
            check_schedule(shuffled, transport=transport)
            passes = True
        except StrategyError:
            passes = False
        assert passes is expected


TWO = "F0.0 F0.1 B0.0 B0.1\nF1.0 B1.0 F1.1 B1.1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TWO.replace("F1.0 B1.0", "B1.0 F1.0"), ["rank 1: B1.0 (action 0) stands before F1.0 (action 1)"]),
        (TWO.replace(" B1.0", ""), ["rank 1 lacks B1.0"]),
        (TWO.replace("B1.0", "I1.0"), ["rank 1 lacks W1.0"]),
        (TWO.replace("B1.0", "B1.0 W1.0"), ["micro-batch 0 of chunk 1 has B and also W"]),
        (TWO.replace("B1.0", "W1.0 I1.0"), ["W1.0 (action 1) stands before I1.0 (action 2)"]),
        (TWO.replace("B1.1", "B1.1 F0.0"), ["F0.0 is listed 2 times (action 0 of rank 0, action 4 of rank 1)"]),
        (TWO.replace("F1.1 B1.1", "B1.1"), ["rank 1 lacks F1.1"]),
        ("F1.0 B1.0\nF0.0 B0.0", ["F1.0 stands on rank 0, but chunk 1 belongs to rank 1 (chunk modulo 2 stages)"]),
        ("schedule micro_batches=1 virtual_stages=1\n" + TWO, ["F0.1 on rank 0: there are micro-batches 0..0 only"]),
        ("schedule virtual_stages=1\nF0.0 B0.0\nF1.0 B1.0 F2.0", ["F2.0 on rank 1: there are chunks 0..1 only"]),
        ("F0.0 B0.0\nF1.0 B1.900000000", ["4 different actions", "900000001 micro-batches"]),
    ],
)
def test_faults_are_named(text: str, words: list[str]) -> None:
    told = " ".join(problems(from_text(text)))
    assert all(word in told for word in words), told


def test_all_faults_are_named_at_once() -> None:
    told = problems(from_text("F0.0 F0.1 B0.0\nB1.0 F1.0 F1.1 B1.1 B1.1"))
    assert len(told) == 3
    assert all(problem.startswith("schedule 'custom': ") for problem in told)


# ---------------------------------------------------------------- deadlocks, told by name


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """Rank 0 wants a gradient before it gives the input that the other rank wants first."""
    [told] = problems(from_text("F0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.0 B1.1"))
    assert told == (
        "schedule 'custom': deadlock with sends that never wait: "
        "rank 0 waits before B0.0 for the gradient of B1.0 on rank 1; "
        "rank 1 waits before F1.1 for the output of F0.1 on rank 0"
    )


def test_messages_that_stand_behind_each_other_are_named() -> None:
    """Each rank alone is fine, and messages that never wait would do; a queue would hand over the wrong micro-batch."""
    swapped = from_text("F0.0 F0.1 B0.0 B0.1\nF1.1 F1.0 B1.0 B1.1")
    check_schedule(swapped, transport=Transport.BUFFERED)
    [told] = problems(swapped)
    assert told == (
        "schedule 'custom': deadlock with one queue for each source, target and payload: "
        "rank 1 waits before F1.1 for the output of F0.1 on rank 0; "
        "on rank 0 the output of F0.1 stands behind the output of F0.0"
    )


def test_a_rank_that_waits_for_its_sends_is_named() -> None:
    blocking = problems(
        make_schedule("interleaved", num_stages=2, num_micro_batches=4, virtual_stages=2), transport=Transport.BLOCKING
    )
    assert "rank 0 waits before F0.3 until rank 1 takes the gradient of B2.0" in blocking[0]


def test_a_circle_over_three_ranks_is_named_whole() -> None:
    text = "F0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.0 B1.1\nF2.0 B2.0 F2.1 B2.1"
    [told] = problems(from_text(text), transport=Transport.BUFFERED)
    assert "rank 0 waits before B0.0 for the gradient of B1.0" in told
    assert "rank 1 waits before F1.1 for the output of F0.1" in told
    assert "rank 2" not in told, "it only waits for those two"
