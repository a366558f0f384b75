"""`hybrid demo --layout 3d`: it prints what was planned and what one process gets; what cannot be is refused."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from hybrid.cli import demo as demo_command
from hybrid.launch.job import LaunchJob
from hybrid.launch.run import RunOutcome
from hybrid.launch.variables import LOG_DIR_VARIABLE, RESUME_VARIABLE, STRATEGY_VARIABLE
from tests.ranks import run_ranks
from tests.runnable.command import hybrid_here


def train(arguments: tuple[str, ...], variables: dict[str, str]) -> None:
    """`hybrid.demo.train` on one rank of a world that has been started, with a small model and little to evaluate."""
    from hybrid.demo import corpus, gpt, layout
    from hybrid.demo import train as script

    small = functools.partial(gpt.GPT, width=32, num_layers=3)
    os.environ.update(variables)
    sys.argv = ["train", *arguments]
    layout.GPT = script.GPT = small  # type: ignore[misc,assignment]
    script.NUM_HELD_OUT_WINDOWS = 8
    folder = Path(sysconfig.get_path("stdlib"), "asyncio")
    script.read_corpus = functools.partial(corpus.read_corpus, folder)  # type: ignore[attr-defined]
    script.main()


def in_forked_ranks(job: LaunchJob, *, on_poll: Callable[[Path], None]) -> RunOutcome:
    """As `run_job`, in ranks that have torch loaded: eight new processes would take half a minute to import it."""
    log_dir = job.new_log_dir("run")
    variables = {LOG_DIR_VARIABLE: str(log_dir), STRATEGY_VARIABLE: str(job.strategy)}
    if job.resume is not None:
        variables[RESUME_VARIABLE] = str(job.resume.resolve())
    run_ranks(train, job.num_processes, job.arguments, variables, timeout_seconds=120)
    on_poll(log_dir)
    return RunOutcome(exit_code=0, message="", log_dir=log_dir)


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def show(*options: str) -> str:
        monkeypatch.setenv("COLUMNS", "160")
        with mock.patch.object(demo_command, "run_job", in_forked_ranks):
            done = hybrid_here("demo", "--layout", "3d", *options, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return show


def counted_of_predicted(text: str) -> list[tuple[str, str]]:
    """(axis, per cent) of each row of the table of bytes."""
    return re.findall(r"│ (tp|pp|dp) +│ [^│]+ │ +[\d.]+ [KM]iB │ +[\d.]+ [KM]iB │ +([\d.]+)% │", text)


def test_demo_in_3d(shown: Callable[..., str]) -> None:
    """Ranks, stages, bytes, bubble and losses, all of one run."""
    text = shown("--steps", "3")
    assert "8 ranks, pp 2 × dp_shard 2 × tp 2, ZeRO stage 2, 3 steps" in text
    rows = re.findall(r"^ +(\d) +(\d) +(\d) +(\d) *$", text, flags=re.MULTILINE)
    assert rows == [("0", "0", "0", "1"), ("0", "1", "2", "3"), ("1", "0", "4", "5"), ("1", "1", "6", "7")]
    assert re.search(r"^0 +embedding … blocks\.", text, flags=re.MULTILINE)
    assert "Pipeline of 2 stages, schedule zb-h1, 4 micro-batches" in text
    assert counted_of_predicted(text) == [("tp", "100.00"), ("pp", "100.00"), ("pp", "100.00"), ("dp", "100.00")]
    bubble = re.search(r"([\d.]+)% in theory, .*; ([\d.]+)% by the timer, .*; measured ([\d.]+)% of", text)
    assert bubble is not None
    theory, timed, measured = map(float, bubble.groups())
    assert theory == 7.7  # (p-1)/(3m+p-1), 2 stages, 4 micro-batches
    assert 0 < timed < 60
    assert 0 < measured < 100
    beside = re.search(r"loss ([\d.]+) at step 3, here ([\d.]+); largest difference in 3 steps (\d[\d.e+-]+\d)\.", text)
    assert beside is not None
    assert float(beside[3]) < 2e-6
    ratios = dict(re.findall(r"│ ([a-z][^│]*?) +│[^│]*│[^│]*│ +(\d+)% │", text))
    # Two stages of two tensor-parallel ranks, the rest cut over two: parameters a bit more than a quarter, since the
    # embedding is on both stages and norms are whole on every rank.
    assert 25 < int(ratios["parameters"]) < 45
    assert 12 < int(ratios["optimizer state (AdamW)"]) < 23
    assert set(ratios) >= {"gradients", "together", "activations at their peak", "sent per step"}
    assert "docs/3d.md" in text


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        ("--stage", "0"),
        ("--stage", "1", "--batch", "16"),
        ("--stage", "3"),
        ("--amp", "bf16", "--recompute"),
        ("--amp", "fp16"),
        ("--nproc", "12"),
        ("--nproc", "16", "--shard-size", "2"),
    ],
    ids=" ".join,
)
def test_demo_in_3d_with_other_options(shown: Callable[..., str], options: tuple[str, ...]) -> None:
    """Every option of the demo goes with the layout."""
    text = shown("--steps", "2", *options)
    apart = re.search(r"largest difference in 2 steps (\d[\d.e+-]+\d)\.", text)
    assert (apart is None) == ("fp16" in options)  # whose first steps are left out, until the loss scale fits
    if apart is not None:
        assert float(apart[1]) < (5e-2 if "--amp" in options else 2e-6)
    ratios = counted_of_predicted(text)
    known = ["pp", "pp", "dp"] if "--recompute" in options else ["tp", "pp", "pp", "dp"]  # sums again some, not all
    assert [axis for axis, _ in ratios] == known
    # Norms stay in float32 under amp, which the planner does not count apart; fp16 has left out its steps so far.
    off = {"dp"} if "--amp" in options else set()
    assert {ratio for axis, ratio in ratios if axis not in off} == {"100.00"}
    assert "fp16" in options or all(float(ratio) == pytest.approx(100, abs=1) for _, ratio in ratios)


@pytest.mark.full
def test_a_resumed_run_is_not_compared(shown: Callable[..., str]) -> None:
    """It has no first step."""
    first = shown("--steps", "1", "--resume", "saved")
    assert "largest difference in 1 steps" in first
    later = shown("--steps", "2", "--resume", "saved")
    assert "on from step 1" in later
    assert "One process" not in later


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["--nproc", "4"], r"--nproc is 4, .* multiple of 4 ranks, 8 or more; try 8$", id="few"),
        pytest.param(["--nproc", "10"], "--nproc is 10, .*; try 8 or 12$", id="odd"),
        pytest.param(["--batch", "12"], "2 data-parallel ranks of 4 micro-batches each; try 16$", id="batch"),
        pytest.param(["--strategy", "one.yaml"], "--strategy another; leave one of them out", id="strategy"),
        pytest.param(["--shard-size", "4"], "shard_size", id="shard-size"),
    ],
)
def test_what_3d_refuses(tmp_path: Path, arguments: list[str], expected: str) -> None:
    """Before anything starts, with sizes that work."""
    done = hybrid_here("demo", "--layout", "3d", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(expected, done.stderr, flags=re.MULTILINE)


def test_other_layouts_are_named(tmp_path: Path) -> None:
    done = hybrid_here("demo", "--layout", "4d", cwd=tmp_path)
    assert done.returncode == 2
    assert "expected auto or 3d" in done.stderr
    done = hybrid_here("demo", "--layout", "auto", "--stage", "0", cwd=tmp_path)
    assert "--layout auto chooses what --stage would say" in done.stderr
