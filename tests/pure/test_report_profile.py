"""A profile as a page: what the terminal tells, drawn; every moment of the last step on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybrid.errors import HybridError
from hybrid.profile.profile import Profile
from hybrid.profile.timeline import RankTimeline, Stretch, read_timelines, write_timelines
from hybrid.report.profile_page import profile_page
from hybrid.units import format_seconds
from tests.pure.test_profile_advice import profile_of
from tests.pure.test_report_pages import Reader

WAITS = {("dp_shard", "reduce_scatter"): [(4.0, 4.0), (6.0, 6.0)], ("world", "control"): [(1.0, 1.0), (1.0, 1.0)]}


def timelines(num_ranks: int = 2) -> list[RankTimeline]:
    stretches = (
        Stretch(0.0, 3.0, "forward"),
        Stretch(3.0, 6.0, "backward"),
        Stretch(6.0, 10.0, "communication", "dp_shard", "reduce_scatter"),
        Stretch(10.0, 11.0, "optimizer"),
        Stretch(11.0, 12.0, "other"),
    )
    return [
        RankTimeline(rank=rank, begun_at_seconds=1000.0 + 0.25 * rank, stretches=stretches) for rank in range(num_ranks)
    ]


@pytest.fixture
def profile() -> Profile:
    return profile_of(WAITS, dp_shard=2)


def test_parts_advice_and_every_moment_are_there(profile: Profile) -> None:
    """Protects from a picture that says less than the table, or another thing."""
    text = profile_page(profile, timelines())
    read = Reader(text)
    assert read.ids == ["advice", "step", "communication", "timeline", "settings", "tip"]
    assert read.addresses == []
    assert all(advice.text.split(" ")[0] in text for advice in profile.advice)
    assert "To try, in this order" in text
    for rank in profile.ranks:
        shown = f"rank {rank.rank}: "
        assert f"{shown}backward {format_seconds(rank.backward_seconds)}" in read.tips
        assert f"{shown}dp_shard {format_seconds(rank.exposed('dp_shard'))}" in read.tips
    assert read.tips.count("reduce_scatter on dp_shard\nfrom 6 s of the step, for 4 s") == 2
    assert "tokens/s" in text


def test_many_ranks_and_axes_are_folded_with_a_word(profile: Profile) -> None:
    """A page of a thousand ranks is looked at, not waited for; what is left out is said."""
    axes = [f"axis{number}" for number in range(12)]
    waits = {(axis, "all_reduce"): [(0.1 + number, 0.1)] * 2 for number, axis in enumerate(axes)}
    wide = profile_of(waits, dp_shard=2)
    ranks = tuple(replace(wide.ranks[0], rank=rank) for rank in range(300))
    text = profile_page(replace(wide, ranks=ranks, world_size=300), timelines(300))
    assert "The first 64 of 300 ranks." in text
    assert "other axes" in text
    assert "on axis0" in text  # the table has them all
    assert len(text) < 400_000


def test_without_a_timeline_there_is_no_empty_picture(profile: Profile) -> None:
    assert "timeline" not in Reader(profile_page(profile, [])).ids


def test_timelines_are_read_as_they_were_written(tmp_path: Path) -> None:
    """And what is none of them is refused by name."""
    write_timelines(tmp_path, timelines())
    file = tmp_path / "timeline.json"
    assert read_timelines(file) == tuple(timelines())
    file.write_text('[{"rank": 0}]', encoding="utf-8")
    with pytest.raises(HybridError, match=r"timeline\.json: KeyError"):
        read_timelines(file)
    with pytest.raises(HybridError, match="cannot read the timelines"):
        read_timelines(tmp_path / "none.json")
