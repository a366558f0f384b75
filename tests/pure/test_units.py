"""Sizes and times as text: what a person writes is read exactly, what is printed is short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.units import format_bytes, format_count, format_seconds, parse_bytes, parse_number


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("5e8", 500_000_000), ("16MiB", 2**24), ("16 MB", 16_000_000), ("1.5 KiB", 1536), ("1_000", 1000), ("7B", 7)],
)
def test_bytes_are_read_exactly(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "16 miles", "1.5", "0.1 KiB", "--3", "inf"])
def test_text_that_is_no_whole_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)


@given(st.integers(-(10**30), 10**30))
def test_an_int_survives_as_text(number: int) -> None:
    """Protects large ints from a way through float, which would lose digits."""
    assert parse_number(str(number)) == number


def test_numbers_keep_their_kind() -> None:
    assert [parse_number(text) for text in ("8", "5e8", "0.5", "inf")] == [8, 500_000_000, 0.5, float("inf")]
    assert isinstance(parse_number("5e8"), int)


def test_values_print_short() -> None:
    assert [format_bytes(value) for value in (0, 512, 25 * 2**20, 1_567_890_000, 3 * 2**40)] == [
        "0 B",
        "512 B",
        "25 MiB",
        "1.46 GiB",
        "3 TiB",
    ]
    assert [format_count(value) for value in (999, 10_720_000, 1.3e9)] == ["999", "10.7 M", "1.3 B"]
    assert [format_seconds(value) for value in (0, 3.5e-4, 0.0125, 3.2, 600, 3900, 7200)] == [
        "0 s",
        "350 µs",
        "12.5 ms",
        "3.2 s",
        "10 min",
        "1 h 05 min",
        "2 h",
    ]
