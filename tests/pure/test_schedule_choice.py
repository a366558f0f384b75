"""A schedule of one's own as a setting: kept as text, compared with the strategy's sizes, refused with all reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.contracts.schedule import SCHEDULE_NAMES, fewer_micro_batches, make_schedule
from hybrid.contracts.schedule_check import check_schedule
from hybrid.contracts.schedule_choice import choose_schedule
from hybrid.contracts.schedule_text import to_csv, to_text
from hybrid.errors import StrategyError
from hybrid.strategy import DistributedStrategy

EAGER = """
    F0.0 F0.1 F0.2 B0.0 B0.1 B0.2   # rank 0 runs ahead
    F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
"""


def strategy(schedule: object, **sizes: int) -> DistributedStrategy:
    configs = {"degree": 2, "accumulate_steps": 3, **sizes, "schedule": schedule}
    return DistributedStrategy(pipeline=True, pipeline_configs=configs)


def test_file_is_read_when_it_is_set(tmp_path: Path) -> None:
    """A strategy that is sent to other machines, or saved, must not need a file that is only here."""
    text, table = tmp_path / "eager.txt", tmp_path / "eager.csv"
    text.write_text(EAGER)
    by_text = strategy(str(text))
    order = by_text.resolve(2).pipeline.order(3)
    table.write_text(to_csv(order))
    assert (order.name, order.num_stages, order.num_micro_batches) == ("eager", 2, 3)
    by_table, by_object = strategy(table), strategy(order)
    text.unlink()
    table.unlink()
    assert by_text == by_table == by_object
    again = DistributedStrategy.from_yaml(by_text.to_yaml())
    assert again == by_text
    assert again.resolve(2).pipeline.order(3) == order
    assert "schedule eager" in str(again.resolve(2).pipeline)
    assert "eager" in again.explain(2)
    assert "F0.0" not in again.explain(2)


@pytest.mark.parametrize(
    ("schedule", "sizes", "words"),
    [
        (EAGER, {"accumulate_steps": 4}, ("is for 3 micro-batches, and accumulate_steps is 4; set it to 3",)),
        (
            EAGER,
            {"degree": 3, "virtual_stages": 2},
            ("2 stages, and degree is 3", "1 chunks per stage, and virtual_st"),
        ),
        ("F0.0 I0.0 W0.0\nF1.0 I1.0", {"accumulate_steps": 1}, ("rank 1 lacks W1.0",)),
        ("F0.0 B0.0\nB1.0 F1.0", {"accumulate_steps": 1}, ("F1.0",)),
        ("F0.0 B0.0\nF1.0", {"accumulate_steps": 1}, ("B1.0",)),
    ],
)
def test_what_cannot_run_is_refused_with_all_reasons(
    schedule: str, sizes: dict[str, int], words: tuple[str, ...]
) -> None:
    """It would hang, or train on part of the batch."""
    with pytest.raises(StrategyError) as caught:
        strategy(schedule, **sizes).resolve(6 if "degree" in sizes else 2)
    for word in words:
        assert word in str(caught.value)


def test_what_is_no_schedule_is_refused_when_it_is_set(tmp_path: Path) -> None:
    """With the place in the text, or the names that there are."""
    broken = tmp_path / "broken.txt"
    broken.write_text("F0.0 X0.0\n")
    for value, words in (
        (str(broken), "broken.txt, line 1"),
        (tmp_path / "missing.csv", "cannot read"),
        ("1f1c", "did you mean '1f1b'"),
        (3, "expected one of 'gpipe'"),
    ):
        with pytest.raises(StrategyError, match=r"pipeline_configs\.schedule") as caught:
            strategy(value)
        assert words in str(caught.value)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_fewer_micro_batches_run_in_the_same_order(name: str) -> None:
    """A batch with fewer samples than micro-batches: what is left must be complete and wait for nothing else."""
    chunks = 2 if name == "interleaved" else None
    for num_stages in (2, 3, 4):
        whole = make_schedule(name, num_stages=num_stages, num_micro_batches=2 * num_stages, virtual_stages=chunks)
        for count in range(1, 2 * num_stages):
            part = fewer_micro_batches(whole, count)
            assert part.num_micro_batches == count
            check_schedule(part)
    assert to_text(fewer_micro_batches(whole, 2 * num_stages)) == to_text(whole)


@pytest.mark.parametrize("sizes", [(10**9, 4, 1), (2, 10**8, 1), (2, 10**8, 10**8)])
def test_numbers_with_zeros_too_many_are_refused_at_once(sizes: tuple[int, int, int]) -> None:
    """The list of actions was made first, for hours."""
    stages, micro_batches, chunks = sizes
    with pytest.raises(StrategyError, match=r"forwards, more than any run has .* lower the largest of these"):
        choose_schedule(
            "interleaved" if chunks > 1 else "1f1b",
            num_stages=stages,
            num_micro_batches=micro_batches,
            virtual_stages=chunks,
        )
