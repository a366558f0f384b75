"""Ranks that come up are compared with the plan's before anything is trained; all end with the same sentence."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hybrid.contracts.layout import Layout
from hybrid.contracts.rank_map import make_rank_map
from tests.multi_rank.test_launch_environment import changed, variables
from tests.ranks import run_environments
from tests.runnable.command import hybrid_here


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two nodes of two devices, tensor parallel within a node."""
    devices = [f"node{node}/gpu{device}" for node in (0, 1) for device in (0, 1)]
    made = make_rank_map(devices, Layout.of(dp_shard=2, tp=2))
    (tmp_path / "ranks.csv").write_text(made.to_csv(), encoding="utf-8")
    return tmp_path


def verify(folder: Path, hosts: tuple[str, ...], file: str = "ranks.csv") -> tuple[int, str]:
    """`hybrid verify-placement`, as a rank of a launcher has it; exit code and what it says."""
    socket.gethostname = lambda: hosts[int(os.environ["RANK"])]
    done = hybrid_here("verify-placement", file, "--timeout", "20", cwd=folder)
    return done.returncode, done.stdout + done.stderr


def outcomes(
    folder: Path, hosts: tuple[str, ...], file: str = "ranks.csv", swapped: bool = False
) -> list[tuple[int, str]]:
    """Of four ranks on these hosts; swapped: the devices of the second node the other way round."""
    given = changed(variables(range(4), world_size=4), LOCAL_WORLD_SIZE="2")
    for rank, one in enumerate(given):
        one["LOCAL_RANK"] = str(rank % 2)
    if swapped:
        given[2]["LOCAL_RANK"], given[3]["LOCAL_RANK"] = "1", "0"
    reports = run_environments(verify, given, folder, hosts, file)
    assert not any(report.error for report in reports), [report.traceback for report in reports]
    return [report.value for report in reports]


def test_ranks_where_they_are_planned(folder: Path) -> None:
    """Whatever the hosts are called: the plan cannot know; the first rank of each node tells."""
    (code, first), (_, second), (_, third), _ = outcomes(folder, ("b.site", "b.site", "a", "a"))
    assert code == 0
    assert first == "node0: host b.site, ranks 0 to 1, as planned\n"
    assert second == ""
    assert third == "node1: host a, ranks 2 to 3, as planned\n"


@pytest.mark.parametrize(
    ("hosts", "swapped", "words"),
    [
        (("a", "b", "b", "a"), False, "rank 1 is on host b, but rank 0 is on a"),
        (("a", "b", "b", "a"), False, "groups of tp that the plan keeps on one node are spread"),
        (("a", "a", "a", "a"), False, "two machines have the name a; give each a host name of its own"),
        (("a", "a", "b", "b"), True, "rank 2 is local rank 1 of its node, and the plan has it at local rank 0"),
    ],
)
def test_the_first_rank_elsewhere_is_named_on_every_rank(
    folder: Path, hosts: tuple[str, ...], swapped: bool, words: str
) -> None:
    """One who trains on must not wonder why it is slow; one who reads rank 3's log must find it there."""
    for code, said in outcomes(folder, hosts, swapped=swapped):
        assert code == 2
        assert words in said
        assert "Traceback" not in said


def test_another_file_is_refused_by_name(folder: Path) -> None:
    """The strategy instead of the map, another world, ranks that no launcher numbers so: with the file's name."""
    (folder / "strategy.yaml").write_text("sharding: true\n", encoding="utf-8")
    text = (folder / "ranks.csv").read_text(encoding="utf-8")
    (folder / "apart.csv").write_text(text.replace("1,node0,gpu1,1", "1,node1,gpu0,0"), encoding="utf-8")
    (folder / "small.csv").write_text("\n".join(text.splitlines()[:3]) + "\n", encoding="utf-8")
    for file, words in (
        ("strategy.yaml", "strategy.yaml is no rank map"),
        ("apart.csv", "apart.csv: nodes of 1 and 3 devices"),
        ("small.csv", "the plan is for 2 ranks on 1 nodes, and 4 came up"),
        ("none.csv", "cannot read the rank map none.csv"),
    ):
        for code, said in outcomes(folder, ("a", "a", "b", "b"), file):
            assert code == 2
            assert words in said
