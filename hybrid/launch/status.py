"""What one rank has written about itself: that it started, and how it ended.

One small JSON file per rank in the run's log folder, `status/rank<N>.json`, written by the worker and read
by the launcher. A rank that was killed by a signal leaves the file of its start behind; that is how one can
tell.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

__all__ = ["Failure", "RankStatus", "failure_now", "log_path", "read_statuses", "stacks_path"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The exception that ended a rank."""

    time_seconds: float  # since the epoch
    kind: str  # qualified name of the exception's class
    message: str
    traceback: str
    stderr_bytes: int  # length of the rank's stderr log before it printed the traceback itself


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank; `exit_code` is None from its start until its script has ended."""

    rank: int
    pid: int
    exit_code: int | None = None
    ended_at: float | None = None  # seconds since the epoch, with the exit code
    failure: Failure | None = None

    def ended(self, exit_code: int, failure: Failure | None = None) -> RankStatus:
        return replace(self, exit_code=exit_code, ended_at=time.time(), failure=failure)

    def write(self, log_dir: Path) -> None:
        """Whole or not at all: the launcher may read at any moment."""
        target = _status_path(log_dir, self.rank)
        aside = target.with_suffix(".new")
        aside.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(aside, target)


def read_statuses(log_dir: Path) -> dict[int, RankStatus]:
    """Rank -> status, of the ranks of this node that have started so far."""
    statuses = {}
    for path in sorted((log_dir / "status").glob("rank*.json")):
        fields = json.loads(path.read_text(encoding="utf-8"))
        failure = fields.pop("failure")
        status = RankStatus(**fields, failure=None if failure is None else Failure(**failure))
        statuses[status.rank] = status
    return dict(sorted(statuses.items()))


def failure_now(*, kind: str, message: str, traceback: str, stderr_bytes: int) -> Failure:
    """A failure with the time of this moment."""
    return Failure(time_seconds=time.time(), kind=kind, message=message, traceback=traceback, stderr_bytes=stderr_bytes)


def log_path(log_dir: Path, rank: int, stream: str) -> Path:
    """The log of one rank; `stream` is stdout or stderr."""
    return log_dir / f"rank{rank}.{stream}"


def stacks_path(log_dir: Path, rank: int) -> Path:
    """Where a rank that is told to end while it runs leaves the stacks of its threads."""
    return log_dir / "status" / f"rank{rank}.stacks"


def _status_path(log_dir: Path, rank: int) -> Path:
    return log_dir / "status" / f"rank{rank}.json"
