"""The benchmarks, short and tiny: they run, and what does not depend on the machine is as it should be."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.ranks import RankFailure, run_environments, run_plain
from tests.runnable.command import ROOT, environment, run_as_main


def bench(module: str, *arguments: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """The printed text, and the row of each mode."""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--size", "tiny", "--rounds", "1"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


def read(stdout: str) -> tuple[str, dict[str, dict[str, Any]]]:
    *lines, rows = stdout.strip().splitlines()
    return "\n".join(lines), {row["mode"]: row for row in json.loads(rows)}


def run_rank(module: str, arguments: tuple[str, ...], own: dict[str, str], world_size: int, store: str) -> str:
    """A rank of a benchmark, forked with torch loaded: its group meets in a file, as nothing may open a port."""
    for name in [name for name in os.environ if name.startswith("BENCHMARK_")]:
        del os.environ[name]  # of the moment when the fork server was started
    meeting = {"store": dist.FileStore(store, world_size), "rank": int(os.environ["RANK"]), "world_size": world_size}
    dist.init_process_group = functools.partial(dist.init_process_group, **meeting)
    stdout, _ = run_as_main(ROOT / "benchmarks" / f"{module}.py", arguments, ROOT, own)
    return stdout


def bench_here(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    module: str,
    *arguments: str,
    size: tuple[str, ...] = ("--size", "tiny"),
) -> tuple[str, dict[str, dict[str, Any]]]:
    """As `bench`; but what the benchmark starts is forked (tests/ranks.py), not by torchrun."""
    arguments = (*size, "--rounds", "1", *arguments)
    printed: list[str] = []

    def launch(_: str, *, num_ranks: int) -> int:
        own = {name: value for name, value in os.environ.items() if name.startswith("BENCHMARK_")}
        ranks = [
            {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
            for r in range(num_ranks)
        ]
        store = str(folder / f"store{len(printed)}")
        reports = run_environments(run_rank, ranks, module, arguments, own, num_ranks, store, timeout_seconds=120)
        # A rank that has measured its peak leaves by os._exit(0), without a report.
        leaves = "BENCHMARK_PEAK_OF" in own
        if any(report.failed and not (leaves and report.exit_code == 0) for report in reports):
            raise RankFailure(reports)
        printed.append(reports[0].value or "")
        return 0

    benchmark = importlib.import_module(f"benchmarks.{module}")
    monkeypatch.setattr(benchmark, "launch", launch)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as left:
        benchmark.main()
    assert left.value.code == 0
    return read(printed[-1])


@pytest.mark.slow
def test_zero_step() -> None:
    """Modes train like one process; what one holds and sends is counted, and its table is Markdown."""
    text, rows = bench("zero_step", "--steps", "1", "--peers", "ddp", "--stages", "2", "--markdown")
    assert list(rows) == ["ddp", "hybrid2"]
    assert max(row["max_loss_difference"] for row in rows.values()) < 1e-5
    assert rows["hybrid2"]["max_loss_difference_to_ddp"] < 1e-5
    ddp, ours = rows["ddp"], rows["hybrid2"]
    parameter_bytes = 4 * (2 * 64 * 32 + 8 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32)
    # Parameters, half of the gradients, half of two moments; the rest is small at any size.
    assert ours["live_after_backward_bytes"] < ddp["live_after_backward_bytes"]
    assert ddp["live_after_backward_bytes"] == pytest.approx(4 * parameter_bytes, rel=0.2)
    assert ours["sent_bytes"] == pytest.approx(parameter_bytes, rel=0.5)
    assert ours["heap_peak_bytes"] > ours["live_after_step_bytes"] > 2 * parameter_bytes
    assert text.splitlines()[1].startswith("| mode | step ms | wall to ddp |")


@pytest.mark.slow
def test_python_overhead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The profile finds functions of the package, and its share of the step is a number."""
    arguments = ("--layers", "3", "--steps", "1", "--stages", "1")
    _, rows = bench_here(monkeypatch, tmp_path, "python_overhead", *arguments, size=())
    assert list(rows) == ["plain", "hooks", "stage 1"]
    assert rows["stage 1"]["cpu_ms"] > 0
    places = {place.split(":")[0] for place, _, _ in rows["stage 1"]["top"]}
    assert places
    assert all((ROOT / "hybrid" / place).is_file() for place in places), places


@pytest.mark.slow
def test_gpu_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its whole flow on a CPU: peers, stages, compiled and not, parity; and without a device, what is missing."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "benchmarks.gpu_step"]
        path = ROOT / "benchmarks" / "gpu_step.py"
        stdout, _ = run_plain(run_as_main, path, tuple(command[3:]), ROOT, {}, timeout_seconds=120)
        return subprocess.CompletedProcess(command, 0, stdout, "")

    gpu_step = importlib.import_module("benchmarks.gpu_step")
    monkeypatch.setattr(gpu_step.subprocess, "run", run)  # forked with torch loaded
    modes = ["plain", "fsdp2", "hybrid3", "hybrid2+compile"]
    arguments = ["gpu_step", "--size", "tiny", "--steps", "1", "--warmup", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--device", "cpu", "--modes", ",".join(modes)])
    gpu_step.main()
    *rows, checked = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [row["mode"] for row in rows] == modes
    for row in rows:
        assert row["losses"] == pytest.approx(rows[0]["losses"], abs=0.02), row["mode"]  # in bf16
    assert checked == {"mode": "parity", "max_loss_difference": pytest.approx(0, abs=1e-5), "sanitizer": False}
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(gpu_step.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"needs one CUDA device.*--device cpu --size tiny"):
        gpu_step.main()


@pytest.mark.slow
def test_tensor_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All modes train alike; half of what is cut is here; each block communicates as often as it must."""
    text, rows = bench_here(monkeypatch, tmp_path, "tensor_step", "--steps", "1")
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
def test_own_forward_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A chain and the same model by its own forward train alike, to the bit, and both times are there."""
    _, rows = bench_here(monkeypatch, tmp_path, "own_forward_step", "--steps", "1")
    assert list(rows) == ["chain", "own"]
    assert rows["own"]["max_loss_difference"] == 0
    assert min(rows["own"]["wall_to_chain"] + rows["own"]["computing_to_chain"]) > 0


@pytest.mark.slow
def test_pipeline_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All modes train alike; kept activations are those of the micro-batches in flight, bytes sent those foreseen."""
    _, rows = bench_here(monkeypatch, tmp_path, "pipeline_step", "--steps", "1", "--rows", "8")
    assert list(rows) == ["plain", "hybrid", "torch"]
    assert max(row["max_loss_difference"] for row in rows.values()) < 1e-5
    stages = zip(rows["hybrid"]["activations"], rows["hybrid"]["sent"], (2, 1), strict=True)
    for activations, sent, in_flight in stages:
        assert activations["in_flight"] == in_flight
        assert activations["step"] == pytest.approx(in_flight * activations["one"], rel=0.05)
        assert sent["found"] == sent["expected"]
        assert sum(sent["found"].values()) == 4 * 2 * 8 * 32 * 4


@pytest.mark.slow
def test_checkpoint_io(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What each mode loads, into the layout that wrote it or another, is what was saved: the loss is the same."""
    _, rows = bench_here(monkeypatch, tmp_path, "checkpoint_io", "--parts", "save,load,stall")
    found = {mode: row["loss_difference"] for mode, row in rows.items() if "loss_difference" in row}
    assert len(found) == 10
    assert max(found.values()) < 1e-5
    assert all(row["ms"] > 0 for row in rows.values())
