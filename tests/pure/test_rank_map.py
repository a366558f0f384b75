"""Where a plan has its ranks: written, read, compared with what came up; and the scripts that start it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import hybrid
from hybrid.contracts.layout import Layout
from hybrid.contracts.rank_map import RankMap, make_rank_map, read_rank_map
from hybrid.errors import LaunchError, PlanError
from hybrid.report.launch_files import write_launch_files


def planned() -> RankMap:
    devices = [f"node{node}/gpu{device}" for node in range(2) for device in range(4)]
    return make_rank_map(devices, Layout.of(dp_shard=4, tp=2))


AS_PLANNED = {"a": range(4), "b": range(4, 8)}


def test_a_map_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "ranks.csv"
    file.write_text(planned().to_csv())
    assert read_rank_map(file) == planned()


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (AS_PLANNED, None),
        ({"b": range(4), "a": range(4, 8)}, None),  # hosts have names of their own
        ({"a": (0, 1, 2), "b": (3, 4, 5, 6, 7)}, ("rank 3 is on host b, but rank 0 is on a", "groups of tp")),
        ({"a": (0, 1, 4, 5), "b": (2, 3, 6, 7)}, ("rank 2 is on host b, but rank 0 is on a",)),
        ({"a": range(8)}, ("rank 4 is on host a, where node0 of the plan came up", "ranks 4 to 7")),
        ({"a": range(4)}, ("the plan is for 8 ranks on 2 nodes, and 4 came up",)),
    ],
)
def test_the_first_rank_that_is_elsewhere_is_named(
    hosts: dict[str, range | tuple[int, ...]], words: tuple[str, ...] | None
) -> None:
    """A tp group over two nodes trains right, and many times slower: nobody would notice."""
    problems = planned().differences(hosts, {})
    if words is None:
        assert problems == []
    else:
        assert all(word in problems[0] for word in words), problems
        if "tp" not in words[-1]:
            assert "groups of tp" not in problems[0]


def test_devices_in_another_order_are_named() -> None:
    local_ranks = {rank: rank % 4 for rank in range(8)}
    assert planned().differences(AS_PLANNED, local_ranks) == []
    (problem,) = planned().differences(AS_PLANNED, {**local_ranks, 5: 2, 6: 1})
    assert "rank 5 is local rank 2 of its node, and the plan has it at local rank 1 (node1, gpu1)" in problem


def test_an_order_that_no_launcher_numbers_is_refused() -> None:
    layout = Layout.of(dp_shard=3)
    with pytest.raises(PlanError, match=r"ranks of node0 do not stand together .*again at rank 2"):
        make_rank_map(["node0/gpu0", "node1/gpu0", "node0/gpu1"], layout)
    with pytest.raises(PlanError, match="nodes of 1 and 2 devices"):
        make_rank_map(["node0/gpu0", "node0/gpu1", "node1/gpu0"], layout)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: "", "expected the columns"),
        (lambda text: text.replace("1,node0,gpu1", "x,node0,gpu1"), "line 3: expected whole numbers"),
        (lambda text: text.replace("1,node0,gpu1", "2,node0,gpu1"), "line 3: rank 2 where rank 1 is due"),
        (lambda text: text.replace("3,node0,gpu3,3,0,0,1,0,1", "3,node0,gpu3,3,0,0,0,0,1"), "do not fit a layout"),
        (lambda text: text.rsplit("\n", 2)[0] + "\n", "7 ranks, but the coordinates span 8"),
    ],
)
def test_a_file_that_is_no_map_is_refused(edit: object, words: str, tmp_path: Path) -> None:
    file = tmp_path / "ranks.csv"
    file.write_text(edit(planned().to_csv()))  # type: ignore[operator]
    with pytest.raises(LaunchError, match=words):
        read_rank_map(file)
    with pytest.raises(LaunchError, match="cannot read"):
        read_rank_map(tmp_path / "none.csv")


@pytest.mark.parametrize("cluster", ["1x8xH100", "4x8xMI300X", "2x4xcpu"])
def test_scripts_that_start_a_plan(cluster: str, tmp_path: Path) -> None:
    """The shell finds no fault in them, and each says how many nodes and ranks there are."""
    plans = hybrid.plan("gpt3-125m", cluster, global_batch_size=64, seq=512, precision="fp32", num_plans=1)
    files = {path.name: path for path in write_launch_files(plans.best, tmp_path)}
    num_nodes, per_node = int(cluster[0]), int(cluster[2])
    shellcheck = Path(sys.executable).with_name("shellcheck")  # of this environment, which need not be activated
    subprocess.run([shellcheck, files["launch.sh"], files["job.sbatch"]], check=True)
    assert f"--nnodes={num_nodes} " in files["launch.sh"].read_text()
    assert f"--nproc-per-node={per_node} " in files["launch.sh"].read_text()
    assert f"#SBATCH --nodes={num_nodes}\n" in files["job.sbatch"].read_text()
    assert hybrid.DistributedStrategy.load(files["strategy.yaml"]) == plans.strategy
    ranks = read_rank_map(files["ranks.csv"])
    assert [len(node.devices) for node in ranks.nodes] == [per_node] * num_nodes
    job = yaml.safe_load(files["pytorchjob.yaml"].read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert sum(one["replicas"] for one in replicas.values()) == num_nodes
    resource = {"1x8xH100": "nvidia.com/gpu", "4x8xMI300X": "amd.com/gpu"}.get(cluster)
    container = replicas["Master"]["template"]["spec"]["containers"][0]
    assert container.get("resources") == (resource and {"limits": {resource: per_node}})


def test_devices_out_of_order_are_made_visible_in_the_plans_order(tmp_path: Path) -> None:
    plans = hybrid.plan("gpt3-125m", "1x4xH100", global_batch_size=64, seq=512, num_plans=1)
    job = replace(plans.best.job, cluster=plans.best.job.cluster.with_rank_order((2, 3, 0, 1)))
    files = write_launch_files(replace(plans.best, job=job), tmp_path)
    assert '0) export CUDA_VISIBLE_DEVICES="2,3,0,1"' in next(f for f in files if f.name == "launch.sh").read_text()
