"""The benchmarks, short and tiny: they run, and what does not depend on the machine is as it should be."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.runnable.command import ROOT, environment


def bench(module: str, *arguments: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """The printed text, and the row of each mode."""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--size", "tiny", "--rounds", "1"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *lines, rows = done.stdout.strip().splitlines()
    return "\n".join(lines), {row["mode"]: row for row in json.loads(rows)}


@pytest.mark.slow
def test_zero_step() -> None:
    _, rows = bench("zero_step", "--steps", "1", "--modes", "hybrid2")
    assert list(rows) == ["ddp", "hybrid2"]
    assert rows["hybrid2"]["max_loss_difference"] < 1e-5


@pytest.mark.slow
def test_tensor_step() -> None:
    """All modes train alike; half of what is cut is here; each block communicates as often as it must."""
    text, rows = bench("tensor_step", "--steps", "1")
    assert max(row["max_loss_difference"] for row in rows.values()) < 1e-5
    # Whole: positions 8 × 32, five norms of 2 × 32, two row biases of 32 in each of two blocks.
    whole_bytes = 4 * (8 * 32 + 5 * 2 * 32 + 2 * 2 * 32)
    expected_bytes = whole_bytes + (rows["plain"]["parameter_bytes"] - whole_bytes) // 2
    assert {rows[mode]["parameter_bytes"] for mode in ("hybrid", "hybrid_sp", "dtensor")} == {expected_bytes}
    assert re.findall(r"per block: (.*)", text) == [
        "2 all_reduce backward, 2 all_reduce forward",
        "2 all_gather backward, 2 reduce_scatter backward, 2 all_gather forward, 2 reduce_scatter forward",
    ]
    assert re.findall(r"([\d.]+) per token", text) == ["12", "256", "12", "256"]


@pytest.mark.slow
def test_pipeline_step() -> None:
    """All modes train alike; kept activations are those of the micro-batches in flight, bytes sent those foreseen."""
    _, rows = bench("pipeline_step", "--steps", "1", "--rows", "8")
    assert list(rows) == ["plain", "hybrid", "torch"]
    assert max(row["max_loss_difference"] for row in rows.values()) < 1e-5
    stages = zip(rows["hybrid"]["activations"], rows["hybrid"]["sent"], (2, 1), strict=True)
    for activations, sent, in_flight in stages:
        assert activations["in_flight"] == in_flight
        assert activations["step"] == pytest.approx(in_flight * activations["one"], rel=0.05)
        assert sent["found"] == sent["expected"]
        assert sum(sent["found"].values()) == 4 * 2 * 8 * 32 * 4


@pytest.mark.slow
def test_checkpoint_io() -> None:
    """What each mode loads, into the layout that wrote it or another, is what was saved: the loss is the same."""
    _, rows = bench("checkpoint_io", "--parts", "save,load,stall")
    found = {mode: row["loss_difference"] for mode, row in rows.items() if "loss_difference" in row}
    assert len(found) == 10
    assert max(found.values()) < 1e-5
    assert all(row["ms"] > 0 for row in rows.values())
