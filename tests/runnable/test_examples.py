"""Every example is short and runs as its first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runnable.command import ROOT, environment, hybrid

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 80


def name_of(path: Path) -> str:
    return path.stem


def last_loss(output: str) -> float:
    return float(re.findall(r"loss ([\d.]+)", output)[-1])


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_example_is_short_and_says_how_to_run_it(path: Path) -> None:
    """An example longer than a screen or two is read by nobody."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES
    head = "\n".join(lines[:10])
    for command in (f"python examples/{path.name}", f"hybrid run --nproc 4 examples/{path.name}", "torchrun"):
        assert command in head


@pytest.mark.slow
def test_example_of_a_run_that_can_be_stopped(tmp_path: Path) -> None:
    """The first start and a later one, on more ranks, by the same command."""
    script = str(ROOT / "examples" / "resume.py")
    for num_ranks, steps, begin in ((1, 10, 0), (2, 20, 10)):
        command = ("run", "--nproc", str(num_ranks), "--resume", "saved", script, "--steps", str(steps))
        done = hybrid(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"from step {begin}\n" in done.stdout
        assert f"step {steps}: loss" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_example_runs_alone_under_hybrid_run_and_under_torchrun(path: Path, tmp_path: Path) -> None:
    """One script for one process, our launcher and plain torchrun."""
    arguments = ["--steps", "12"]
    alone = subprocess.run(
        [sys.executable, str(path), *arguments],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (alone.returncode, alone.stderr) == (0, "")
    assert last_loss(alone.stdout) < 4.5  # 5.5 is chance

    launched = hybrid("run", "--nproc", "2", str(path), *arguments, cwd=tmp_path)
    assert (launched.returncode, launched.stderr) == (0, "")
    assert last_loss(launched.stdout) < 4.5

    torchrun = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path), *arguments],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert torchrun.returncode == 0, torchrun.stderr
    assert torchrun.stdout == launched.stdout
