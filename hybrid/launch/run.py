"""`hybrid run`: start torchrun, show rank 0, end everything when one rank fails or the user says so.

    this process ── torchrun (launch/agent.py) ──┬─ rank 0 (launch/worker.py) ── the script
                                                 └─ rank 1 ...

torchrun has a process group of its own, so Ctrl-C reaches this process alone, which passes it on once; the
ranks end within GRACE_SECONDS or are killed. If this process is killed, the kernel ends torchrun and the
ranks.
"""

from __future__ import annotations

import codecs
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from hybrid.launch.job import GRACE_SECONDS, LaunchJob
from hybrid.launch.status import RankStatus, log_path, read_statuses
from hybrid.launch.summary import RunFailure, describe_failure, first_failure

__all__ = ["RunOutcome", "StopRequests", "ranks_still_running", "run_attempt", "run_job"]

POLL_SECONDS = 0.05
# Reading the status files of all ranks is dearer than a poll, and nobody waits for it.
STATUS_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended."""

    exit_code: int  # 0, the first failing rank's, or 128 + signal
    message: str  # why, for the terminal; empty if it ended well
    log_dir: Path
    failure: RunFailure | None = None  # None: it ended well, or was told to end


def run_job(job: LaunchJob, *, on_poll: Callable[[Path], None] | None = None) -> RunOutcome:
    """Run the job to its end.

    on_poll: called many times a second with the run's log folder while ranks are running.

    Raises LaunchError or StrategyError before any process exists.
    """
    job.check()
    log_dir = job.new_log_dir(time.strftime("%Y%m%d-%H%M%S"))
    with StopRequests() as stop:
        return run_attempt(job, log_dir, stop, on_poll=on_poll)


def run_attempt(
    job: LaunchJob, log_dir: Path, stop: StopRequests, *, on_poll: Callable[[Path], None] | None = None
) -> RunOutcome:
    """Run a checked job once, with a new set of processes and an empty log folder."""
    (log_dir / "status").mkdir()
    job.script_command.write(log_dir)
    started = time.monotonic()
    with (log_dir / "launcher.log").open("wb") as launcher_log:
        agent = _start(job, log_dir, launcher_log)
    ranks = _Ranks(agent=agent, log_dir=log_dir)
    tails = _tails(log_dir) if job.show_output else []
    is_over = False
    try:
        while not is_over:
            is_over = agent.poll() is not None  # what was written before the end is still shown
            stop.pass_on(agent)
            ranks.look(stop_requested=bool(stop.received))
            for tail in tails:
                tail.pump()
            if on_poll is not None:
                on_poll(log_dir)
            if not is_over:
                time.sleep(POLL_SECONDS)
    finally:
        if not is_over:  # an error here (a closed terminal, say) must not leave ranks behind
            _kill_below(agent.pid)
            agent.kill()
            agent.wait()
    return _conclude(job, ranks, stop, seconds=time.monotonic() - started)


def _start(job: LaunchJob, log_dir: Path, launcher_log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hybrid.launch.agent", *job.torchrun_arguments()]
    return subprocess.Popen(
        command,
        env=job.worker_environment(log_dir),
        stdin=subprocess.DEVNULL,  # a rank that reads the terminal would stop the whole job
        stdout=launcher_log,
        stderr=subprocess.STDOUT,
        process_group=0,
    )


class StopRequests:
    """Ctrl-C, a scheduler's SIGTERM, a closed terminal: noted, and passed on to torchrun once."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._num_passed_on = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequests:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))

    @property
    def cause(self) -> str:
        """What was received first, for people."""
        return "Ctrl-C" if self.received[0] == signal.SIGINT else self.received[0].name

    @property
    def exit_code(self) -> int:
        return 128 + self.received[0]

    def pass_on(self, agent: subprocess.Popen[bytes]) -> None:
        """The first request lets the ranks end in order; a second one ends them now."""
        if len(self.received) == self._num_passed_on:
            return
        if self._num_passed_on == 0:
            first = self.received[0]
            agent.send_signal(signal.SIGINT if first == signal.SIGINT else signal.SIGTERM)
        else:
            _kill_below(agent.pid)
            agent.kill()
        self._num_passed_on = len(self.received)


class _Ranks:
    """The ranks of this node, seen from outside."""

    def __init__(self, *, agent: subprocess.Popen[bytes], log_dir: Path) -> None:
        self.agent = agent
        self.log_dir = log_dir
        self.statuses: dict[int, RankStatus] = {}
        self.gone_at: dict[int, float] = {}
        self.killed: frozenset[int] = frozenset()
        self._next_look = 0.0
        self._ending_since: float | None = None  # when the first failure or request to stop was seen

    def look(self, *, stop_requested: bool = False) -> None:
        """Read what the ranks say; end those that stay when the run is over."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + STATUS_SECONDS
        self.statuses = read_statuses(self.log_dir)
        for rank, status in self.statuses.items():
            if status.exit_code is None and rank not in self.gone_at and not _is_running(status.pid):
                self.gone_at[rank] = time.time()
        failed = bool(self.gone_at) or any(status.exit_code for status in self.statuses.values())
        if self._ending_since is None and (failed or stop_requested):
            self._ending_since = now
        if self._ending_since is None:
            return
        if now - self._ending_since > GRACE_SECONDS:
            pids = _kill_below(self.agent.pid)
            stubborn = {rank for rank, status in self.statuses.items() if status.pid in pids}
            self.killed |= stubborn
        if now - self._ending_since > 3 * GRACE_SECONDS:
            self.agent.kill()  # all ranks are gone and torchrun still waits for something


def ranks_still_running(failure: RunFailure) -> dict[int, int]:
    """Rank -> pid of the ranks that are there although their run is over."""
    return {rank: status.pid for rank, status in failure.statuses.items() if _is_running(status.pid)}


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill_below(pid: int) -> set[int]:
    """Kill all descendants of a process of ours; returns their pids."""
    try:
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return set()
    for process in descendants:
        try:
            process.kill()  # psutil makes sure that the pid has not been given to another process
        except psutil.NoSuchProcess:
            continue
    return {process.pid for process in descendants}


class _Tail:
    """Shows a growing log file on this process's own stream."""

    def __init__(self, *, log_dir: Path, rank: int, stream: str, output: IO[str]) -> None:
        self._log_dir = log_dir
        self._rank = rank
        self._path = log_path(log_dir, rank, stream)
        self._is_stderr = stream == "stderr"
        self._output = output
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._file: IO[bytes] | None = None

    def pump(self) -> None:
        """Show what has come since the last call, except the traceback that the summary shows at the end."""
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open("rb")
        position = self._file.tell()
        text = self._file.read()
        if not text:
            return
        if self._is_stderr:
            # Read first, then look: the rank records its failure before it prints the traceback.
            status = read_statuses(self._log_dir).get(self._rank)
            if status is not None and status.failure is not None:
                text = text[: max(0, status.failure.stderr_bytes - position)]
        self._output.write(self._decoder.decode(text))
        self._output.flush()


def _tails(log_dir: Path) -> list[_Tail]:
    return [
        _Tail(log_dir=log_dir, rank=0, stream="stdout", output=sys.stdout),
        _Tail(log_dir=log_dir, rank=0, stream="stderr", output=sys.stderr),
    ]


def _conclude(job: LaunchJob, ranks: _Ranks, stop: StopRequests, *, seconds: float) -> RunOutcome:
    """How it ended, in words and as an exit code."""
    log_dir = ranks.log_dir
    for path in log_dir.glob("status/rank*.stacks"):
        if path.stat().st_size == 0:
            path.unlink()
    if stop.received:
        message = f"stopped by {stop.cause} after {seconds:.1f} s; all {job.num_processes} ranks have ended"
        return RunOutcome(exit_code=stop.exit_code, message=f"{message}; logs: {log_dir}", log_dir=log_dir)
    if ranks.agent.returncode == 0:
        return RunOutcome(exit_code=0, message="", log_dir=log_dir)
    outcome_path = log_dir / "status" / "outcome.json"
    outcome = json.loads(outcome_path.read_text(encoding="utf-8")) if outcome_path.exists() else {}
    failure = RunFailure(
        log_dir=log_dir,
        seconds=seconds,
        statuses=read_statuses(log_dir),
        exit_codes={int(rank): code for rank, code in outcome.get("exit_codes", {}).items()},
        gone_at=ranks.gone_at,
        killed=ranks.killed,
        error=outcome.get("error"),
    )
    first = first_failure(failure)
    exit_code = (None if first is None else failure.exit_code(first)) or 1
    return RunOutcome(
        exit_code=exit_code if exit_code > 0 else 128 - exit_code,
        message=describe_failure(failure),
        log_dir=log_dir,
        failure=failure,
    )
