"""The mesh: coordinates, groups by axes, one process group for equal ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid.collectives import ops
from hybrid.contracts.layout import Layout
from hybrid.launch.environment import read_environment
from hybrid.mesh import Mesh, start_process_group, stop_process_group
from tests.ranks import RankFailure, run_plain, run_ranks

AXES = (("dp_replicate",), ("dp_shard",), ("dp_shard", "dp_replicate"), ("tp",), ("pp",))


def describe_mesh() -> dict[str, Any]:
    mesh = Mesh(Layout.of(dp_replicate=2, dp_shard=2), timeout_seconds=30)
    mesh.prepare(AXES)
    mesh.prepare(AXES)
    sums = {}
    for axes in AXES:
        group = mesh.group(*axes)
        buffer = torch.tensor([float(10**mesh.rank)])
        ops.all_reduce(buffer, group=group).wait()
        sums["+".join(axes)] = int(buffer.item())
        assert group.ranks == mesh.group_ranks(*axes)
        assert group.ranks[group.rank] == mesh.rank
    assert mesh.group("dp_shard", "dp_replicate") is mesh.group("dp_replicate", "dp_shard")
    assert mesh.group("dp_replicate", "dp_shard").process_group is mesh.world.process_group
    assert mesh.group("tp").process_group is None
    assert mesh.group("tp").size == 1
    assert (mesh.degree("dp_shard"), mesh.degree("cp"), mesh.world_size) == (2, 1, 4)
    assert (mesh.backend, mesh.device) == ("gloo", torch.device("cpu"))
    with pytest.raises(AssertionError, match="prepare was not given"):
        mesh.group("cp")
    return {
        "coordinate": (mesh.coordinate("dp_replicate"), mesh.coordinate("dp_shard"), mesh.coordinate("tp")),
        "sums": sums,
        "label": mesh.group("dp_shard", "dp_replicate").axis,
    }


def test_groups_join_the_ranks_of_their_axes() -> None:
    """Protects who talks to whom: a wrong group gives wrong sums without an error."""
    results = run_ranks(describe_mesh, 4)
    assert [result["coordinate"] for result in results] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert [result["sums"]["dp_shard"] for result in results] == [11, 11, 1100, 1100]
    assert [result["sums"]["dp_replicate"] for result in results] == [101, 1010, 101, 1010]
    assert [result["sums"]["dp_shard+dp_replicate"] for result in results] == [1111] * 4
    assert [result["sums"]["tp"] for result in results] == [1, 10, 100, 1000]
    assert results[0]["label"] == "dp_replicate+dp_shard"


def wrong_size() -> None:
    dist.barrier()  # connected to each other before the first of them is refused, and gone
    Mesh(Layout.of(dp_shard=4), timeout_seconds=5)


def test_a_layout_for_another_number_of_processes_is_refused() -> None:
    """Protects a plan made for 4 processes from running, wrongly cut, on 2: refused on each of them."""
    with pytest.raises(RankFailure) as failure:
        run_ranks(wrong_size, 2)
    for report in failure.value.reports:
        assert report.error.startswith("LaunchError")
        assert "for 4 processes" in report.error
        assert "dp_shard 4" in report.error
        assert "WORLD_SIZE=2" in report.error


def differing_strategies(digests: list[str]) -> str:
    start_process_group(read_environment(), timeout_seconds=5, agreement=digests[dist.get_rank()])
    return dist.get_backend()


def test_a_started_group_is_taken_and_the_strategies_are_compared() -> None:
    """Protects programs that start torch.distributed themselves: used as it is, but never with two strategies."""
    assert run_ranks(differing_strategies, 2, ["same", "same"]) == ["gloo", "gloo"]
    with pytest.raises(RankFailure) as failure:
        run_ranks(differing_strategies, 3, ["one", "two", "one"])
    for report in failure.value.reports:
        assert "the strategies differ: digest one on rank 0, 2; digest two on rank 1" in report.error


def alone() -> tuple[int, int, int]:
    for _ in range(2):
        environment = start_process_group(read_environment({}), timeout_seconds=5, agreement="x")
        mesh = Mesh(Layout.of(), timeout_seconds=5)
        mesh.prepare(AXES)
        buffer = torch.ones(4)
        ops.all_reduce(buffer, group=mesh.world).wait()
        ops.reduce_scatter(buffer, bounds=(0, 4), group=mesh.group("dp_shard")).wait()
        assert buffer.tolist() == [1.0] * 4
        assert ops.all_gather_object("x", group=mesh.world) == ["x"]
        ops.barrier(mesh.world)
        stop_process_group()
    return environment.rank, environment.world_size, mesh.world_size


def test_one_process_alone_is_a_world_of_one() -> None:
    """Protects plain `python script.py`: everything works without a launcher, also a second time."""
    assert run_plain(alone) == (0, 1, 1)
