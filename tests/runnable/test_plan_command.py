"""`hybrid plan` from a shell: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid.strategy import DistributedStrategy
from tests.runnable.command import environment, hybrid, hybrid_here

SMALL = ("plan", "--model", "llama2-7b", "--cluster", "1x8xA100-80GB", "--global-batch", "16", "--seq", "2048")


def test_the_answer_has_layouts_parts_advice_and_reasons(tmp_path: Path) -> None:
    """A table of numbers without reasons is what planners are disliked for; the strategy is the one shown first."""
    done = hybrid(*SMALL, "--out", "strategy.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for part in (
        "llama2-7b (6.74 B parameters) on 1x8xA100-80GB",
        "matrix products",
        "optimizer state",
        "on the device",
        "binding:",
        "largest loss:",
        "measure first:",
        "10 % slower",
        "Left out",
    ):
        assert part in done.stdout, part
    strategy = DistributedStrategy.load(tmp_path / "strategy.yaml")
    resolved = strategy.resolve(8)
    assert resolved.data_parallel_size * resolved.accumulate_steps * (resolved.micro_batch_size or 0) == 16


def test_json_is_whole_and_agrees_with_itself(tmp_path: Path) -> None:
    """Programs read it: parts add up to the step, and nothing but JSON is printed."""
    done = hybrid_here(*SMALL, "--best", "3", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert len(told["plans"]) == 3
    for plan in told["plans"]:
        assert sum(plan["time_parts_seconds"].values()) == pytest.approx(plan["step_seconds"])
        assert sum(plan["memory_parts_bytes"].values()) == plan["tensors_bytes"]
        assert plan["device_bytes"]["low"] <= plan["device_bytes"]["expected"] <= plan["device_bytes"]["high"]
    seconds = [plan["step_seconds"] for plan in told["plans"]]
    assert seconds == sorted(seconds)


def test_why_explains_a_layout(tmp_path: Path) -> None:
    """'Why not tp 8 with micro-batch 4?' must have an answer, also for what was never priced."""
    done = hybrid_here(*SMALL, "--why", "tp=8,pp=1,micro_batch_size=4,zero_stage=0", cwd=tmp_path)
    assert done.returncode == 0
    assert "tp8 pp1" in done.stdout
    assert "s a step" in done.stdout or "needs" in done.stdout
    done = hybrid_here(*SMALL, "--why", "tp=3", cwd=tmp_path)
    assert "tp 3 does not divide the 8 devices" in done.stdout
    assert "tp = 3 does not divide 32 (attention heads)" in done.stdout
    done = hybrid_here(*SMALL, "--why", "tp=1", cwd=tmp_path)
    assert "more: name more of the layout" in done.stdout
    done = hybrid_here(*SMALL, "--why", "tp=1", "--out", "strategy.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "leave one of them out" in done.stderr


def test_bad_input_is_one_list_without_a_traceback(tmp_path: Path) -> None:
    """Every problem at once, with the nearest names, exit code 2."""
    done = hybrid_here(
        "plan", "--model", "llama4-7b", "--cluster", "1x8xA200", "--global-batch", "16", "--fix", "tp=x", cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for part in ("llama2-7b", "A100", "tp=x"):
        assert part in done.stderr


TRAIN = """
import torch
import hybrid
model = hybrid.distributed_model(torch.nn.Linear(8, 8))
print(f"stage {hybrid.get_mesh().world_size} {model.hybrid_runtime.strategy.zero_stage}")
hybrid.shutdown()
"""


def test_a_plan_starts_from_its_folder_and_only_where_it_was_planned(tmp_path: Path) -> None:
    """What `--out DIR` writes is run: the script gets the strategy, and a rank that is elsewhere ends the job."""
    wanted = ("plan", "--model", "gpt3-125m", "--cluster", "1x2xcpu", "--precision", "fp32", "--seq", "128")
    done = hybrid_here(*wanted, "--global-batch", "8", "--fix", "zero_stage=2", "--out", "go", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "to start the best: go/launch.sh" in done.stdout
    (tmp_path / "train.py").write_text(TRAIN)

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            variables = {"MASTER_PORT": str(server.getsockname()[1])}
        variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # torchrun's
        command = [str(tmp_path / "go" / "launch.sh"), *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment() | variables,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    trained = start("train.py")
    assert trained.stdout.count("stage 2 2") == 2, trained.stderr
    ranks = tmp_path / "go" / "ranks.csv"
    ranks.write_text(ranks.read_text().replace("node0,gpu1,1", "node1,gpu0,0"))
    refused = start("train.py")
    assert refused.returncode != 0
    assert "rank 1 is on host" in refused.stderr
    assert "the plan has it on a node of its own, node1" in refused.stderr
