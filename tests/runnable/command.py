"""The command line as a user has it: a process of its own, in a folder of its own.

A process that imports torch costs seconds of it. Where a process of its own is not the point, `hybrid_here` runs the
command line in this one, and `run_script` runs a script in processes that are forked with
torch loaded (tests/ranks.py).
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

from tests.ranks import run_plain, run_ranks

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


def hybrid_here(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `hybrid ARGUMENTS...` in this process: for what is refused, or told, before any process is started."""
    from hybrid.cli.app import main  # here, as forked processes import this file, too, and need no command line

    stdout, stderr = io.StringIO(), io.StringIO()
    code: str | int | None = 0
    with (
        contextlib.chdir(cwd),
        mock.patch.object(sys, "argv", ["hybrid", *arguments]),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as left:
            code = left.code
    if isinstance(code, str):
        stderr.write(f"{code}\n")
        code = 1
    return subprocess.CompletedProcess(arguments, code or 0, stdout.getvalue(), stderr.getvalue())


def run_script(
    path: Path, *arguments: str, cwd: Path, num_ranks: int = 1, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python PATH ARGUMENTS...` alone or in a world that has been started; what the first rank printed.

    `variables` are added to the environment. Raises RankFailure where the script fails.
    """
    work = (run_as_main, path, arguments, cwd, variables or {})
    if num_ranks == 1:
        stdout, stderr = run_plain(*work, timeout_seconds=120)
    else:
        stdout, stderr = run_ranks(work[0], num_ranks, *work[1:], timeout_seconds=120)[0]
    return subprocess.CompletedProcess((path, *arguments), 0, stdout, stderr)


def run_as_main(path: Path, arguments: tuple[str, ...], cwd: Path, variables: Mapping[str, str]) -> tuple[str, str]:
    """In a forked process, once: run the script; what it printed to stdout and stderr."""
    os.chdir(cwd)
    os.environ.update(variables)
    sys.argv, sys.path[:0] = [str(path), *arguments], [str(path.parent)]
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        runpy.run_path(str(path), run_name="__main__")
    return stdout.getvalue(), stderr.getvalue()
