"""Schedules as data: literal tables from the literature's figures, messages, what is kept, and what is refused."""

from __future__ import annotations

import pytest

from hybrid.contracts.chunk_placement import ChunkPlacement, chunk_rank
from hybrid.contracts.schedule import (
    SCHEDULE_NAMES,
    Action,
    ActionKind,
    Schedule,
    dependencies,
    forward_only,
    in_flight,
    make_schedule,
    max_in_flight,
)
from hybrid.contracts.schedule_check import check_schedule
from hybrid.contracts.schedule_text import from_text
from hybrid.contracts.schedule_transfers import Payload, Transfer, transfers
from hybrid.errors import StrategyError


def lines(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, order)) for order in schedule.actions]


def action(text: str) -> Action:
    return from_text(text).actions[0][0]


# ---------------------------------------------------------------- literal tables


def test_gpipe_is_the_papers_figure() -> None:
    """arXiv 1811.06965, figure 2c: four stages, four micro-batches; ours runs the backwards in ascending order."""
    assert lines(make_schedule("gpipe", num_stages=4, num_micro_batches=4)) == [
        "F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3",
        "F1.0 F1.1 F1.2 F1.3 B1.0 B1.1 B1.2 B1.3",
        "F2.0 F2.1 F2.2 F2.3 B2.0 B2.1 B2.2 B2.3",
        "F3.0 F3.1 F3.2 F3.3 B3.0 B3.1 B3.2 B3.3",
    ]


def test_1f1b_is_the_papers_figure() -> None:
    """arXiv 2104.04473, figure 4, top: four devices, eight micro-batches."""
    assert lines(make_schedule("1f1b", num_stages=4, num_micro_batches=8)) == [
        "F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 F0.5 B0.2 F0.6 B0.3 F0.7 B0.4 B0.5 B0.6 B0.7",
        "F1.0 F1.1 F1.2 B1.0 F1.3 B1.1 F1.4 B1.2 F1.5 B1.3 F1.6 B1.4 F1.7 B1.5 B1.6 B1.7",
        "F2.0 F2.1 B2.0 F2.2 B2.1 F2.3 B2.2 F2.4 B2.3 F2.5 B2.4 F2.6 B2.5 F2.7 B2.6 B2.7",
        "F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3 F3.4 B3.4 F3.5 B3.5 F3.6 B3.6 F3.7 B3.7",
    ]


def test_1f1b_with_fewer_micro_batches_than_stages() -> None:
    """Warm-up counts that assume enough micro-batches hang here in other frameworks."""
    assert lines(make_schedule("1f1b", num_stages=3, num_micro_batches=2)) == [
        "F0.0 F0.1 B0.0 B0.1",
        "F1.0 F1.1 B1.0 B1.1",
        "F2.0 B2.0 F2.1 B2.1",
    ]
    assert lines(make_schedule("1f1b", num_stages=2, num_micro_batches=1)) == ["F0.0 B0.0", "F1.0 B1.0"]
    assert lines(make_schedule("1f1b", num_stages=1, num_micro_batches=2)) == ["F0.0 B0.0 F0.1 B0.1"]


def test_interleaved_on_two_ranks() -> None:
    assert lines(make_schedule("interleaved", num_stages=2, num_micro_batches=4, virtual_stages=2)) == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ]


def test_interleaved_is_the_papers_figure() -> None:
    """arXiv 2104.04473, figure 4, bottom: first and last of four devices, two chunks each, eight micro-batches."""
    made = lines(make_schedule("interleaved", num_stages=4, num_micro_batches=8, virtual_stages=2))
    assert made[0] == (
        "F0.0 F0.1 F0.2 F0.3 F4.0 F4.1 F4.2 F4.3 F0.4 F0.5 F0.6 B4.0 F0.7 B4.1 F4.4 B4.2 F4.5 B4.3 F4.6 B0.0 F4.7 B0.1 "
        "B0.2 B0.3 B4.4 B4.5 B4.6 B4.7 B0.4 B0.5 B0.6 B0.7"
    )
    assert made[3] == (
        "F3.0 F3.1 F3.2 F3.3 F7.0 B7.0 F7.1 B7.1 F7.2 B7.2 F7.3 B7.3 F3.4 B3.0 F3.5 B3.1 F3.6 B3.2 F3.7 B3.3 "
        "F7.4 B7.4 F7.5 B7.5 F7.6 B7.6 F7.7 B7.7 B3.4 B3.5 B3.6 B3.7"
    )


def test_zb_h1_is_the_papers_figure() -> None:
    """arXiv 2401.10241, figure 2, top: four devices, eight micro-batches; first and last device."""
    made = lines(make_schedule("zb-h1", num_stages=4, num_micro_batches=8))
    assert made[0] == (
        "F0.0 F0.1 F0.2 F0.3 I0.0 W0.0 F0.4 I0.1 W0.1 F0.5 I0.2 W0.2 F0.6 I0.3 W0.3 F0.7 I0.4 W0.4 "
        "I0.5 W0.5 I0.6 W0.6 I0.7 W0.7"
    )
    assert made[3] == (
        "F3.0 I3.0 F3.1 I3.1 F3.2 I3.2 F3.3 I3.3 W3.0 F3.4 I3.4 W3.1 F3.5 I3.5 W3.2 F3.6 I3.6 W3.3 F3.7 I3.7 W3.4 "
        "W3.5 W3.6 W3.7"
    )
    few = lines(make_schedule("zb-h1", num_stages=3, num_micro_batches=1))
    assert few == ["F0.0 I0.0 W0.0", "F1.0 I1.0 W1.0", "F2.0 I2.0 W2.0"]


def test_zbv_is_the_papers_figure() -> None:
    """arXiv 2401.10241, figure of ZB-V: four devices, eight micro-batches; first and last device; and the smallest."""
    made = lines(make_schedule("zbv", num_stages=4, num_micro_batches=8))
    assert made[0] == (
        "F0.0 F0.1 F0.2 F0.3 F0.4 F0.5 F0.6 F7.0 I7.0 W7.0 F7.1 I7.1 W7.1 F7.2 I7.2 W7.2 F7.3 I7.3 W7.3 "
        "F0.7 I0.0 W0.0 F7.4 I7.4 W7.4 I0.1 W0.1 F7.5 I7.5 W7.5 I0.2 W0.2 F7.6 I7.6 W7.6 I0.3 W0.3 F7.7 I7.7 W7.7 "
        "I0.4 W0.4 I0.5 W0.5 I0.6 W0.6 I0.7 W0.7"
    )
    assert made[3] == (
        "F3.0 F4.0 F3.1 F4.1 F3.2 F4.2 F3.3 F4.3 I4.0 W4.0 F3.4 I3.0 W3.0 F4.4 I4.1 W4.1 F3.5 I3.1 W3.1 F4.5 I4.2 W4.2 "
        "F3.6 I3.2 W3.2 F4.6 I4.3 W4.3 F3.7 I3.3 W3.3 F4.7 I4.4 W4.4 I4.5 I3.4 I4.6 I3.5 I4.7 I3.6 I3.7 W3.4 "
        "W4.5 W4.6 W4.7 W3.5 W3.6 W3.7"
    )
    assert lines(make_schedule("zbv", num_stages=2, num_micro_batches=1)) == [
        "F0.0 F3.0 I3.0 W3.0 I0.0 W0.0",
        "F1.0 F2.0 I2.0 W2.0 I1.0 W1.0",
    ]
    assert lines(make_schedule("zbv", num_stages=2, num_micro_batches=3)) == [
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I2.2 I1.1 I1.2 W1.1 W2.2 W1.2",
    ]


# ---------------------------------------------------------------- what follows from a schedule


def test_chunks_go_round_the_ranks() -> None:
    made = make_schedule("interleaved", num_stages=3, num_micro_batches=3, virtual_stages=2)
    assert [chunk_rank(chunk, 3) for chunk in range(6)] == [0, 1, 2, 0, 1, 2]
    assert (made.num_chunks, made.rank_of(4), made.chunks_of(1)) == (6, 1, (1, 4))


def test_where_chunks_lie_is_read_from_the_actions() -> None:
    """A schedule of one's own needs no word for it; one action in a wrong place does not change it for the rest."""
    made = make_schedule("zbv", num_stages=3, num_micro_batches=2)
    assert (made.virtual_stages, [made.chunks_of(rank) for rank in range(3)]) == (2, [(0, 5), (1, 4), (2, 3)])
    assert made.placement is from_text("\n".join(lines(made))).placement is ChunkPlacement.V
    first = {str(step.action): (step.receive, step.send) for step in transfers(made)[2]}
    assert first["F2.0"][1] is None
    assert first["F3.0"][0] is None, "handed over on the rank"
    with pytest.raises(StrategyError, match=r"F4\.0 stands on rank 2, but chunk 4 belongs to rank 1 \(.* in a V\)"):
        check_schedule(
            from_text("F0.0 F5.0 I5.0 I0.0 W5.0 W0.0\nF1.0 I4.0 I1.0 W4.0 W1.0\nF4.0 F2.0 F3.0 I3.0 I2.0 W3.0 W2.0")
        )


def test_dependencies_with_whole_and_split_backward() -> None:
    """Protects the edges that checker and timer share; the two forms of backward may stand side by side."""
    schedule = from_text("F0.0 B0.0\nF1.0 I1.0 W1.0\nF2.0 B2.0")
    assert dependencies(schedule) == {
        action("F0.0"): (),
        action("F1.0"): (action("F0.0"),),
        action("F2.0"): (action("F1.0"),),
        action("B2.0"): (action("F2.0"),),
        action("I1.0"): (action("F1.0"), action("B2.0")),
        action("W1.0"): (action("I1.0"),),
        action("B0.0"): (action("F0.0"), action("I1.0")),
    }


def message(payload: Payload, source_chunk: int, target_chunk: int, micro_batch: int = 0) -> Transfer:
    return Transfer(
        payload=payload,
        micro_batch=micro_batch,
        source_chunk=source_chunk,
        target_chunk=target_chunk,
        source_rank=source_chunk % 2,
        target_rank=target_chunk % 2,
    )


def test_messages_of_an_interleaved_schedule() -> None:
    """Protects the way round: the last rank's first chunk feeds the first rank's second chunk."""
    made = make_schedule("interleaved", num_stages=2, num_micro_batches=2, virtual_stages=2)
    first = {str(step.action): (step.receive, step.send) for step in transfers(made)[0]}
    up, down = Payload.ACTIVATION, Payload.GRADIENT
    assert first["F0.0"] == (None, message(up, 0, 1))
    assert first["F2.0"] == (message(up, 1, 2), message(up, 2, 3))
    assert first["B2.0"] == (message(down, 3, 2), message(down, 2, 1))
    assert first["B0.0"] == (message(down, 1, 0), None)


def test_no_messages_within_a_rank_and_none_for_weight_gradients() -> None:
    one_rank = make_schedule("interleaved", num_stages=1, num_micro_batches=2, virtual_stages=3)
    assert {(step.receive, step.send) for step in transfers(one_rank)[0]} == {(None, None)}
    split = from_text("F0.0 I0.0 W0.0\nF1.0 I1.0 W1.0")
    sent = {str(step.action): step.send for order in transfers(split) for step in order if step.send}
    assert sent == {"F0.0": message(Payload.ACTIVATION, 0, 1), "I1.0": message(Payload.GRADIENT, 1, 0)}


@pytest.mark.parametrize("virtual_stages", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_each_message_is_sent_once_and_received_once(num_stages: int, virtual_stages: int) -> None:
    name = "interleaved" if virtual_stages > 1 else "1f1b"
    made = make_schedule(name, num_stages=num_stages, num_micro_batches=2 * num_stages, virtual_stages=virtual_stages)
    sent = [(rank, step.send) for rank, order in enumerate(transfers(made)) for step in order if step.send]
    received = [(rank, step.receive) for rank, order in enumerate(transfers(made)) for step in order if step.receive]
    assert {each for _, each in sent} == {each for _, each in received}
    num_cuts = made.num_chunks - 1 if num_stages > 1 else 0
    assert len(sent) == len(received) == 2 * num_cuts * made.num_micro_batches
    assert all(rank == each.source_rank for rank, each in sent)
    assert all(rank == each.target_rank for rank, each in received)


def test_what_is_kept_while_each_action_runs() -> None:
    made = make_schedule("1f1b", num_stages=2, num_micro_batches=3)
    assert in_flight(made, 0) == (1, 2, 2, 2, 2, 1)  # F0 F1 B0 F2 B1 B2
    assert in_flight(made, 1) == (1, 1, 1, 1, 1, 1)
    split = from_text("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1")
    assert in_flight(split, 0) == (1, 2, 2, 2, 2, 1), "until W: it reads the inputs"


def test_what_is_kept_can_be_weighed_by_chunk() -> None:
    """The memory model asks for bytes, and chunks are uneven: it is not the count times something."""
    made = make_schedule("interleaved", num_stages=2, num_micro_batches=4, virtual_stages=2)
    assert max_in_flight(made, 0) == 5
    assert max_in_flight(made, 0, weights=[1, 0, 0, 0]) == 4
    assert max_in_flight(made, 0, weights=[0, 0, 1, 0]) == 2
    assert max_in_flight(made, 0, weights=[7, 0, 100, 0]) == 221, "at F0.2"
    assert max_in_flight(made, 0, weights=[100, 0, 7, 0]) == 407, "at F0.3"


def test_forwards_alone_for_evaluation() -> None:
    made = make_schedule("interleaved", num_stages=2, num_micro_batches=2, virtual_stages=2)
    alone = forward_only(made)
    assert lines(alone) == ["F0.0 F0.1 F2.0 F2.1", "F1.0 F1.1 F3.0 F3.1"]
    check_schedule(alone, is_training=False)
    with pytest.raises(StrategyError, match=r"lacks B0\.0"):
        check_schedule(alone)
    with pytest.raises(StrategyError, match=r"B3\.0 is a backward"):
        check_schedule(made, is_training=False)


# ---------------------------------------------------------------- refusals


def refusal(name: str, num_stages: object, num_micro_batches: object, virtual_stages: object = 1) -> str:
    with pytest.raises(StrategyError) as caught:
        make_schedule(
            name,
            num_stages=num_stages,  # type: ignore[arg-type]
            num_micro_batches=num_micro_batches,  # type: ignore[arg-type]
            virtual_stages=virtual_stages,  # type: ignore[arg-type]
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("interleaved", 4, 6, 2), ["num_stages = 4", "= 6", "4 or 8", "'1f1b'"]),
        (("interleaved", 4, 3, 2), ["num_stages = 4", "= 3", "use 4,"]),
        (("interleaved", 2, 4, 1), ["2 chunks", "virtual_stages = 1", "virtual_stages = 2", "'1f1b'"]),
        (("interleaved", 2, 3, 1), ["2 problems", "2 chunks", "2 or 4"]),
        (("1f1b", 2, 4, 2), ["'1f1b'", "virtual_stages = 2", "virtual_stages = 1", "'interleaved'"]),
        (("gpipe", 2, 4, 3), ["'gpipe'", "virtual_stages = 3"]),
        (("zbv", 2, 4, 1), ["two chunks per rank", "virtual_stages = 1", "virtual_stages = 2"]),
        (("1F1B", 2, 4, 1), ["'1F1B'", *SCHEDULE_NAMES]),
        (("1f1b", 0, True, 1.5), ["3 problems", "num_stages = 0", "num_micro_batches = True", "virtual_stages = 1.5"]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_impossible_sizes_are_refused_with_what_works(given: tuple[str, int, int, int], words: list[str]) -> None:
    """Known from elsewhere: an error only once the cluster is up, or a message that gives the range upside down."""
    message = refusal(*given)
    assert all(word in message for word in words), message


def test_a_schedule_has_one_list_per_rank_and_a_plain_name() -> None:
    with pytest.raises(StrategyError, match="1 action lists for 2 stages"):
        Schedule(name="mine", num_stages=2, num_micro_batches=1, actions=((),))
    with pytest.raises(StrategyError, match="'my own'"):
        Schedule(name="my own", num_stages=1, num_micro_batches=1, actions=((),))


def test_kinds_have_letters() -> None:
    assert [kind.letter for kind in ActionKind] == ["F", "B", "I", "W"]
