"""Files of measurements as people may have them: other names, nonsense, several writers, factors that cannot be."""

from __future__ import annotations

import copy
import math
import os
import resource
import shutil
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date as day
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from hybrid.calibration import calibrate as calibrating
from hybrid.calibration.calibrate import calibrate
from hybrid.calibration.measuring_alone import measuring_alone
from hybrid.calibration.stopped import raise_if_stopped
from hybrid.cli.app import app
from hybrid.contracts.cluster import parse_cluster
from hybrid.errors import PlanError
from hybrid.launch.run import RunOutcome
from hybrid.planner.correction import correction_of, fitted
from hybrid.planner.memory import memory
from hybrid.planner.plan import plan
from hybrid.planner.request_reading import with_trials
from hybrid.planner.trials import Trial, TrialLayout, read_trials, save_trials, trials_file
from tests.pure.test_planner_measured import (
    LAYOUTS,
    SETTINGS,
    cluster_of,
    content,
    model,
    refused,
    request_on,
    seconds_of,
    trials_like,
)


def named(name: str, **figures: Any) -> dict[str, Any]:
    """The cluster file, its kind under another name."""
    file = content()
    file["kinds"] = {name: {**file["kinds"]["cpu-measured"], **figures}}
    file["nodes"][0]["kind"] = name
    return file


@pytest.mark.parametrize("is_measured", [True, False])
def test_the_name_of_a_kind_of_ones_own_says_nothing(is_measured: bool) -> None:
    """`like` says what it is: a processor called `box` was priced as a GPU, a GPU called `fast-cpu` as a processor."""
    found = []
    for name in ("cpu-measured", "box", "lab-CPU", "H100-lab"):
        file = named(name)
        if not is_measured:
            del file["measured"]
        request = request_on(parse_cluster(file))
        software = request.job.software
        found.append(
            (
                request.job.cluster.device.is_processor,
                software if isinstance(software, str) else software.name,
                seconds_of(request.job),
                [memory(request.job, one).worst.device for one in LAYOUTS],
            )
        )
    assert found[0][0]
    assert found[1:] == found[:1] * 3
    gpu = parse_cluster({"kinds": {"cpu-free": {"like": "H100"}}, "nodes": [{"devices": 8, "kind": "cpu-free"}]})
    assert not gpu.device.is_processor
    best = plan(model(), gpu, **{**SETTINGS, "global_batch_size": 64}).best
    known = plan(model(), "1x8xH100", **{**SETTINGS, "global_batch_size": 64}).best
    assert best.time.total_seconds == known.time.total_seconds
    assert best.memory.worst.device == known.memory.worst.device


def test_processors_and_accelerators_are_not_mixed_up() -> None:
    """A calibration of processors under H100s gave H100s the times of a laptop."""
    assert "taken on processors, and box is an accelerator" in refused(lambda: parse_cluster(named("box", like="H100")))
    machine = {**content()["measured"]["machine"], "accelerator": "NVIDIA H100", "backend": "nccl"}
    assert "and cpu-measured is a kind of processor" in refused(lambda: cluster_of(machine=machine))


# ---------------------------------------------------------------- the fit


def test_a_single_run_is_met_however_far_off_it_is() -> None:
    """Undamped, the fit ended at 28 % for a step of a fifth of its plan: nothing bounded what it changed at once."""
    job = request_on(cluster_of()).job
    like_plan = trials_like(job, work=1.0, communication=1.0, fixed=1.0)[1]
    for ratio in (0.01, 0.2, 5.0, 100.0):
        run = like_plan.model_copy(update={"step_seconds": like_plan.step_seconds * ratio, "spread": 0.06})
        found = correction_of(job, [run])
        assert found is not None
        assert found.error_after < 0.03, ratio
        assert found.error_before == pytest.approx(abs(math.log(ratio)))
        # Beyond what a machine explains, the answer says so and names the run.
        is_doubtful = any("ran 100 times" in note and run.candidate.label in note for note in found.notes)
        assert is_doubtful == (ratio in (0.01, 100.0))
        assert all(note in found.sentence for note in found.notes)


def test_the_fit_never_makes_it_worse() -> None:
    """A share that vanishes or jumps as a factor changes has no slope to go by; the plan without correction is left."""
    noise = np.array([0.03, 0.05])
    for parts in ([[1.0, 1e-3, 0.0], [0.0, 1.0, 1.0]], [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], [[0.0, 0.0, 1.0]] * 2):
        for measured in ([-4.0, 3.0], [0.1, -6.0], [9.0, 9.0]):

            def logs(at: np.ndarray, parts: Any = parts) -> np.ndarray:
                waits = np.maximum(0.0, 1.0 - np.exp(at[0]))  # hidden behind work until that is fast
                return np.log(np.array(parts) @ np.exp(at) + waits + 1e-3)

            def cost(at: np.ndarray, logs: Any = logs, measured: Any = measured) -> float:
                return float(np.sum(((measured - logs(at)) / noise) ** 2) + np.sum((at / math.log(2)) ** 2))

            at = fitted(logs, np.array(measured), noise)
            assert cost(at) <= cost(np.zeros(3))


# ---------------------------------------------------------------- what stands in the files


def test_measurements_that_cannot_be_are_refused_by_name() -> None:
    """They were taken as they were, and ended as an overflow or as a plan of nonsense; all of them at once."""
    file = content()
    measured = file["measured"]
    measured["matmul"][0]["m"] = 10**400
    measured["matmul"][1]["m"] = True
    measured["matmul"][2]["m"] = "64"
    measured["attention"][0]["seconds"] = 1e300
    measured["pointwise"][0]["spread"] = float("inf")
    measured["context_bytes"] = [3e8, 1e8, 2e8]
    measured["date"] = "zzz"
    measured["collectives"][0]["points"] = [{"num_bytes": 8, "seconds": 1e-3}, {"num_bytes": 8, "seconds": 2e-3}]
    measured["launch"]["seconds"] = 1
    text = refused(lambda: parse_cluster(file))
    for place, reason in (
        ("matmul.0.m", "less than or equal to"),
        ("matmul.1.m", "expected a whole number (it is True)"),
        ("matmul.2.m", "expected a whole number (it is '64')"),
        ("attention.0.seconds", "less than or equal to 1000000"),
        ("pointwise.0.spread", "(it is inf)"),
        ("context_bytes", "ascending"),
        ("date", "write it as 2026-11-30"),
        ("collectives.0.points", "entries 0 and 1 are of the same (num_bytes 8)"),
        ("launch.seconds", "there is no such entry"),
    ):
        assert any(f"measured.{place}: " in line and reason in line for line in text.splitlines()), (place, text)
    assert len(text) < 2000
    for whole in (True, [], "x"):
        text = refused(lambda whole=whole: parse_cluster({**content(), "measured": whole}))
        assert "cluster, measured: expected named entries" in text
    doubled = [*content()["measured"]["matmul"], content()["measured"]["matmul"][0]]
    assert "64 · 256 · 1024 fp32" in refused(lambda: cluster_of(matmul=doubled))
    assert cluster_of(date=day(2026, 11, 30)).measured is not None  # YAML without quotes


def test_runs_that_nothing_wrote_are_refused_by_name(tmp_path: Path) -> None:
    """A layout of text was dropped without a word, one of zeros divided by zero, a huge figure overflowed."""
    file = tmp_path / "here.yaml"
    file.write_text(yaml.safe_dump(content()), encoding="utf-8")
    plain = request_on(file)
    good = trials_like(plain.job, work=1.0, communication=1.0, fixed=1.0)[0].model_dump(mode="json")
    assert good["layout"] == {"dp_shard": 4, "zero_stage": 1, "micro_batch_size": 2}
    wrong: dict[str, Any] = {
        "layout.dp_shard": "2",
        "layout.zero_stage": 9,
        "layout.micro_batch_size": 1.5,
        "layout.num_micro_batches": 0,
        "layout.tp": -2,
        "layout.pp": None,
        "layout.recompute": "nonsense",
        "layout.schedule": "round",
        "layout.foo": 1,
        "spread": float("inf"),
        "step_seconds": 1e300,
        "process_bytes": 10**400,
        "date": "zzz",
    }
    entries = []
    for place, value in wrong.items():
        entry = copy.deepcopy(good)
        owner = entry["layout"] if "." in place else entry
        owner[place.rpartition(".")[2]] = value
        entries.append(entry)
    entries.append({**good, "spread": 1e200})
    entries.append({**good, "global_batch_size": 64})
    trials_file(file).write_text(yaml.safe_dump({"trials": entries}), encoding="utf-8")
    text = refused(lambda: request_on(file))
    lines = text.splitlines()
    for number, place in enumerate([*wrong, "spread"]):
        assert sum(f"{trials_file(file)}, trials.{number}.{place}: " in line for line in lines) == 1, (place, text)
    assert "of its layout is not its global_batch_size 64" in text
    assert "--no-measurements" in lines[-1]
    for broken in ("[1]", "false", "a: [", "trials: [{date: 2026-99-99}]"):
        trials_file(file).write_text(broken, encoding="utf-8")
        text = refused(lambda: request_on(file))
        assert "--no-measurements" in text
        assert "_File" not in text
        assert ": :" not in text
    # What can be written, and cannot be of this model: thirteen stages of four ranks, no heads for such a tp.
    odd = Trial.model_validate(good).model_copy(update={"layout": TrialLayout(pp=4, virtual_stages=50)})
    assert "take this entry out" in refused(lambda: with_trials(plain, [odd.model_copy(update={"seq": 128})]))


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    """Each read the file, added its own and wrote all of it: one of two measurements at once was lost."""
    file = tmp_path / "here.yaml"
    file.write_text(yaml.safe_dump(content()), encoding="utf-8")
    (one, *_) = trials_like(request_on(file).job, work=1.0, communication=1.0, fixed=1.0)
    runs = [one.model_copy(update={"model": f"model{number}"}) for number in range(12)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda run: save_trials(file, [run]), runs))
    assert {run.model for run in read_trials(file)} == {run.model for run in runs}
    assert not list(tmp_path.glob(".*.new"))


def test_another_torch_is_told() -> None:
    """The version of a run was that of the calibration, whatever ran."""
    request = request_on(cluster_of())
    runs = trials_like(request.job, work=1.0, communication=1.0, fixed=1.0)
    same = with_trials(request, runs).correction
    other = with_trials(request, [runs[0].model_copy(update={"torch": "2.14.0"})]).correction
    assert same is not None
    assert same.notes == ()
    assert other is not None
    assert "measured with torch 2.14.0, and the machine calibrated with 2.13.0" in other.sentence


# ---------------------------------------------------------------- the command


def test_what_cannot_be_written_is_refused_before_anything_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--out .` ended in a traceback, `--ranks 0` spoke of the load first."""
    monkeypatch.chdir(tmp_path)
    for out in ("", ".", ".."):
        assert "is a folder; give the name of a file" in refused(lambda out=out: calibrate(out))
    done = CliRunner().invoke(app, ["calibrate", "--ranks", "0"])
    assert isinstance(done.exception, PlanError)
    assert done.output == ""


def test_two_measurements_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stored figures of a machine that the other used; and the lock is gone with whoever had it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(calibrating, "run_job", lambda *args, **options: pytest.fail("ranks were started"))
    out = tmp_path / "here.yaml"
    with measuring_alone():
        assert f"runs on this machine (process {os.getpid()})" in refused(lambda: calibrate(out, ranks=2))
    assert not out.exists()
    with measuring_alone():
        pass
    (tmp_path / "hybrid-measuring.lock").unlink()
    (tmp_path / "hybrid-measuring.lock").mkdir()
    assert "cannot be opened" in refused(lambda: calibrate(out, ranks=2))


def test_a_full_disk_is_told_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file says nothing of it; minutes later the figures would be lost."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(calibrating, "run_job", lambda *args, **options: pytest.fail("ranks were started"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    assert "has 4,096 bytes left" in refused(lambda: calibrate(tmp_path / "here.yaml", ranks=2))
    assert not list(tmp_path.glob("hybrid-calibrate-*"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))  # a write beyond it fails, as on a full disk
    try:
        assert "cannot be written (File too large)" in refused(lambda: calibrate(tmp_path / "here.yaml", ranks=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_ctrl_c_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message said stopped by Ctrl-C, and the exit code that the request was wrong."""
    outcome = RunOutcome(exit_code=130, message="stopped by Ctrl-C", log_dir=tmp_path)
    with pytest.raises(SystemExit):
        raise_if_stopped(replace(outcome, exit_code=143), tmp_path / "logs")
    raise_if_stopped(replace(outcome, exit_code=2), tmp_path)
    monkeypatch.setattr(calibrating, "run_job", lambda *args, **options: outcome)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # not the lock of this machine
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["calibrate", "--ranks", "2"])
    assert done.exit_code == 130
    assert "stopped by Ctrl-C" in done.output
