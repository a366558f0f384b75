"""The examples with models of transformers reach the same model alone and cut over ranks."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runnable.command import ROOT, environment, run_script

EXAMPLE = ROOT / "examples" / "finetune_hf.py"
LLAMA = ROOT / "examples" / "hf_3d.py"
ARGUMENTS = ["--steps", "24"]


def losses(output: str) -> tuple[list[float], float]:
    """Of the table's rows, and the held-out one."""
    rows = [float(loss) for loss in re.findall(r"^ +\d+ +([\d.]+)$", output, flags=re.MULTILINE)]
    (held_out,) = re.findall(r"^held-out loss ([\d.]+)$", output, flags=re.MULTILINE)
    return rows, float(held_out)


def test_without_transformers_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('as if it were not there')\n")
    kept = environment()
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": f"{tmp_path}:{kept['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "This example needs transformers: pip install 'transformers>=5,<6'\n"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_alone_and_on_two_ranks_at_stage_3(tmp_path: Path) -> None:
    """All state is cut, and the ranks' batches hold different numbers of masked words: the losses stay the same."""
    alone = run_script(EXAMPLE, *ARGUMENTS, cwd=tmp_path)
    assert alone.stderr == ""
    cut = run_script(EXAMPLE, *ARGUMENTS, "--stage", "3", "--recompute", cwd=tmp_path, num_ranks=2)
    assert cut.stderr == ""

    rows, held_out = losses(alone.stdout)
    rows_cut, held_out_cut = losses(cut.stdout)
    assert len(rows) == 4
    # Four digits are printed, and float32 adds up in another order in each of 24 steps of AdamW: that is worth a unit
    # or two of the last digit. A mean of the ranks' mean losses is 2e-2 to 6e-2 away.
    assert rows_cut == pytest.approx(rows, abs=5e-4)
    assert held_out_cut == pytest.approx(held_out, abs=5e-4)
    assert held_out < rows[0] - 0.5
    sizes, sizes_cut = (
        {what: int(size) for what, size in re.findall(r"'(\w+)': (\d+)", done.stdout)} for done in (alone, cut)
    )
    for what in ("parameters", "optimizer_state"):
        assert sizes_cut[what] == pytest.approx(sizes[what] / 2, rel=0.01)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("num_ranks", [4, pytest.param(8, marks=pytest.mark.full)])
def test_llama_in_3d_and_its_files(num_ranks: int, tmp_path: Path) -> None:
    """An unmodified Llama over pp 2 × tp 2 (× dp 2): the losses of one process, also after `from_pretrained`."""
    whole, cut = (run_script(LLAMA, "--steps", "6", cwd=tmp_path, num_ranks=ranks) for ranks in (1, num_ranks))
    assert "newly initialized" not in whole.stderr + cut.stderr  # every weight is in the files
    found = [[float(loss) for loss in re.findall(r"(?:loss|process) ([\d.]+)", done.stdout)] for done in (whole, cut)]
    assert len(found[0]) == 3
    # Four digits are printed; float32 adds up in another order in each of six steps of AdamW.
    assert found[1] == pytest.approx(found[0], abs=5e-4)
    for trained, loaded in (losses[1:] for losses in found):
        assert loaded == pytest.approx(trained, abs=1.5e-4)  # a unit of the last digit
    assert found[0][1] < 4.5  # 5.5 is chance
