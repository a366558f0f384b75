"""A script that ends while its last checkpoint is being written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybrid.checkpoint.folder import latest_complete
from tests.runnable.command import hybrid

SCRIPT = """
import os, sys, time
import torch
import hybrid
from hybrid.checkpoint.tensor_file import TensorFileWriter

write = TensorFileWriter.write

def slow(self, data):
    time.sleep(0.2)
    if sys.argv[2] == "full":
        raise OSError(28, "No space left on device")
    write(self, data)

TensorFileWriter.write = slow
model = hybrid.distributed_model(torch.nn.Linear(3, 2))
hybrid.async_save_checkpoint(sys.argv[1], model, step=7)
assert not os.path.exists(sys.argv[1] + "/step_00000007")
print("the last line", flush=True)
if sys.argv[2] == "raises":
    raise ValueError("of the script")
if sys.argv[2] == "exits":
    sys.exit(3)
"""


def run(directory: Path, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory), how], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_end_of_a_script_waits_for_the_save_and_tells_its_error(tmp_path: Path) -> None:
    """Protects the checkpoint that people need most: the last one. A job that lost it must not look like success."""
    done = run(tmp_path / "fine", "fine")
    assert (done.returncode, done.stdout) == (0, "the last line\n"), done.stderr
    newest, _ = latest_complete(tmp_path / "fine")
    assert newest is not None
    assert newest.step == 7
    done = run(tmp_path / "full", "full")
    assert (done.returncode, done.stdout) == (1, "the last line\n"), done.stderr
    assert "hybrid: the last async save failed: checkpoint of step 7 could not be written to" in done.stderr
    assert "No space left on device" in done.stderr
    assert latest_complete(tmp_path / "full") == (None, [])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "exits"])
def test_a_script_that_fails_under_hybrid_run_still_has_its_last_save(how: str, tmp_path: Path) -> None:
    """Fault: the rank left at once, and a restart went back one checkpoint more than it had to."""
    (tmp_path / "job.py").write_text(SCRIPT)
    done = hybrid("run", "job.py", "saved", how, cwd=tmp_path)
    assert done.returncode == (3 if how == "exits" else 1)
    newest, _ = latest_complete(tmp_path / "saved")
    assert newest is not None, done.stderr
    assert newest.step == 7
