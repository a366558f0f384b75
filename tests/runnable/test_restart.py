"""`hybrid run --max-restarts N --resume DIR`: what a user sees when a job fails and goes on."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.runnable.command import hybrid, hybrid_here, start_hybrid
from tests.runnable.test_run import pids_of, write

# A script without torch that saves as one: complete checkpoints with nothing in them.
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from hybrid.checkpoint.folder import commit, latest_complete, new_writing_folder, write_manifest
from hybrid.checkpoint.manifest import Manifest
from hybrid import resume_directory

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
directory = resume_directory()
newest = latest_complete(directory)[0]
first_step = 0 if newest is None else newest.step
# All ranks have looked before the first of them saves.
Path(os.environ["HYBRID_LOG_DIR"], f"looked{RANK}").touch()
while len([*Path(os.environ["HYBRID_LOG_DIR"]).glob("looked*")]) < WORLD_SIZE:
    time.sleep(0.01)
print("from", first_step, "on", WORLD_SIZE, "in", directory, flush=True)

def save(step):
    if RANK == 0:
        writing = new_writing_folder(directory, step, "x")
        write_manifest(writing, Manifest(
            hybrid_version="0", torch_version="0", created_at="2026-03-01T12:00:00Z", step=step, layout={}, contents=(),
            files={}, entries={}, tied={},
        ))
        commit(writing, directory, step)
    while not (directory / f"step_{step:08d}").exists():
        time.sleep(0.01)

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def spoken(stderr: str) -> list[str]:
    """First lines of what the launcher said."""
    return re.findall(r"^hybrid run: (.*)$", stderr, flags=re.MULTILINE)


def run_dir_of(folder: Path) -> Path:
    (run_dir,) = (folder / "hybrid_logs").iterdir()
    return run_dir


@pytest.mark.slow
def test_job_goes_on_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    """An exception, then a kill: each time all processes are new, and what was half written is passed over."""
    write(
        tmp_path,
        "job.py",
        PRELUDE
        + """
if first_step == 0:
    save(5)
    if RANK == 1:
        raise ValueError("no label")
    time.sleep(300)
if first_step == 5:
    save(10)
    Path(directory, "step_00000020").mkdir(exist_ok=True)
    if RANK == 1:
        die()
    time.sleep(300)
save(30)
""",
    )
    done = hybrid("run", "--nproc", "2", "--resume", "saved", "--max-restarts", "3", "job.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run_dir = run_dir_of(tmp_path)
    said = spoken(done.stderr)
    assert [re.sub(r"after [\d.]+ s", "after some time", line) for line in said] == [
        "no complete checkpoint in saved yet",
        "failed after some time",
        "restart 1 of 3 from step_00000005 on 2 ranks",
        "failed after some time",
        f"passed over step_00000020: {tmp_path}/saved/step_00000020 has no manifest.json: it is not a checkpoint, "
        "or not a whole one",
        "restart 2 of 3 from step_00000010 on 2 ranks",
        f"ended well after 2 restarts; logs: {run_dir}",
    ]
    # The account of each failure is the one of a run without restarts.
    assert "rank 1 failed first:\n\nTraceback (most recent call last):" in done.stderr
    assert "rank 1 was killed by SIGKILL" in done.stderr
    folder = tmp_path / "saved"
    assert done.stdout == "".join(f"from {step} on 2 in {folder}\n" for step in (0, 5, 10))
    attempts = [run_dir / f"attempt_{number}" for number in (1, 2, 3)]
    assert sorted(run_dir.iterdir()) == attempts
    pids = [set(pids_of(attempt)) for attempt in attempts]
    assert [len(some) for some in pids] == [2, 2, 2]
    assert len(set.union(*pids)) == 6


@pytest.mark.slow
def test_rank_that_is_killed_again_is_given_up(tmp_path: Path) -> None:
    """Four ranks, one of which the machine cannot carry: three do not fit the strategy's shards, two do."""
    write(tmp_path, "strategy.yaml", "sharding: true\nsharding_configs: {stage: 2, shard_size: 2}\n")
    write(
        tmp_path,
        "job.py",
        PRELUDE
        + """
if WORLD_SIZE == 4:
    save(first_step + 5)
    if RANK == 3:
        die()
    time.sleep(300)
""",
    )
    options = ["--nproc", "4", "--min-nproc", "1", "--resume", "saved", "--max-restarts", "3"]
    done = hybrid("run", *options, "--strategy", "strategy.yaml", "job.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = spoken(done.stderr)
    assert "restart 1 of 3 from step_00000005 on 4 ranks" in said
    why = said.index("rank 3 of 4 killed, and ranks in the attempt before as well; fewer ranks now")
    assert re.match(r"not on 3 ranks: .*shard_size", said[why + 1])
    assert said[why + 2] == "restart 2 of 3 from step_00000010 on 2 ranks"
    assert [line.split(" in ")[0] for line in done.stdout.splitlines()] == [
        "from 0 on 4",
        "from 5 on 4",
        "from 10 on 2",
    ]


@pytest.mark.slow
def test_crash_loop_ends_with_the_exit_code_of_the_script(tmp_path: Path) -> None:
    """Nine restarts of a script that cannot work would take a place in the queue for nothing."""
    write(tmp_path, "job.py", "import sys\nsys.exit(7)\n")
    done = hybrid("run", "--resume", "saved", "--max-restarts", "9", "job.py", cwd=tmp_path)
    assert done.returncode == 7
    assert spoken(done.stderr)[-1].startswith(
        "not restarted: 3 attempts in a row failed with the same error (SystemExit at job.py:2) and completed no new"
    )
    assert "restart 2 of 9 from the beginning (no complete checkpoint in saved) on 1 rank" in done.stderr
    assert not (tmp_path / "saved").exists()


@pytest.mark.slow
def test_stop_request_is_no_failure(tmp_path: Path) -> None:
    """A scheduler's SIGTERM in the second attempt: the job ends, and no rank stays."""
    write(
        tmp_path,
        "job.py",
        PRELUDE
        + """
if first_step == 0:
    save(1)
    sys.exit("once")
print("ready", flush=True)
time.sleep(300)
""",
    )
    process = start_hybrid("run", "--nproc", "2", "--resume", "saved", "--max-restarts", "3", "job.py", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while sum("ready" in log.read_text() for log in (tmp_path / "hybrid_logs").glob("*/attempt_2/*.stdout")) < 2:
        assert time.monotonic() < deadline, "the second attempt did not start"
        time.sleep(0.05)
    pids = pids_of(run_dir_of(tmp_path) / "attempt_2")
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert spoken(stderr)[-1].startswith("stopped by SIGTERM after")
    assert "restart 2" not in stderr
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_resume_alone_tells_the_script_and_changes_nothing_else(tmp_path: Path) -> None:
    """One command starts a run and continues it; the logs are where they always are."""
    write(tmp_path, "job.py", PRELUDE + "save(first_step + 5)\n")
    for expected in ("no complete checkpoint in saved yet", "the newest complete checkpoint in saved is step_00000005"):
        done = hybrid("run", "--resume", "saved", "--log-dir", expected[:3], "job.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert spoken(done.stderr) == [expected]
        (run_dir,) = (tmp_path / expected[:3]).iterdir()
        assert (run_dir / "rank0.stdout").is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["--max-restarts", "2", "job.py"], "--max-restarts 2 needs --resume DIR", id="no-folder"),
        pytest.param(["--resume", "saved", "--min-nproc", "1", "job.py"], "--min-nproc 1 given without", id="alone"),
        pytest.param(["--resume", "job.py", "job.py"], "the folder to resume from, job.py, is a file", id="file"),
        pytest.param(
            ["--resume", "one/step_00000005", "job.py"],
            "one/step_00000005 is itself a checkpoint; give the folder that it lies in: --resume one",
            id="step",
        ),
    ],
)
def test_refused_before_any_process_starts(tmp_path: Path, arguments: list[str], expected: str) -> None:
    write(tmp_path, "job.py", "")
    (tmp_path / "one").mkdir()
    write(tmp_path, "one/step_00000005/manifest.json", "{}")
    done = hybrid_here("run", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"hybrid: {expected}")
    assert not (tmp_path / "hybrid_logs").exists()
