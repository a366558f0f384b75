"""When a failed job starts again, on how many ranks, and when it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid.errors import LaunchError, StrategyError
from hybrid.launch import restart
from hybrid.launch.job import LaunchJob
from hybrid.launch.restart import FailedAttempt, GiveUp, Restart, decide, run_with_restarts
from hybrid.launch.run import RunOutcome, StopRequests
from hybrid.launch.status import Failure, RankStatus
from hybrid.launch.summary import COLLECTIVE_ERROR, RunFailure, error_of
from hybrid.launch.variables import resume_directory


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HYBRID_RESUME", "HYBRID_STRATEGY"):
        monkeypatch.delenv(name, raising=False)


def attempt(
    error: str = "a", *, newest: int | None = None, lost: tuple[int, ...] = (), ranks: int = 4
) -> FailedAttempt:
    name = None if newest is None else f"step_{newest:08d}"
    return FailedAttempt(num_processes=ranks, error=error, lost=frozenset(lost), newest=name)


def job_for(tmp_path: Path, *, strategy: str | None = None, **fields: object) -> LaunchJob:
    """A job on four ranks that may restart, with fields of its own."""
    script = tmp_path / "job.py"
    script.touch()
    path = None
    if strategy is not None:
        path = tmp_path / "strategy.yaml"
        path.write_text(strategy, encoding="utf-8")
    given = {"num_processes": 4, "resume": tmp_path / "saved", "max_restarts": 3, **fields}
    return LaunchJob(script=str(script), strategy=path, **given)  # type: ignore[arg-type]


# ---------------------------------------------------------------- whether


def test_restarts_are_used_up() -> None:
    """N restarts are N + 1 attempts, whatever the errors and however far they came."""
    history = [attempt(error, newest=step) for error, step in (("a", 10), ("b", 20), ("c", 30))]
    assert isinstance(decide(history[:2], max_restarts=2, fewer=None), Restart)
    assert decide(history, max_restarts=2, fewer=None) == GiveUp(reason="all 2 restarts are used")


def test_crash_loop_ends_early() -> None:
    """A script that fails at once must not be started N times."""
    loop = [attempt("ValueError at train.py:3", newest=20) for _ in range(3)]
    assert isinstance(decide(loop[:2], max_restarts=9, fewer=None), Restart)
    stop = decide(loop, max_restarts=9, fewer=None)
    assert isinstance(stop, GiveUp)
    assert "3 attempts in a row failed with the same error (ValueError at train.py:3)" in stop.reason
    assert "7 of 9 restarts are left unused" in stop.reason


@pytest.mark.parametrize(
    "history",
    [
        pytest.param([attempt(newest=1), attempt(newest=2), attempt(newest=3)], id="new-checkpoints"),
        pytest.param([attempt(newest=1), attempt(newest=1), attempt(newest=2)], id="one-new-checkpoint"),
        pytest.param([attempt(), attempt(), attempt(newest=1)], id="first-checkpoint"),
        pytest.param([attempt("a"), attempt("b"), attempt("a")], id="other-errors"),
        pytest.param([attempt(ranks=4), attempt(ranks=4), attempt(ranks=2)], id="fewer-ranks"),
    ],
)
def test_accidents_are_no_crash_loop(history: list[FailedAttempt]) -> None:
    """A run that gets on, or fails in different ways, is worth all its restarts."""
    assert isinstance(decide(history, max_restarts=9, fewer=None), Restart)


def test_pause_grows_until_there_is_a_new_checkpoint() -> None:
    """A file system or a device that is away for a moment must not use up all restarts within seconds."""

    def pauses(*newest: int | None) -> list[float]:
        history = [attempt(str(number), newest=step) for number, step in enumerate(newest)]
        steps = [decide(history[: end + 1], max_restarts=99, fewer=None) for end in range(len(history))]
        return [step.pause_seconds for step in steps if isinstance(step, Restart)]

    assert pauses(None, None, None, None) == [1, 2, 4, 8]
    assert pauses(10, 20, 20, 30) == [1, 1, 2, 1]
    assert pauses(*[None] * 9)[-1] == 30


# ---------------------------------------------------------------- on how many ranks


def allowed(*counts: int, least: int = 1):
    """What a strategy that works on these numbers of ranks answers."""

    def fewer(most: int) -> tuple[int | None, list[str]]:
        tried = range(most, least - 1, -1)
        count = next((count for count in tried if count in counts), None)
        return count, [f"{other} ranks: no" for other in tried if count is None or other > count]

    return fewer


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        pytest.param([attempt(lost=(1,))], 4, id="first-loss"),
        pytest.param([attempt(lost=(1,)), attempt(lost=(2,))], 3, id="no-checkpoint-between"),
        pytest.param([attempt(lost=(1,), newest=1), attempt(lost=(2,), newest=2)], 4, id="another-rank-later"),
        pytest.param([attempt(lost=(1,), newest=1), attempt(lost=(1, 2), newest=2)], 2, id="the-same-rank-later"),
        pytest.param([attempt(lost=(1,)), attempt("error")], 4, id="error-after-loss"),
        pytest.param([attempt(lost=(3,), ranks=4), attempt(lost=(1,), ranks=3)], 3, id="first-loss-on-fewer"),
    ],
)
def test_ranks_that_are_lost_again_are_given_up(history: list[FailedAttempt], expected: int) -> None:
    """One kill may be an accident, and fewer ranks are slower: only a second loss in a row lowers the number."""
    following = decide(history, max_restarts=9, fewer=allowed(1, 2, 3))
    assert isinstance(following, Restart)
    assert following.num_processes == expected
    same = decide(history, max_restarts=9, fewer=None)  # without --min-nproc
    assert isinstance(same, Restart)
    assert same.num_processes == history[-1].num_processes


def test_number_of_ranks_is_one_that_the_strategy_allows() -> None:
    """Three ranks are left, two is what can run; the reader sees why not three."""
    following = decide([attempt(lost=(1,)), attempt(lost=(1,))], max_restarts=9, fewer=allowed(2))
    assert isinstance(following, Restart)
    assert following.num_processes == 2
    assert following.notes == (
        "rank 1 of 4 killed, and ranks in the attempt before as well; fewer ranks now",
        "not on 3 ranks: no",
    )


def test_strategy_that_allows_no_smaller_number_keeps_it() -> None:
    following = decide([attempt(lost=(1,)), attempt(lost=(1,))], max_restarts=9, fewer=allowed(least=3))
    assert isinstance(following, Restart)
    assert following.num_processes == 4
    assert "it stays at 4" in following.notes[0]
    assert following.notes[1:] == ("not on 3 ranks: no",)


SHARD_2 = "sharding: true\nsharding_configs: {stage: 2, shard_size: 2}\n"


def test_smaller_numbers_come_from_the_strategy_file(tmp_path: Path) -> None:
    """shard_size stays as set and must divide; the data-parallel size follows the number of ranks."""
    job = job_for(tmp_path, strategy=SHARD_2, min_processes=1)
    job.check()
    count, reasons = job.fewer_processes(3)
    assert count == 2
    (reason,) = reasons
    assert reason.startswith("3 ranks: ")
    assert "shard_size" in reason
    assert job_for(tmp_path, min_processes=1).fewer_processes(3) == (3, [])  # the defaults work on any number


def test_minimum_that_can_never_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    """Not in the night, after the second kill."""
    with pytest.raises(
        StrategyError, match=r"(?s)--min-nproc is 3, but the strategy works on no .*3 ranks: .*shard_size"
    ):
        job_for(tmp_path, strategy=SHARD_2, min_processes=3).check()
    job_for(tmp_path, strategy=SHARD_2, min_processes=4).check()  # as --nproc: nothing to give up


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"resume": None}, r"^--max-restarts 3 needs --resume DIR", id="no-folder"),
        pytest.param({"max_restarts": -1}, r"^--max-restarts is -1; expected 0 or more$", id="negative"),
        pytest.param(
            {"max_restarts": 0, "min_processes": 2}, r"^--min-nproc 2 given without --max-restarts", id="alone"
        ),
        pytest.param({"min_processes": 5}, r"^--min-nproc is 5; expected 1..4 \(--nproc\)$", id="more-than-nproc"),
        pytest.param({"min_processes": 0}, r"^--min-nproc is 0; expected 1..4", id="none"),
        pytest.param(
            {"num_nodes": 2, "rdzv_endpoint": "a:1"},
            r"^--max-restarts 3 given with --nnodes 2: .*--requeue\) with the same --resume DIR$",
            id="nodes",
        ),
        pytest.param({"resume": Path(__file__)}, r"^the folder to resume from, .*, is a file", id="file"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(tmp_path: Path, fields: dict[str, object], expected: str) -> None:
    """Before any process starts, and by the names of the options."""
    with pytest.raises(LaunchError, match=expected) as caught:
        job_for(tmp_path, **fields).check()
    assert "; --" not in str(caught.value)  # one problem only


def test_several_machines_may_resume(tmp_path: Path) -> None:
    """The way out that the refusal names."""
    job_for(tmp_path, num_nodes=2, rdzv_endpoint="a:1", max_restarts=0).check()


def test_two_folders_to_resume_from_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_RESUME", str(tmp_path / "other"))
    with pytest.raises(LaunchError, match=r"--resume is .*saved and the environment variable HYBRID_RESUME is .*other"):
        job_for(tmp_path).check()
    monkeypatch.setenv("HYBRID_RESUME", str(tmp_path / "here" / ".." / "saved"))
    job_for(tmp_path).check()


def test_scripts_learn_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, since a script may change its own folder; from the option or the environment."""
    monkeypatch.chdir(tmp_path)
    assert resume_directory() is None
    told = job_for(tmp_path, resume=Path("saved")).worker_environment(tmp_path)["HYBRID_RESUME"]
    assert told == str(tmp_path / "saved")
    monkeypatch.setenv("HYBRID_RESUME", "elsewhere")
    assert job_for(tmp_path, resume=None).worker_environment(tmp_path)["HYBRID_RESUME"] == str(tmp_path / "elsewhere")
    job_for(tmp_path, resume=None).check()  # --max-restarts has its folder
    assert resume_directory() == Path("elsewhere")
    monkeypatch.setenv("HYBRID_RESUME", "")
    assert resume_directory() is None


# ---------------------------------------------------------------- what a failure is


def run_of(
    *, failures: dict[int, Failure] | None = None, exit_codes: dict[int, int] | None = None, error: str | None = None
) -> RunFailure:
    failures = failures or {}
    statuses = {
        rank: RankStatus(rank=rank, pid=rank, exit_code=1 if rank in failures else None, failure=failures.get(rank))
        for rank in range(3)
    }
    return RunFailure(
        log_dir=Path("logs"),
        seconds=1.0,
        statuses=statuses,
        exit_codes={**dict.fromkeys(failures, 1), **(exit_codes or {})},
        gone_at=dict.fromkeys(exit_codes or {}, 5.0),
        killed=frozenset({2}),
        error=error,
    )


def raised(kind: str, *, at: float = 5.0, line: int = 7, message: str = "oh no") -> Failure:
    traceback = (
        "Traceback (most recent call last):\n"
        f'  File "train.py", line {line}, in <module>\n    work()\n'
        '  File "/venv/site-packages/torch/nn.py", line 99, in work\n    ...\n'
        f"{kind}: {message}\n"
    )
    return Failure(time_seconds=at, kind=kind, message=message, traceback=traceback, stderr_bytes=0)


def test_equal_errors_are_known_again() -> None:
    """Times, addresses and ranks differ between two failures of one cause; the place in the script does not."""
    first = run_of(failures={0: raised(COLLECTIVE_ERROR, at=6.0), 1: raised("my.NoLabel", message="step 17")})
    again = run_of(failures={2: raised("my.NoLabel", message="step 18")})
    assert error_of(first) == error_of(again) == "NoLabel at train.py:7"
    assert error_of(run_of(failures={2: raised("my.NoLabel", line=8)})) == "NoLabel at train.py:8"
    killed = run_of(failures={0: raised(COLLECTIVE_ERROR)}, exit_codes={1: -signal.SIGKILL})
    assert error_of(killed) == "a rank killed by SIGKILL"
    assert error_of(run_of(exit_codes={1: 3})) == "exit code 3"
    assert error_of(run_of(error="RendezvousTimeoutError: after 60 s")) == "RendezvousTimeoutError"


def test_lost_ranks_are_those_that_a_signal_took() -> None:
    """Not those that raised, that torchrun ended, that the watchdog aborted, or that this launcher killed."""
    run = run_of(failures={0: raised("ValueError")}, exit_codes={1: -signal.SIGKILL, 2: -signal.SIGKILL})
    assert run.lost == {1}
    assert run_of(exit_codes={0: -signal.SIGSEGV, 1: -signal.SIGTERM}).lost == {0}
    assert run_of(exit_codes={0: -signal.SIGABRT}).lost == frozenset()


# ---------------------------------------------------------------- the loop, with attempts that fail at once


def outcome_of(log_dir: Path, *, pid: int) -> RunOutcome:
    """A failed attempt whose rank 0 had this process."""
    statuses = {0: RankStatus(rank=0, pid=pid, exit_code=3)}
    failure = replace(run_of(exit_codes={0: 3}), statuses=statuses, killed=frozenset())
    return RunOutcome(exit_code=3, message="failed after 1.0 s", log_dir=log_dir, failure=failure)


def ended_process() -> int:
    """A pid that no process has."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_between_attempts_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """No rank is there that could receive it; the next attempt must not begin."""
    started = []

    def run_attempt(job: LaunchJob, log_dir: Path, stop: StopRequests) -> RunOutcome:
        started.append(log_dir.name)
        return outcome_of(log_dir, pid=ended_process())

    def say(text: str) -> None:
        if text == "restart 1 of 3 from step_00000007 on 4 ranks":
            os.kill(os.getpid(), number)

    monkeypatch.setattr(restart, "run_attempt", run_attempt)
    job = job_for(tmp_path, log_dir=tmp_path / "logs")
    outcome = run_with_restarts(job, newest_checkpoint=lambda: "step_00000007", say=say)
    assert started == ["attempt_1"]
    assert outcome.exit_code == 128 + number
    cause = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert outcome.message.startswith(f"stopped by {cause} before restart 1; no rank is running")


def test_ranks_that_stay_prevent_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old rank in the middle of a save and a new one would write into one folder."""
    monkeypatch.setattr(restart, "LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(restart, "run_attempt", lambda job, log_dir, stop: outcome_of(log_dir, pid=os.getpid()))
    said: list[str] = []
    job = job_for(tmp_path, log_dir=tmp_path / "logs")
    outcome = run_with_restarts(job, newest_checkpoint=lambda: None, say=said.append)
    assert said == ["failed after 1.0 s"]
    assert outcome.exit_code == 3
    assert outcome.message == f"not restarted: rank 0 (pid {os.getpid()}) of the failed attempt cannot be ended"
