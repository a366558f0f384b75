"""Every example is short and runs as its first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import RankFailure
from tests.runnable.command import ROOT, environment, hybrid, run_script

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 80
LAUNCHED = "train_gpt"  # by `hybrid run` and torchrun, in processes of their own: ten seconds of a processor
# Alone and under `hybrid run` in tests of their own: test_finetune_example.py, and below.
RUN_ELSEWHERE = ("finetune_hf", "hf_3d", "resume")


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


def test_ranks_that_do_not_fit_the_example_end_in_a_sentence(tmp_path: Path) -> None:
    """A newcomer starts what the machine has; a traceback through the library would not say what to change."""
    with pytest.raises(RankFailure, match="SystemExit: 3 ranks are no multiple of --pp 2 x --tp 1: choose others"):
        run_script(ROOT / "examples" / "train_3d.py", cwd=tmp_path, variables={"WORLD_SIZE": "3"})
    both = [(ROOT / "examples" / name).read_text(encoding="utf-8") for name in ("train_3d.py", "hf_3d.py")]
    checks = [re.findall(r"^    if ranks % .*\n.*raise .*", text, flags=re.MULTILINE) for text in both]
    assert checks[0] == checks[1] != []


@pytest.mark.slow
def test_example_of_a_run_that_can_be_stopped(tmp_path: Path) -> None:
    """The first start, alone, and a later one on more ranks; `hybrid run --resume` tells the script the folder."""
    script = ROOT / "examples" / "resume.py"
    first = run_script(script, "--steps", "10", cwd=tmp_path, variables={"HYBRID_RESUME": "saved"})
    later = hybrid("run", "--nproc", "2", "--resume", "saved", str(script), "--steps", "20", cwd=tmp_path)
    assert later.returncode == 0, later.stderr
    for done, steps, begin in ((first, 10, 0), (later, 20, 10)):
        assert f"from step {begin}\n" in done.stdout
        assert f"step {steps}: loss" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem not in RUN_ELSEWHERE], ids=name_of)
def test_example_runs_alone_and_on_two_ranks(path: Path, tmp_path: Path) -> None:
    """One script for one process and two ranks; our launcher and plain torchrun need to be tried with one of them."""
    arguments = ["--steps", "12"]
    alone = run_script(path, *arguments, cwd=tmp_path)
    assert alone.stderr == ""
    assert last_loss(alone.stdout) < 4.5  # 5.5 is chance

    if path.stem != LAUNCHED:
        on_two = run_script(path, *arguments, cwd=tmp_path, num_ranks=2)
        assert on_two.stderr == ""
        assert last_loss(on_two.stdout) < 4.5
    else:
        launched = hybrid("run", "--nproc", "2", str(path), *arguments, cwd=tmp_path)
        assert (launched.returncode, launched.stderr) == (0, "")
        assert last_loss(launched.stdout) < 4.5
        torchrun = subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node=2",
                str(path),
                *arguments,
            ],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert torchrun.returncode == 0, torchrun.stderr
        assert torchrun.stdout == launched.stdout
