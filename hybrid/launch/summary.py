"""Why a run failed: which rank was first, what the others did then, the first one's traceback last.

Four kinds of rank are told apart. A rank that failed by itself has recorded its exception, or was killed
by a signal that nobody here sent, or left with an exit code of its own. A rank that followed raised
CollectiveError because another was gone or did not come. A rank that left early had ended well while others
still waited for it. A rank that was ended was still running when the run was given up.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid.launch.status import Failure, RankStatus, log_path, stacks_path

__all__ = ["RunFailure", "describe_failure", "error_of", "first_failure"]

COLLECTIVE_ERROR = "hybrid.errors.CollectiveError"
CONNECTION_CLOSED = "a rank is gone"  # in the message of a CollectiveError: the peer has closed its connections
CLOSING_SECONDS = 1.0  # from there (`hybrid.shutdown()`, say) to the end of the peer's script
MAX_RANKS = 8
MAX_LINE = 200
MAX_LOG_LINES = 15

# Signals that a rank gets by its own fault or from the kernel. torch's watchdog aborts (SIGABRT) and torchrun
# terminates (SIGTERM) ranks as a consequence of another rank's failure, so those count by their time only.
_FAULTS = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}

# Files whose frames are not the user's.
_LIBRARIES = re.compile(rf"/site-packages/|/lib/python3|<frozen|{re.escape(str(Path(__file__).parents[1]))}/")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailure:
    """How the ranks of this node were found after a run that failed."""

    log_dir: Path
    seconds: float
    statuses: Mapping[int, RankStatus]
    exit_codes: Mapping[int, int]  # of failed ranks, as torchrun saw them; negative: a signal
    gone_at: Mapping[int, float]  # seconds since the epoch, of ranks that vanished without a word
    killed: frozenset[int]  # ranks that this launcher killed because they did not end
    error: str | None = None  # torchrun's own error, if no rank was to blame

    @property
    def ranks(self) -> list[int]:
        return sorted({*self.statuses, *self.exit_codes})

    def failure(self, rank: int) -> Failure | None:
        status = self.statuses.get(rank)
        return None if status is None else status.failure

    def exit_code(self, rank: int) -> int | None:
        """torchrun's word first: a rank may still crash after its script has ended."""
        status = self.statuses.get(rank)
        return self.exit_codes.get(rank, None if status is None else status.exit_code)

    def was_ended(self, rank: int) -> bool:
        """Whether the rank was still running when torchrun or this launcher ended it."""
        others = [other for other in self.ranks if other != rank and self.exit_code(other) not in (None, 0)]
        terminated = self.exit_code(rank) == -signal.SIGTERM and any(
            self.exit_code(other) != -signal.SIGTERM for other in others
        )
        return self.failure(rank) is None and (rank in self.killed or terminated)

    def followed(self, rank: int) -> bool:
        """Whether the rank only reports that another one did not come to a collective."""
        failure = self.failure(rank)
        return failure is not None and failure.kind == COLLECTIVE_ERROR

    @property
    def lost(self) -> frozenset[int]:
        """Ranks that were killed by a signal which nobody here sent: their own fault, or the machine's."""
        return frozenset(
            rank for rank, exit_code in self.exit_codes.items() if -exit_code in _FAULTS and not self.was_ended(rank)
        )

    def left_early(self, rank: int, *, follower: int) -> bool:
        """Whether the rank's script had ended well when `follower` missed a rank."""
        status, failure = self.statuses.get(rank), self.failure(follower)
        if status is None or status.exit_code != 0 or status.ended_at is None or failure is None:
            return False
        if self.exit_code(rank) not in (None, 0) and not self.was_ended(rank):
            return False  # a crash after the script: a cause of its own
        # A connection may be closed before the script ends. Where it was not, a script that ends right after
        # the failure has been told to: it may handle SIGTERM and exit with 0.
        lateness = CLOSING_SECONDS if CONNECTION_CLOSED in failure.message else 0.0
        return status.ended_at <= failure.time_seconds + lateness


def first_failure(run: RunFailure) -> int | None:
    """The rank that failed first by itself; else the first that missed others; None if no rank failed."""
    failed = [rank for rank in run.ranks if run.exit_code(rank) not in (None, 0) and not run.was_ended(rank)]
    return min(failed, key=lambda rank: (run.followed(rank), _time_of(run, rank)), default=None)


def _time_of(run: RunFailure, rank: int) -> float:
    failure = run.failure(rank)
    if failure is not None:
        return failure.time_seconds
    exit_code = run.exit_code(rank)
    # A kill is noticed some tenths of a second late, while the ranks that miss the killed one may raise at
    # once.
    lateness = 1.0 if exit_code is not None and -exit_code in _FAULTS else 0.0
    return run.gone_at.get(rank, float("inf")) - lateness


def error_of(run: RunFailure) -> str:
    """What the first failure was, in a few words: two runs with equal words failed in the same way.

    The exception's message is left out, and so is the rank: steps, times and addresses differ from run to run.
    """
    first = first_failure(run)
    if first is None:
        return (run.error or "torchrun's own failure").split(":")[0]
    failure = run.failure(first)
    if failure is not None:
        kind = failure.kind.rsplit(".", 1)[-1]
        frames = re.findall(r'^[ |]*File "(.+)", line (\d+)', failure.traceback, flags=re.MULTILINE)
        users = [frame for frame in frames if not _LIBRARIES.search(frame[0])] or frames
        return f"{kind} at {users[-1][0]}:{users[-1][1]}" if users else kind
    exit_code = run.exit_code(first)
    if exit_code is not None and exit_code < 0:
        return f"a rank killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def describe_failure(run: RunFailure) -> str:
    """The text for the terminal, the first failing rank's own words last."""
    first = first_failure(run)
    if first is None:
        reason = run.error or "no rank has failed, yet torchrun has"
        return "\n".join(
            [
                f"failed after {run.seconds:.1f} s: {reason}",
                *_last_lines(run.log_dir / "launcher.log"),
                f"logs: {run.log_dir}",
            ]
        )
    early = [rank for rank in run.ranks if run.followed(first) and run.left_early(rank, follower=first)]
    others = [rank for rank in run.ranks if rank != first and rank not in early]
    lines = [f"failed after {run.seconds:.1f} s"]
    lines += [f"  rank {rank}: {text}" for rank in others if (text := _word(run, rank))]
    lines += [f"  logs: {run.log_dir}"]
    failure = run.failure(first)
    if failure is None:
        lines += _last_lines(log_path(run.log_dir, first, "stderr"))
        lines += [f"rank {first} {_end_of(run.exit_code(first), run.statuses.get(first))}"]
    else:
        verb = "was the first to miss another rank" if run.followed(first) else "failed first"
        # As Python does it: who leaves with a sentence has said what there is to say.
        is_said = failure.kind == "SystemExit" and not failure.message.lstrip("-").isdigit()
        said = f"SystemExit: {failure.message}" if is_said else failure.traceback.rstrip()
        lines += [f"rank {first} {verb}:", "", said]
    if early:
        lines += ["", _early_words(early)]
    return "\n".join(lines)


def _early_words(early: Sequence[int]) -> str:
    shown = ", ".join(map(str, early[:MAX_RANKS])) + (", ..." if len(early) > MAX_RANKS else "")
    return (
        f"rank{'s' if len(early) > 1 else ''} {shown} had already ended with exit code 0: the script left the loop "
        "early there; compare the number of batches on each rank"
    )


def _word(run: RunFailure, rank: int) -> str | None:
    """One line about a rank that was not the first; None if it ended well."""
    failure = run.failure(rank)
    if failure is not None:
        message = failure.message.strip().split("\n")[0]
        return _shortened(f"{failure.kind.rsplit('.', 1)[-1]}: {message}")
    if run.was_ended(rank):
        manner = "did not end by itself and was killed" if rank in run.killed else "was ended"
        return f"{manner}{_place(stacks_path(run.log_dir, rank))}"
    exit_code = run.exit_code(rank)
    return None if exit_code in (None, 0) else _end_of(exit_code, run.statuses.get(rank))


def _end_of(exit_code: int | None, status: RankStatus | None) -> str:
    """How a rank without a recorded exception ended."""
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = ", which this launcher did not send; the kernel does when memory is full"
        text = f"was killed by {name}{hint if name == 'SIGKILL' else ''}"
    else:
        text = f"ended with exit code {exit_code} and no exception"
    if status is None:
        text += " before its script began; see launcher.log"
    elif status.exit_code == 0:
        text += " after its script had ended"
    return text


def _place(stacks: Path) -> str:
    """Where a rank was when it was told to end: the innermost line of the user's, if the stack shows one."""
    text = stacks.read_text(encoding="utf-8") if stacks.exists() else ""
    own = text.rsplit("Current thread", 1)[-1] if "Current thread" in text else ""
    frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', own, flags=re.MULTILINE)
    users = [frame for frame in frames if not _LIBRARIES.search(frame[0])]
    if not frames:
        return ""
    file, line, function = (users or frames)[0]
    return f" at {file}:{line} in {function}; the stacks of all its threads: {stacks}"


def _last_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = text.splitlines()[-MAX_LOG_LINES:]
    return [f"  the end of {path.name}:", *(f"    {_shortened(line)}" for line in lines)] if lines else []


def _shortened(line: str) -> str:
    return line if len(line) <= MAX_LINE else line[: MAX_LINE - 3] + "..."
