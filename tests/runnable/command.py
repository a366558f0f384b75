"""The command line as a user has it: a process of its own, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "from hybrid.cli.app import main; main()"]


def environment() -> dict[str, str]:
    """Without what another launcher may have left, and with this checkout's package first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HYBRID_", "TORCHELASTIC_"))}
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def hybrid(*arguments: str, cwd: Path, timeout_seconds: float = 90) -> subprocess.CompletedProcess[str]:
    """Run `hybrid ARGUMENTS...` to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


def start_hybrid(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Start `hybrid ARGUMENTS...` as the leader of a process group, as a shell does."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
