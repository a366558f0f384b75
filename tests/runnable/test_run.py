"""`hybrid run`: what a user sees when a job runs, fails, hangs, is killed or is stopped."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.runnable.command import hybrid, hybrid_here, start_hybrid

NEVER_SECONDS = 300  # longer than any test waits


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def wait_for_files(*names: str) -> str:
    """One line of a job's script: it goes on when other ranks have left these files, however late they start."""
    return f"while not all(map(os.path.exists, {list(names)})): __import__('time').sleep(0.05)"


def log_dir_of(folder: Path) -> Path:
    (log_dir,) = (folder / "hybrid_logs").iterdir()
    return log_dir


def pids_of(log_dir: Path) -> list[int]:
    paths = log_dir.glob("status/rank*.json")
    return [json.loads(path.read_text(encoding="utf-8"))["pid"] for path in paths]


def wait_for_ranks(folder: Path, num_ranks: int) -> list[int]:
    """The pids of all ranks, once each has printed that it is ready."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        logs = list((folder / "hybrid_logs").glob("*/rank*.stdout"))
        if sum("ready" in log.read_text(encoding="utf-8") for log in logs) == num_ranks:
            return pids_of(log_dir_of(folder))
        time.sleep(0.05)
    raise AssertionError("the ranks did not start within 60 s")


def test_script_runs_as_under_python(tmp_path: Path) -> None:
    """Arguments, sys.path, exit hooks, output and the strategy's path reach every rank; rank 0 is shown."""
    write(
        tmp_path,
        "scripts/job.py",
        """
import atexit, os, sys
import beside  # next to the script, as under plain python
rank = os.environ["RANK"]
assert os.environ["LOCAL_RANK"] == rank and os.environ["LOCAL_WORLD_SIZE"] == "2"
print("rank", rank, "of", os.environ["WORLD_SIZE"], sys.argv[1:], __name__, os.environ["HYBRID_STRATEGY"])
print("to stderr from", rank, file=sys.stderr)
atexit.register(print, "exit hook of", rank)
sys.exit(0)
""",
    )
    write(tmp_path, "scripts/beside.py", "")
    write(tmp_path, "two.yaml", "sharding: true\nsharding_configs: {stage: 2}\n")

    done = hybrid("run", "--nproc", "2", "--strategy", "two.yaml", "scripts/job.py", "--nproc", "7", "-m", cwd=tmp_path)

    assert (done.returncode, done.stderr) == (0, "to stderr from 0\n")
    strategy = tmp_path / "two.yaml"
    assert done.stdout == f"rank 0 of 2 ['--nproc', '7', '-m'] __main__ {strategy}\nexit hook of 0\n"
    log_dir = log_dir_of(tmp_path)
    assert (log_dir / "rank1.stdout").read_text().startswith("rank 1 of 2 ['--nproc', '7', '-m']")
    assert (log_dir / "rank1.stderr").read_text() == "to stderr from 1\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["--nproc", "3", "--strategy", "bad.yaml", "job.py"], "shard_size", id="strategy"),
        pytest.param(["--nproc", "0", "gone.py"], "--nproc is 0; expected 1 or more; script gone.py", id="both"),
        pytest.param(["gone.py", "--nproc=2"], "one rank: --nproc behind gone.py is handed to the script", id="behind"),
        pytest.param(["--nproc", "100000", "job.py"], "--nproc is 100000: each takes more than", id="too-many"),
        pytest.param(["--nnodes", "2", "job.py"], "needs --node-rank and --master-addr", id="nodes"),
        pytest.param(["--node-rank", "0", "job.py"], "--node-rank given with --nnodes 1", id="no-effect"),
        pytest.param(
            ["--nnodes", "2", "--rdzv-endpoint", "a:1", "--node-rank", "0", "job.py"],
            "--rdzv-endpoint a:1 given with --node-rank",
            id="two-ways",
        ),
        pytest.param(
            ["--nnodes", "2", "--node-rank", "0", "--master-addr", "a", "--rdzv-id", "x", "job.py"],
            "--rdzv-id x given without --rdzv-endpoint",
            id="id-alone",
        ),
        pytest.param(
            ["--nnodes", "2", "--rdzv-endpoint", "a:1", "--rdzv-id", "", "job.py"], "--rdzv-id is empty", id="no-id"
        ),
    ],
)
def test_refused_before_any_process_starts(tmp_path: Path, arguments: list[str], expected: str) -> None:
    """A job that cannot work must cost a second, not a place in a queue."""
    write(tmp_path, "job.py", "")
    write(tmp_path, "bad.yaml", "sharding: true\nsharding_configs: {stage: 2, shard_size: 2}\n")
    done = hybrid_here("run", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "hybrid_logs").exists()


def test_first_failing_ranks_traceback_comes_last(tmp_path: Path) -> None:
    """Among many ranks' messages the cause is what the reader needs, and it is what a terminal shows last."""
    write(
        tmp_path,
        "job.py",
        f"""
import os, time
def work():
    if os.environ["RANK"] == "1":
        {wait_for_files("started0", "started2")}
        raise ValueError("the tensor of rank 1 is wrong")
    if os.environ["RANK"] == "0":
        try:
            open("started0", "w").close(); time.sleep(300)
        finally:
            pass
    open("started2", "w").close(); time.sleep(300)
print("working")
work()
""",
    )
    done = hybrid("run", "--nproc", "3", "job.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == "working\n"
    before, _, last = done.stderr.partition("rank 1 failed first:\n")
    assert last.strip().splitlines() == [
        "Traceback (most recent call last):",
        '  File "job.py", line 14, in <module>',
        "    work()",
        '  File "job.py", line 6, in work',
        '    raise ValueError("the tensor of rank 1 is wrong")',
        "ValueError: the tensor of rank 1 is wrong",
    ]
    # Where the others were when they were ended.
    assert "rank 0: was ended at job.py:9 in work" in before
    assert "rank 2: was ended at job.py:12 in work" in before
    assert not any(psutil.pid_exists(pid) for pid in pids_of(log_dir_of(tmp_path)))


def test_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    """A rank that the kernel kills leaves no traceback; its signal and its last lines are what there is."""
    write(
        tmp_path,
        "job.py",
        f"""
import os, signal, time
if os.environ["RANK"] == "1":
    {wait_for_files("started0")}
    print("last words", file=__import__("sys").stderr)
    os.kill(os.getpid(), signal.SIGKILL)
open("started0", "w").close(); time.sleep(300)
""",
    )
    done = hybrid("run", "--nproc", "2", "job.py", cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 0: was ended at job.py:7 in <module>" in done.stderr
    assert "last words" in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("rank 1 was killed by SIGKILL")


def test_rank_that_does_not_end_is_killed(tmp_path: Path) -> None:
    """torchrun waits 30 s for such a rank; a stopped or stubborn process must not hold the job that long."""
    write(
        tmp_path,
        "job.py",
        """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("stubborn", "w").close()
    time.sleep(300)
while not os.path.exists("stubborn"):
    time.sleep(0.05)
sys.exit("rank 0 gives up")
""",
    )
    started = time.monotonic()
    done = hybrid("run", "--nproc", "2", "job.py", cwd=tmp_path)
    assert time.monotonic() - started < 25
    assert done.returncode == 1
    assert "rank 1: did not end by itself and was killed" in done.stderr
    # A sentence needs no traceback, as under python.
    assert done.stderr.partition("rank 0 failed first:")[2].strip() == "SystemExit: rank 0 gives up"


@pytest.mark.slow
def test_hanging_rank_ends_the_job_within_the_timeout(tmp_path: Path) -> None:
    """Two ranks wait for a third that never comes: they say so with the last collectives, and all are ended."""
    write(tmp_path, "strategy.yaml", "sharding: true\nsharding_configs: {stage: 1}\ntimeout_seconds: 4\n")
    write(
        tmp_path,
        "job.py",
        """
import os, time
import torch, hybrid
def stuck():
    time.sleep(300)
model = hybrid.distributed_model(torch.nn.Linear(4, 4))
optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
if hybrid.get_mesh().rank == 1:
    stuck()
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
""",
    )
    done = hybrid("run", "--nproc", "2", "--strategy", "strategy.yaml", "job.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "rank 1: was ended at job.py:5 in stuck" in done.stderr
    last = done.stderr.partition("rank 0 was the first to miss another rank:\n")[2]
    assert 'File "job.py", line 10, in <module>' in last
    # One traceback, from the user's line to one error; what gloo said is in its message.
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert last.count("CollectiveError: ") == 1
    assert "CollectiveError: rank 0:" in last
    assert "PeerError" not in last
    assert "direct cause" not in last
    assert "with rank 1: Timed out waiting" in last
    assert "The last collectives of rank 0" in last


@pytest.mark.slow
@pytest.mark.parametrize("closes", [False, True])
def test_rank_that_leaves_its_loop_early_is_named(tmp_path: Path, closes: bool) -> None:
    """It ends well, so there is no error of its own; the others can only say that it is gone."""
    write(tmp_path, "strategy.yaml", "sharding: true\nsharding_configs: {stage: 1}\ntimeout_seconds: 20\n")
    write(
        tmp_path,
        "job.py",
        f"""
import torch, hybrid
model = hybrid.distributed_model(torch.nn.Linear(4, 4))
optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3 - hybrid.get_mesh().rank):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
if {closes}:
    hybrid.shutdown()
""",
    )
    done = hybrid("run", "--nproc", "2", "--strategy", "strategy.yaml", "job.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "rank 0 was the first to miss another rank:\n" in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("rank 1 had already ended with exit code 0: the script left the loop early there")


@pytest.mark.slow
def test_process_group_that_is_left_open_ends_quietly(tmp_path: Path) -> None:
    """Scripts without `hybrid.shutdown()`: neither a warning nor a wait at the end, whoever comes last."""
    write(
        tmp_path,
        "job.py",
        """
import time
import torch, hybrid
model = hybrid.distributed_model(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
time.sleep(hybrid.get_mesh().rank)
print("end", time.time())
""",
    )
    done = hybrid("run", "--nproc", "2", "job.py", cwd=tmp_path)
    ended = time.time()
    assert (done.returncode, done.stderr) == (0, "")
    log_dir = log_dir_of(tmp_path)
    assert [(log_dir / f"rank{rank}.stderr").read_text(encoding="utf-8") for rank in range(2)] == ["", ""]
    last = float((log_dir / "rank1.stdout").read_text(encoding="utf-8").split()[1])
    assert ended - last < 20  # far above a busy machine, far below any timeout of torch


@pytest.mark.parametrize("receiver", ["group", "launcher"])
def test_ctrl_c_ends_all_ranks(tmp_path: Path, receiver: str) -> None:
    """From a terminal the whole group gets the signal, from `kill -INT` the launcher alone."""
    write(
        tmp_path,
        "job.py",
        f"""
import time
print("ready", flush=True)
time.sleep({NEVER_SECONDS})
""",
    )
    process = start_hybrid("run", "--nproc", "2", "job.py", cwd=tmp_path)
    pids = wait_for_ranks(tmp_path, 2)
    started = time.monotonic()
    (os.killpg if receiver == "group" else os.kill)(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert time.monotonic() - started < 10
    assert process.returncode == 130
    assert stderr.strip().splitlines()[-1].startswith("hybrid run: stopped by Ctrl-C")
    assert "Traceback" not in stderr
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert "Traceback" not in (log_dir_of(tmp_path) / "rank1.stderr").read_text()


def test_killed_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    """Nobody is left to end the ranks; the kernel has to. Orphans would hold their devices for ever."""
    write(tmp_path, "job.py", f"import time\nprint('ready', flush=True)\ntime.sleep({NEVER_SECONDS})\n")
    process = start_hybrid("run", "--nproc", "2", "job.py", cwd=tmp_path)
    pids = wait_for_ranks(tmp_path, 2)
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, f"ranks {pids} outlive their launcher"
        time.sleep(0.1)


def test_module_and_exit_code(tmp_path: Path) -> None:
    """`-m` as in python; the job's exit code is the failing rank's."""
    write(tmp_path, "package/__init__.py", "")
    write(
        tmp_path,
        "package/train.py",
        "import os, sys\nassert sys.argv[0].endswith('train.py')\nsys.exit(3 * int(os.environ['RANK']))\n",
    )
    done = hybrid("run", "--nproc", "2", "--log-dir", "logs", "-m", "package.train", cwd=tmp_path)
    assert done.returncode == 3
    assert (tmp_path / "logs").is_dir()


def test_help_has_examples(tmp_path: Path) -> None:
    done = hybrid_here("run", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "hybrid run --nproc 4 train.py --lr 1e-3" in done.stdout
