"""`hybrid plan` from a shell: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hybrid.strategy import DistributedStrategy
from tests.runnable.command import COMMAND, environment, hybrid, hybrid_here

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
    done = hybrid_here(*SMALL, "--why", "tp=3", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert "tp 3 does not divide the 8 devices" in told["summary"]
    assert "tp = 3 does not divide 32 (attention heads)" in told["summary"]
    assert told["layouts"] == []
    done = hybrid_here(*SMALL, "--why", "tp=1", cwd=tmp_path)
    assert "more: name more of the layout" in done.stdout
    first = done.stdout.splitlines()[0]
    assert "the fastest of all is one of these" in first or "more than the fastest of all: " in first
    done = hybrid_here(*SMALL, "--fix", "zero_stage=3", "--why", "micro_batch_size=2,recompute=full", cwd=tmp_path)
    first = done.stdout.splitlines()[0]
    slow, share, fast = re.fullmatch(
        r"the fastest of these that fits, .* mb2x.* full.*, takes (\S+) s a step, (\S+)% more than the fastest of all: "
        r".* z3 .* takes (\S+) s a step",
        first,
    ).groups()  # type: ignore[union-attr]
    assert float(share) == pytest.approx(100 * (float(slow) / float(fast) - 1), abs=0.5)
    done = hybrid_here(*SMALL, "--why", ",", cwd=tmp_path)
    assert (done.returncode, "expected name=value" in done.stderr) == (2, True)
    for option, value in (("--out", "strategy.yaml"), ("--best", "3")):
        done = hybrid_here(*SMALL, "--why", "tp=1", option, value, cwd=tmp_path)
        assert done.returncode == 2
        assert "leave one of them out" in done.stderr


def test_a_file_that_would_become_a_folder_is_refused(tmp_path: Path) -> None:
    done = hybrid_here(*SMALL, "--out", "strategy.txt", cwd=tmp_path)
    assert done.returncode == 2
    assert "written as .yaml or .json" in done.stderr
    assert not list(tmp_path.iterdir())


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


# What stands for Slurm, for two nodes on this host: each is a process with its number, and with a host name of its own.
SLURM = {
    "sbatch": """
        copy="$(mktemp)"
        cp "$1" "$copy"
        shift
        export SLURM_SUBMIT_DIR="$PWD" SLURM_JOB_NODELIST=localhost,127.0.0.1
        exec bash "$copy" "$@"
    """,
    "scontrol": """[ "$1 $2" = "show hostnames" ] && tr , '\\n' <<< "$3" """,
    "srun": """
        [ "$1" = --kill-on-bad-exit=1 ] || exit 9
        shift
        for node in 0 1; do
            SLURM_NODEID=$node NAME_OF_HOST=node-$node "$@" &
        done
        wait -n && wait -n
    """,
}
HOST_NAME = (
    "import os, socket\nname = os.environ.get('NAME_OF_HOST')\nif name:\n    socket.gethostname = lambda: name\n"
)


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Variables under which Slurm's commands are these, and a free port is what the job's number gives."""
    for name, text in SLURM.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/usr/bin/env bash\n{textwrap.dedent(text)}")
        file.chmod(0o755)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HOST_NAME)
    given = environment()
    folders = [str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]  # torchrun is in the second
    port = next(filter(is_free, range(20_000 + os.getpid() % 10_000, 40_000)))
    return given | {
        "PATH": os.pathsep.join(folders),
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), given["PYTHONPATH"]]),
        "SLURM_JOB_ID": str(port - 20_000),
        "MASTER_PORT": str(port),
    }


def is_free(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0


def test_a_plan_starts_from_its_folder(tmp_path: Path, cluster: dict[str, str]) -> None:
    """What `--out DIR` writes is run: as a batch job on two nodes, from another folder, and the script gets the
    strategy; the hosts that come up are compared with the plan's."""
    write_plan(tmp_path)
    job = start("sbatch", "go now/job.sbatch", "train.py", cwd=tmp_path, variables=cluster)
    stdout, stderr = job.communicate(timeout=120)
    assert job.returncode == 0, stderr
    assert stdout.count("stage 2 2") == 2, stderr


@pytest.mark.full
def test_a_plan_starts_by_hand_on_two_machines(tmp_path: Path, cluster: dict[str, str]) -> None:
    """As the head of launch.sh says, the second machine first; machines that have one name are told apart from ranks
    that are where the plan does not have them."""
    write_plan(tmp_path)
    check = ("--no-python", *COMMAND, "verify-placement", "go now/ranks.csv")

    def outcome(*names: str) -> list[tuple[int, str, str]]:
        nodes = [
            start(
                *("bash", "go now/launch.sh", *check),
                cwd=tmp_path,
                variables=cluster | {"MASTER_ADDR": "localhost", "NODE_RANK": str(node), "NAME_OF_HOST": name},
            )
            for node, name in reversed(list(enumerate(names)))
        ]
        told = [node.communicate(timeout=120) for node in nodes]
        return [(node.returncode, *texts) for node, texts in zip(nodes, told, strict=True)][::-1]

    for node, (code, stdout, stderr) in enumerate(outcome("a.example.org", "b")):
        assert code == 0, stderr
        assert f"node{node}: host {'ab'[node]}" in stdout
    for code, _, stderr in outcome("box", "box"):
        assert code != 0
        assert "rank 1 is on host box, where node0 of the plan came up" in stderr
        assert "two machines have the name box" in stderr


def write_plan(folder: Path) -> None:
    """Of two nodes of one rank, in a folder with a blank; and the script."""
    wanted = ("plan", "--model", "gpt3-125m", "--cluster", "2x1xcpu", "--precision", "fp32", "--seq", "128")
    done = hybrid_here(*wanted, "--global-batch", "8", "--fix", "zero_stage=2", "--out", "go now", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "to start the best: go now/launch.sh" in done.stdout
    (folder / "train.py").write_text(TRAIN)


def start(*command: str, cwd: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=cwd, env=variables, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )
