"""`hybrid demo`, short: it trains, compares, refuses and tidies up."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Literal

import psutil
import pytest
import torch

from hybrid.demo.gpt import GPT
from hybrid.demo.train import MeasuredForward
from hybrid.recompute import install_recompute
from tests.runnable.command import hybrid, hybrid_here, start_hybrid

SAVED = ("demo", "--nproc", "2", "--steps", "6", "--batch", "4", "--save-every", "3", "--resume", "saved")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A run to its end, and the folder that it ran in."""
    folder = tmp_path_factory.mktemp("demo")
    return hybrid(*SAVED, cwd=folder), folder


@pytest.mark.slow
def test_demo_trains_and_shows_what_sharding_saves(whole: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """The first thing a new user runs. Not a terminal here, so plain lines."""
    done, _ = whole
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 ranks, ZeRO stage 2, 6 steps" in done.stdout
    losses = [float(loss) for loss in re.findall(r"^step \d/6: loss ([\d.]+)", done.stdout, flags=re.MULTILINE)]
    assert len(losses) == 6
    before, after = map(float, re.search(r"Held-out loss: ([\d.]+) .* before, ([\d.]+) after", done.stdout).groups())
    assert after < before - 0.3
    # The sizes that stage 2 promises on 2 ranks: parameters whole, the rest halved, traffic as plain data
    # parallel.
    ratios = dict(re.findall(r"│ ([a-z][^│]*?) +│[^│]*│[^│]*│ +(\d+)% │", done.stdout))
    assert ratios == {
        "parameters": "100",
        "gradients": "50",
        "optimizer state (AdamW)": "50",
        "together": "63",
        "activations of a forward": "100",
        "sent per step": "100",
    }
    assert "Next: README.md" in done.stdout


@pytest.mark.slow
def test_demo_goes_on_where_it_was_stopped(whole: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """`--resume DIR`: the same losses as without the stop, and a sentence where nothing is left to train."""
    first, folder = whole
    assert first.returncode == 0, first.stderr
    again = hybrid_here(*SAVED, cwd=folder)
    assert again.returncode == 2
    assert "nothing is left to train" in again.stderr
    shutil.rmtree(folder / "saved" / "step_00000006")  # as if it had been stopped after step 5
    rest = hybrid(*SAVED, cwd=folder)
    assert rest.returncode == 0, rest.stderr
    assert "6 steps, on from step 3" in rest.stdout
    losses, later = (
        re.findall(r"^step (\d)/6: loss ([\d.]+)", run.stdout, flags=re.MULTILINE) for run in (first, rest)
    )
    assert [step for step, _ in losses] == ["1", "2", "3", "4", "5", "6"]
    assert later == losses[3:]
    ends = [re.search(r" before, ([\d.]+) after", run.stdout) for run in (first, rest)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0][1] == ends[1][1]


@pytest.mark.slow
def test_demo_runs_the_layout_that_the_planner_chose(tmp_path: Path) -> None:
    """What is planned must start as it is: no setting of a plan may be refused by the strategy. Nothing is left."""
    folders_before = set(Path(tempfile.gettempdir()).glob("hybrid-demo-*"))
    done = hybrid(
        "demo", "--nproc", "2", "--steps", "2", "--batch", "4", "--layout", "auto", cwd=tmp_path, timeout_seconds=240
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"layout tp\d pp1 dp\dx\d .* ms a step expected", done.stdout)
    assert len(re.findall(r"^step \d/2: loss", done.stdout, flags=re.MULTILINE)) == 2
    assert set(Path(tempfile.gettempdir()).glob("hybrid-demo-*")) == folders_before
    assert list(tmp_path.iterdir()) == []
    both = hybrid_here("demo", "--layout", "auto", "--stage", "2", cwd=tmp_path)
    assert both.returncode == 2
    assert "--layout auto chooses what --stage would say" in both.stderr


def kept_by_a_forward(policy: Literal["full", "selective"] | None) -> tuple[int, int]:
    """Bytes as the demo measures them, and those of the storages that autograd itself saves, parameters apart."""
    torch.manual_seed(0)
    model = GPT(width=32, num_layers=3, num_heads=2, max_length=16)
    if policy is not None:
        install_recompute(model, [f"blocks.{index}" for index in range(3)], policy=policy, preserve_rng=True)
    older = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    text = torch.randint(256, (2, 17))
    micro_batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    older |= {tensor.untyped_storage().data_ptr() for tensor in micro_batch}
    saved: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in older:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    forward = MeasuredForward()
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        forward(model, micro_batch).backward()
    return forward.kept_bytes, sum(saved.values())


def test_activations_are_what_a_forward_keeps() -> None:
    """The row that shows what recompute saves: neither blind to what a policy keeps, nor counting anything else."""
    (plain, saved), (full, inputs), (selective, _) = map(kept_by_a_forward, (None, "full", "selective"))
    few = 64  # the loss itself, and one-element tensors that autograd saves or recompute makes
    assert plain == pytest.approx(saved, abs=few)
    assert full == pytest.approx(inputs, abs=few)  # autograd's own hooks are not told what selective recompute keeps
    assert 3 * full < selective < 0.8 * plain


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["--stage", "2", "--shard-size", "3"], "shard_size", id="shard-size"),
        pytest.param(["--batch", "7"], "--batch is 7, which does not divide over 4 .*; try 8", id="batch"),
        pytest.param(["--strategy", "one.yaml", "--stage", "2"], "--stage is 2 but one.yaml says 1", id="stage"),
        pytest.param(["--strategy", "one.yaml", "--batch", "8"], "--batch is 8 but the strategy gives 16", id="two"),
        pytest.param(["--strategy", "none.yaml"], "none.yaml", id="no-file"),
        pytest.param(["--steps", "0"], "is 0; expected 1 or more", id="steps"),
    ],
)
def test_demo_refuses_before_it_starts(tmp_path: Path, arguments: list[str], expected: str) -> None:
    (tmp_path / "one.yaml").write_text("sharding: true\nsharding_configs: {stage: 1}\nmicro_batch_size: 4\n")
    done = hybrid_here("demo", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(expected, done.stderr)
    assert "Traceback" not in done.stderr


def test_help_has_an_example(tmp_path: Path) -> None:
    done = hybrid_here("demo", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "hybrid demo --stage 1 --steps 50" in done.stdout


def test_ctrl_c_ends_the_demo(tmp_path: Path) -> None:
    """While it trains, from the terminal: one line, no tracebacks, no rank left."""
    process = start_hybrid("demo", "--nproc", "2", cwd=tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("9.97 M parameters"):
            break
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) == 3  # torchrun and two ranks
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert time.monotonic() - started < 10
    assert process.returncode == 130
    assert re.fullmatch(r"hybrid demo: stopped by Ctrl-C after .* s; all 2 ranks have ended; logs: .*\n", stderr)
    assert not any(rank.is_running() for rank in ranks)
