"""Which rank of a failed run was the cause, from what is left of it."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid.launch.status import Failure, RankStatus
from hybrid.launch.summary import COLLECTIVE_ERROR, RunFailure, describe_failure, first_failure


def failed(kind: str, *, at: float, message: str = "oh no") -> Failure:
    traceback = f"Traceback (most recent call last):\n  of {kind}\n{kind}: {message}"
    return Failure(time_seconds=at, kind=kind, message=message, traceback=traceback, stderr_bytes=0)


def run_of(
    log_dir: Path,
    *,
    failures: dict[int, Failure] | None = None,
    exit_codes: dict[int, int] | None = None,
    gone_at: dict[int, float] | None = None,
    killed: frozenset[int] = frozenset(),
    error: str | None = None,
) -> RunFailure:
    """A run of three ranks; a rank with a failure has exit code 1."""
    failures = failures or {}
    statuses = {
        rank: RankStatus(rank=rank, pid=rank, exit_code=1 if rank in failures else None, failure=failures.get(rank))
        for rank in range(3)
    }
    return RunFailure(
        log_dir=log_dir,
        seconds=1.0,
        statuses=statuses,
        exit_codes={**dict.fromkeys(failures, 1), **(exit_codes or {})},
        gone_at=gone_at or {},
        killed=killed,
        error=error,
    )


def test_earliest_exception_is_the_cause(tmp_path: Path) -> None:
    run = run_of(tmp_path, failures={0: failed("ValueError", at=5.2), 2: failed("KeyError", at=5.1)})
    assert first_failure(run) == 2
    text = describe_failure(run)
    assert "rank 0: ValueError: oh no" in text
    assert text.endswith("rank 2 failed first:\n\nTraceback (most recent call last):\n  of KeyError\nKeyError: oh no")


def test_rank_that_missed_another_is_not_the_cause(tmp_path: Path) -> None:
    """A clock that runs ahead, or a slow disk, must not make a follower the cause."""
    run = run_of(
        tmp_path,
        failures={0: failed(COLLECTIVE_ERROR, at=5.0, message="gone\nlong list"), 1: failed("ValueError", at=5.4)},
    )
    assert first_failure(run) == 1
    assert "rank 0: CollectiveError: gone\n" in describe_failure(run)


def test_without_another_cause_the_first_that_waited_is_shown(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        failures={0: failed(COLLECTIVE_ERROR, at=5.1), 2: failed(COLLECTIVE_ERROR, at=5.0)},
        exit_codes={1: -signal.SIGTERM},
    )
    assert first_failure(run) == 2
    text = describe_failure(run)
    assert "rank 1: was ended" in text
    assert "rank 2 was the first to miss another rank:" in text


def left(rank: int, *, at: float) -> RankStatus:
    return RankStatus(rank=rank, pid=rank, exit_code=0, ended_at=at)


def missed(run: RunFailure, *statuses: RankStatus) -> RunFailure:
    return replace(run, statuses={**run.statuses, **{status.rank: status for status in statuses}})


EARLY = "rank 1 had already ended with exit code 0: the script left the loop early there"


@pytest.mark.parametrize(
    ("message", "ended_at"),
    [
        pytest.param("not every rank entered it in time", 2.0, id="long-before"),
        # `hybrid.shutdown()` closes the connections, and the script goes on to its end.
        pytest.param("all_reduce failed after 0.0 s in wait: a rank is gone; look", 5.2, id="closing"),
    ],
)
def test_rank_that_left_early_is_the_last_word(tmp_path: Path, message: str, ended_at: float) -> None:
    """It has no error to show, and the error of the rank that waits says nothing of the reason."""
    run = missed(
        run_of(tmp_path, failures={0: failed(COLLECTIVE_ERROR, at=5.0, message=message)}), left(1, at=ended_at)
    )
    lines = describe_failure(run).splitlines()
    assert "rank 0 was the first to miss another rank:" in lines
    assert lines[-1].startswith(EARLY)


def test_rank_that_left_early_and_was_ended_while_it_closed_down(tmp_path: Path) -> None:
    """torchrun may catch it between the end of its script and that of its process."""
    run = missed(
        run_of(tmp_path, failures={0: failed(COLLECTIVE_ERROR, at=5.0)}, exit_codes={1: -signal.SIGTERM}),
        left(1, at=4.9),
    )
    text = describe_failure(run)
    assert text.splitlines()[-1].startswith(EARLY)
    assert "was ended" not in text


def test_several_ranks_that_left_early_are_named_together(tmp_path: Path) -> None:
    run = missed(run_of(tmp_path, failures={2: failed(COLLECTIVE_ERROR, at=5.0)}), left(0, at=4.0), left(1, at=4.5))
    assert describe_failure(run).splitlines()[-1].startswith("ranks 0, 1 had already ended with exit code 0")


@pytest.mark.parametrize(
    ("kind", "ended_at"),
    [
        pytest.param(COLLECTIVE_ERROR, 5.2, id="told-to-end"),  # it hung, and exits with 0 on SIGTERM
        pytest.param("ValueError", 2.0, id="another-cause"),
    ],
)
def test_rank_that_ended_well_is_not_blamed(tmp_path: Path, kind: str, ended_at: float) -> None:
    message = "not every rank entered it in time"
    run = missed(run_of(tmp_path, failures={0: failed(kind, at=5.0, message=message)}), left(1, at=ended_at))
    assert "had already ended" not in describe_failure(run)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_rank_comes_before_those_that_trip_over_it(tmp_path: Path, number: signal.Signals) -> None:
    """Its death is noticed a moment after the others' errors, and is still their cause."""
    run = run_of(
        tmp_path,
        failures={0: failed("RuntimeError", at=5.0)},
        exit_codes={1: -number, 2: -signal.SIGTERM},
        gone_at={1: 5.2},
    )
    assert first_failure(run) == 1
    assert f"rank 1 was killed by {number.name}" in describe_failure(run).splitlines()[-1]


def test_aborted_rank_is_judged_by_its_time(tmp_path: Path) -> None:
    """torch's watchdog aborts healthy ranks some time after one has failed."""
    run = run_of(
        tmp_path, failures={0: failed("ValueError", at=5.0)}, exit_codes={1: -signal.SIGABRT}, gone_at={1: 5.3}
    )
    assert first_failure(run) == 0
    assert "rank 1: was killed by SIGABRT" in describe_failure(run)


def test_rank_that_the_launcher_killed_is_not_the_cause(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        failures={0: failed("ValueError", at=5.0)},
        exit_codes={1: -signal.SIGKILL},
        killed=frozenset({1}),
    )
    assert first_failure(run) == 0
    assert "rank 1: did not end by itself and was killed" in describe_failure(run)


def test_ranks_terminated_from_outside_are_the_cause(tmp_path: Path) -> None:
    """A scheduler that ends all ranks leaves nobody else to blame."""
    run = run_of(tmp_path, exit_codes=dict.fromkeys(range(3), -signal.SIGTERM), gone_at={0: 5.1, 1: 5.0, 2: 5.1})
    assert first_failure(run) == 1
    assert describe_failure(run).endswith("rank 1 was killed by SIGTERM")


def test_torchruns_own_error_is_shown_with_its_log(tmp_path: Path) -> None:
    """No rank ever started: the other machines did not come, say."""
    (tmp_path / "launcher.log").write_text("waiting\nRendezvousTimeoutError\n", encoding="utf-8")
    text = describe_failure(run_of(tmp_path, error="RendezvousTimeoutError: nobody came"))
    assert "RendezvousTimeoutError: nobody came" in text.splitlines()[0]
    assert "    RendezvousTimeoutError" in text


def test_exit_after_a_finished_script_is_told_apart(tmp_path: Path) -> None:
    """A crash while the interpreter shuts down is no error of the script."""
    statuses = {0: RankStatus(rank=0, pid=0, exit_code=0)}
    run = RunFailure(
        log_dir=tmp_path,
        seconds=1.0,
        statuses=statuses,
        exit_codes={0: -signal.SIGSEGV},
        gone_at={},
        killed=frozenset(),
    )
    assert describe_failure(run).endswith("rank 0 was killed by SIGSEGV after its script had ended")
