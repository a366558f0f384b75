"""Schedules as text and CSV: an exact round trip, and messages that name line and column."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.contracts.schedule import Schedule, make_schedule
from hybrid.contracts.schedule_text import from_csv, from_text, to_csv, to_text
from hybrid.errors import StrategyError
from tests.pure.test_schedule_check import schedules

TEXT = """\
schedule name=1f1b stages=2 micro_batches=2 virtual_stages=1
F0.0 F0.1 B0.0 B0.1
F1.0 B1.0 F1.1 B1.1
"""

CSV = """\
rank,order,kind,chunk,micro_batch
0,0,F,0,0
0,1,B,0,0
1,0,F,1,0
1,1,B,1,0
"""


def test_text_is_what_a_reader_expects() -> None:
    assert to_text(make_schedule("1f1b", num_stages=2, num_micro_batches=2)) == TEXT


def test_csv_is_what_a_reader_expects() -> None:
    assert to_csv(make_schedule("1f1b", num_stages=2, num_micro_batches=1)) == CSV


@given(schedules)
def test_text_comes_back_equal(schedule: Schedule) -> None:
    assert from_text(to_text(schedule)) == schedule


@given(schedules, st.randoms())
def test_csv_comes_back_equal_whatever_the_sequence_of_rows(schedule: Schedule, random: object) -> None:
    head, *rows = to_csv(schedule).splitlines()
    random.shuffle(rows)  # type: ignore[attr-defined]
    assert from_csv("\n".join([head, *rows]), name=schedule.name) == schedule


def test_split_backward_and_own_names_come_back_equal() -> None:
    schedule = from_text("F0.0 I0.0 W0.0\nF1.0 B1.0", name="mine")
    assert schedule.name == "mine"
    assert from_text(to_text(schedule)) == from_csv(to_csv(schedule), name="mine") == schedule


def test_text_by_hand() -> None:
    """Sizes come from the actions, comments and empty lines count for nothing."""
    schedule = from_text("# mine\n\nF0.0 F2.0 B2.0   B0.0  # rank 0\n\tF1.0 F3.0 B3.0 B1.0\n")
    assert (schedule.name, schedule.num_stages, schedule.num_micro_batches, schedule.virtual_stages) == (
        "custom",
        2,
        1,
        2,
    )


def test_csv_by_hand() -> None:
    """As a spreadsheet writes it: other columns first, spaces, empty rows, gaps in the order, CR LF."""
    text = "kind, order, rank, micro_batch, chunk\r\nB,9,0,0,0\r\n\r\n,,,,\r\nF,2,0,0,0\r\n"
    assert from_csv(text) == from_text("F0.0 B0.0")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F0.0 B0.0\nF1.0 X1.0", ["mine, line 2, column 6", "'X1.0'", "'X'", "F, B, I, W"]),
        ("F0.0  B0", ["mine, line 1, column 7", "'B0'", "F0.3"]),
        ("f0.0", ["line 1, column 1", "'f'", "F, B, I, W"]),
        ("F0.-1", ["line 1, column 1", "'F0.-1'"]),
        ("F0.0 B0.0 F0.9999999999", ["line 1, column 11"]),
        ("F0.0 Q\nB0 F0.0", ["2 problems", "line 1, column 6", "line 2, column 1"]),
        ("schedule stages=2\nF0.0 B0.0", ["stages=2", "1 lines"]),
        ("schedule stages=0\nF0.0 B0.0", ["line 1, column 10", "stages=0", "at least 1"]),
        ("schedule stages=1 stages=1\nF0.0", ["line 1, column 19", "stages is given twice"]),
        ("schedule depth=2\nF0.0", ["line 1, column 10", "'depth=2'", "micro_batches=..."]),
        ("F0.0 B0.0\nschedule stages=1", ["line 2", "head line stands first"]),
        ("schedule name=a/b\nF0.0 B0.0", ["'a/b'", "letters"]),
        ("# nothing\n", ["mine: no actions", "F0.0 B0.0"]),
    ],
)
def test_faults_of_text_name_line_and_column(text: str, words: list[str]) -> None:
    with pytest.raises(StrategyError) as caught:
        from_text(text, source="mine")
    assert all(word in str(caught.value) for word in words), str(caught.value)


HEAD = "rank,order,kind,chunk,micro_batch\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["mine, line 1", "expected rank,order,kind,chunk,micro_batch"]),
        ("rank,order,kind,chunk\n", ["line 1", "rank,order,kind,chunk;"]),
        (HEAD, ["no actions", "0,0,F,0,0"]),
        (HEAD + "0,0,F,0", ["line 2", "4 cells for 5 columns"]),
        (HEAD + "0,0,Z,0,0", ["line 2, column 3 (kind)", "'Z'", "F, B, I, W"]),
        (HEAD + "0,0,F,-1,x", ["2 problems", "column 4 (chunk)", "'-1'", "column 5 (micro_batch)", "'x'"]),
        (HEAD + "0,0,F,0,0\n0,0,B,0,0", ["line 3", "rank 0 has order 0 twice", "F0.0", "B0.0"]),
        (HEAD + "0,0,F,0,0\n2,0,F,1,0", ["rank 2", "no rank 1"]),
        (HEAD + "999999999,0,F,0,0", ["rank 999999999", "no rank 0"]),
    ],
)
def test_faults_of_csv_name_line_and_column(text: str, words: list[str]) -> None:
    with pytest.raises(StrategyError) as caught:
        from_csv(text, source="mine")
    assert all(word in str(caught.value) for word in words), str(caught.value)
