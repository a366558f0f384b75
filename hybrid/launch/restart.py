"""Starts a job again after a failure: a whole new set of processes, from the newest complete checkpoint.

No process of the failed attempt goes on. A communicator that has lost a peer cannot be trusted to recover (on
gloo it was seen to in one try of four), and what a rank has in memory is of no use when another rank's part is
gone; a checkpoint is the one state that all ranks agree on.

Where checkpoints are and which of them is complete is known to the floors above, so it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hybrid.launch.job import LaunchJob
from hybrid.launch.run import RunOutcome, StopRequests, ranks_still_running, run_attempt
from hybrid.launch.summary import error_of

__all__ = ["FailedAttempt", "GiveUp", "Restart", "decide", "run_with_restarts"]

MAX_PAUSE_SECONDS = 30.0
# This many attempts in a row with one error and no new checkpoint: what fails so again is the script.
MAX_EQUAL_FAILURES = 3
LEAVE_SECONDS = 30.0
POLL_SECONDS = 0.05

FewerRanks = Callable[[int], tuple[int | None, list[str]]]
"""Largest number of ranks up to the given one that the strategy allows, and why it allows no larger one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """What is kept of an attempt that failed."""

    num_processes: int
    error: str  # equal for failures of the same kind at the same place
    lost: frozenset[int]  # ranks that were killed by a signal
    newest: str | None  # the newest complete checkpoint after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The job starts again."""

    num_processes: int
    pause_seconds: float
    notes: tuple[str, ...] = ()  # why the number of ranks is what it is


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The job does not start again."""

    reason: str


def decide(history: Sequence[FailedAttempt], *, max_restarts: int, fewer: FewerRanks | None) -> Restart | GiveUp:
    """What follows the last failure of `history`.

    Fewer ranks (if `fewer` is given) when ranks were killed in two attempts in a row and either the same one was
    among them or no checkpoint was completed in between: the first loss may be an accident, such a second one
    says that the machine cannot carry all of them.
    """
    last = history[-1]
    if len(history) > max_restarts:
        return GiveUp(reason=f"{_all(max_restarts)} used")
    equal = _num_at_end(history, lambda one: (one.error, one.newest, one.num_processes))
    if equal >= MAX_EQUAL_FAILURES:
        return GiveUp(
            reason=f"{equal} attempts in a row failed with the same error ({last.error}) and completed no new "
            f"checkpoint, so a further one would fail as well; {max_restarts - len(history) + 1} of {max_restarts} "
            "restarts are left unused"
        )
    fruitless = _num_at_end(history, lambda one: one.newest) - 1
    pause = min(MAX_PAUSE_SECONDS, 2.0**fruitless)
    if fewer is None or not _lost_again(history):
        return Restart(num_processes=last.num_processes, pause_seconds=pause)
    count, reasons = fewer(last.num_processes - len(last.lost))
    ranks = f"rank{'s' if len(last.lost) > 1 else ''} {', '.join(map(str, sorted(last.lost)))}"
    why = f"{ranks} of {last.num_processes} killed, and ranks in the attempt before as well"
    refused = tuple(f"not on {reason}" for reason in reasons)
    if count is None:
        return Restart(
            num_processes=last.num_processes,
            pause_seconds=pause,
            notes=(f"{why}; no smaller number is allowed, so it stays at {last.num_processes}", *refused),
        )
    return Restart(num_processes=count, pause_seconds=pause, notes=(f"{why}; fewer ranks now", *refused))


def _all(max_restarts: int) -> str:
    return "the one restart is" if max_restarts == 1 else f"all {max_restarts} restarts are"


def _num_at_end(history: Sequence[FailedAttempt], key: Callable[[FailedAttempt], object]) -> int:
    """How many attempts at the end of the history have the same key."""
    count = 0
    for attempt in reversed(history):
        if key(attempt) != key(history[-1]):
            break
        count += 1
    return count


def _lost_again(history: Sequence[FailedAttempt]) -> bool:
    if len(history) < 2:
        return False
    before, last = history[-2:]
    if not before.lost or not last.lost or before.num_processes != last.num_processes:
        return False
    return before.newest == last.newest or bool(before.lost & last.lost)


def run_with_restarts(
    job: LaunchJob, *, newest_checkpoint: Callable[[], str | None], say: Callable[[str], None]
) -> RunOutcome:
    """Run the job until it ends well, is told to end, or restarts are used up or pointless.

    newest_checkpoint: the name of the newest complete checkpoint at this moment.
    say: shows what happens between attempts.

    Each attempt has a log folder of its own, `attempt_<number>`. Raises LaunchError or StrategyError before any
    process exists.
    """
    job.check()
    log_dir = job.new_log_dir(time.strftime("%Y%m%d-%H%M%S"))
    fewer = job.fewer_processes if job.min_processes is not None else None
    history: list[FailedAttempt] = []
    with StopRequests() as stop:
        while True:
            attempt_dir = log_dir / f"attempt_{len(history) + 1}"
            attempt_dir.mkdir()
            outcome = run_attempt(job, attempt_dir, stop)
            if outcome.failure is None:
                if outcome.exit_code == 0 and history:
                    say(f"ended well after {_restarts(len(history))}; logs: {log_dir}")
                return outcome
            say(outcome.message)
            newest = newest_checkpoint()
            history.append(
                FailedAttempt(
                    num_processes=job.num_processes,
                    error=error_of(outcome.failure),
                    lost=outcome.failure.lost,
                    newest=newest,
                )
            )
            next_step = decide(history, max_restarts=job.max_restarts, fewer=fewer)
            if isinstance(next_step, Restart):
                # Ranks of two attempts must never write side by side.
                staying = _wait_for_ranks(outcome, stop)
                if staying and not stop.received:
                    next_step = GiveUp(reason=f"{staying} of the failed attempt cannot be ended")
            if isinstance(next_step, GiveUp):
                return replace(outcome, message=f"not restarted: {next_step.reason}")
            for note in next_step.notes:
                say(note)
            job = replace(job, num_processes=next_step.num_processes)
            start = newest or f"the beginning (no complete checkpoint in {job.resume_directory})"
            ranks = f"{job.num_processes} rank{'s' if job.num_processes > 1 else ''}"
            say(f"restart {len(history)} of {job.max_restarts} from {start} on {ranks}")
            _pause(next_step.pause_seconds, stop)
            if stop.received:
                message = f"stopped by {stop.cause} before restart {len(history)}; no rank is running; logs: {log_dir}"
                return RunOutcome(exit_code=stop.exit_code, message=message, log_dir=log_dir)


def _restarts(count: int) -> str:
    return f"{count} restart{'s' if count > 1 else ''}"


def _pause(seconds: float, stop: StopRequests) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not stop.received:
        time.sleep(POLL_SECONDS)


def _wait_for_ranks(outcome: RunOutcome, stop: StopRequests) -> str:
    """Wait until no rank of the attempt is there; returns those that stay."""
    assert outcome.failure is not None
    until = time.monotonic() + LEAVE_SECONDS
    while running := ranks_still_running(outcome.failure):
        if time.monotonic() > until or stop.received:
            return ", ".join(f"rank {rank} (pid {pid})" for rank, pid in running.items())
        time.sleep(POLL_SECONDS)
    return ""
