"""What `hybrid calibrate` measured in the planner's times, and layouts that were run as a correction of its plans."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid.calibration.calibrate import calibrate
from hybrid.calibration.cluster_content import cluster_content
from hybrid.calibration.measure_plans import check_measurable
from hybrid.contracts.cluster import Cluster, parse_cluster
from hybrid.contracts.measurements import Measurements
from hybrid.errors import HybridError
from hybrid.launch.machine import this_machine
from hybrid.planner.collectives import collective_seconds, measured_fabric
from hybrid.planner.correction import scaled_software
from hybrid.planner.cost import step_time
from hybrid.planner.job import Candidate, Job
from hybrid.planner.matmul import attention_seconds, matmul_seconds
from hybrid.planner.memory import memory
from hybrid.planner.plan import plan
from hybrid.planner.presets import preset
from hybrid.planner.request import Request
from hybrid.planner.request_reading import make_request, with_trials
from hybrid.planner.scaled import scaled_job
from hybrid.planner.software import Software, software_of
from hybrid.planner.trials import Trial, read_trials, save_trials, trials_file

HERE = this_machine()
RANKS = 4
SETTINGS: dict[str, Any] = {"global_batch_size": 8, "seq": 128, "precision": "fp32"}
LAYOUTS = (
    Candidate(dp_shard=4, zero_stage=1, micro_batch_size=2),
    Candidate(dp_replicate=2, tp=2, micro_batch_size=4),
    Candidate(dp_shard=4, zero_stage=3, micro_batch_size=1, num_micro_batches=2),
)


def content(**changes: Any) -> dict[str, Any]:
    """A cluster file of this machine."""
    points = [{"num_bytes": size, "seconds": 2e-3 + size / 2e8} for size in (1024, 1 << 20)]
    measured = {
        "date": "2026-11-30",
        "torch": "2.13.0",
        "seconds": 40.0,
        "machine": {
            "hosts": [HERE.host],
            "processor": HERE.processor,
            "cores": HERE.cores,
            "ranks_per_host": RANKS,
            "backend": "gloo",
        },
        "matmul": [
            {"m": 64, "k": 256, "n": 1024, "dtype": "fp32", "seconds": 1e-3, "spread": 0.2},
            {"m": 1024, "k": 1024, "n": 1024, "dtype": "fp32", "seconds": 8e-2},
            {"m": 256, "k": 64, "n": 1024, "dtype": "fp32", "is_weight": True, "seconds": 1.2e-3},
        ],
        "attention": [
            {"batch": 2, "heads": 4, "seq": 128, "head_dim": 64, "dtype": "fp32", "is_backward": way, "seconds": 2e-3}
            for way in (False, True)
        ],
        "pointwise": [
            {"num_bytes": 1 << 14, "bytes_per_second": 1e9},
            {"num_bytes": 1 << 22, "bytes_per_second": 3e9},
        ],
        "optimizer_bytes_per_second": 2e9,
        "launch": {"forward_seconds": 3e-5, "backward_factor": 1.5},
        "step": {"step_seconds": 4e-3, "micro_batch_seconds": 2e-4},
        "context_bytes": [3.0e8, 3.5e8, 4.0e8],
        "collectives": [
            {"kind": "all_reduce", "size": 4, "stride": 1, "points": points},
            {"kind": "all_gather", "size": 2, "stride": 1, "points": points},
        ],
        **changes,
    }
    kind = {"like": "cpu", "fp32_teraflops_per_second": 0.03, "memory_gigabytes_per_second": 3.0}
    return {
        "name": "here",
        "kinds": {"cpu-measured": kind},
        "nodes": [{"devices": RANKS, "kind": "cpu-measured"}],
        "measured": measured,
    }


def cluster_of(**changes: Any) -> Cluster:
    return parse_cluster(content(**changes))


@cache
def model() -> Any:
    return preset("gpt3-125m", activation_bytes=4)


def request_on(cluster: Any, **options: Any) -> Request:
    return make_request(model(), cluster, **SETTINGS, **options)


def seconds_of(job: Job) -> list[float]:
    return [step_time(job, layout).total_seconds for layout in LAYOUTS]


def test_a_measured_shape_takes_the_measured_time_and_others_follow() -> None:
    """The point of calibrating: no formula stands between a measurement and the plan, and none is left alone."""
    device = cluster_of().device
    shape = {"m": 64, "k": 256, "n": 1024, "dtype": "fp32"}
    assert matmul_seconds(device, **shape) == pytest.approx(1e-3)
    assert matmul_seconds(device, m=256, k=64, n=1024, dtype="fp32", is_weight=True) == pytest.approx(1.2e-3)
    plain = replace(device, measured=None)
    small, large = (
        1e-3 / matmul_seconds(plain, **shape),
        8e-2 / matmul_seconds(plain, m=1024, k=1024, n=1024, dtype="fp32"),
    )
    between = matmul_seconds(device, m=256, k=512, n=1024, dtype="fp32")
    ratio = between / matmul_seconds(plain, m=256, k=512, n=1024, dtype="fp32")
    assert min(small, large) < ratio < max(small, large)
    beyond = matmul_seconds(device, m=8192, k=8192, n=8192, dtype="fp32")
    assert beyond / matmul_seconds(plain, m=8192, k=8192, n=8192, dtype="fp32") == pytest.approx(large)
    attention = {"batch": 2, "heads": 4, "queries": 128, "keys": 128, "head_dim": 64, "value_dim": 64, "dtype": "fp32"}
    assert attention_seconds(device, **attention, is_backward=True) == pytest.approx(2e-3)


def test_measured_groups_take_the_measured_time_and_others_follow() -> None:
    """At measured sizes exactly, between two of them in between; a kind that was not measured like the nearest."""
    cluster = cluster_of()
    software = Software(collective_seconds=0.0)
    fabric = measured_fabric(cluster, software)
    four, two = cluster.axis_links(size=4, stride=1), cluster.axis_links(size=2, stride=1)

    def seconds(kind: Any, size: float, links: Any) -> float:
        return collective_seconds(kind, size, links, fabric=fabric, software=software)

    assert seconds("all_reduce", 1024, four) == pytest.approx(2e-3 + 1024 / 2e8)
    assert seconds("all_reduce", 1 << 20, four) == pytest.approx(2e-3 + (1 << 20) / 2e8)
    assert (
        seconds("all_reduce", 1024, four) < seconds("all_reduce", 1 << 15, four) < seconds("all_reduce", 1 << 20, four)
    )
    assert seconds("all_gather", 1 << 20, two) == pytest.approx(2e-3 + (1 << 20) / 2e8)
    plain = replace(fabric, curves=type(fabric.curves)())
    for kind in ("reduce_scatter", "send"):
        without = collective_seconds(kind, 1 << 20, two, fabric=plain, software=software)  # type: ignore[arg-type]
        assert seconds(kind, 1 << 20, two) != pytest.approx(without), kind


def test_every_measured_figure_changes_the_plan() -> None:
    """A field of the file that the cost model does not read would be a setting that is ignored."""
    before = seconds_of(request_on(cluster_of()).job)
    file = content()["measured"]

    def slower(entries: list[dict[str, Any]], name: str, factor: float) -> list[dict[str, Any]]:
        return [{**entry, name: entry[name] * factor} for entry in entries]

    changes: dict[str, Any] = {
        "matmul": slower(file["matmul"], "seconds", 2),
        "attention": slower(file["attention"], "seconds", 2),
        "pointwise": slower(file["pointwise"], "bytes_per_second", 0.5),
        "optimizer_bytes_per_second": 1e9,
        "launch": {"forward_seconds": 6e-5, "backward_factor": 1.5},
        "step": {"step_seconds": 8e-3, "micro_batch_seconds": 2e-4},
        "collectives": [{**curve, "points": slower(curve["points"], "seconds", 2)} for curve in file["collectives"]],
    }
    for name, value in changes.items():
        after = seconds_of(request_on(cluster_of(**{name: value})).job)
        assert all(a > b for a, b in zip(after, before, strict=True)), name
    for changed in (
        {"launch": {"forward_seconds": 3e-5, "backward_factor": 3.0}},
        {"step": {"step_seconds": 4e-3, "micro_batch_seconds": 1e-3}},
    ):
        assert seconds_of(request_on(cluster_of(**changed)).job)[0] > before[0]
    job = request_on(cluster_of()).job
    larger = request_on(cluster_of(context_bytes=[4.0e8, 4.5e8, 5.0e8])).job
    devices = [memory(one, LAYOUTS[0]).worst.device.expected for one in (job, larger)]
    assert devices[1] - devices[0] == pytest.approx(1e8)
    # Without any of them the planner's own constants count, as on any processor.
    nothing = dict.fromkeys(changes, ()) | {"optimizer_bytes_per_second": None, "launch": None, "step": None}
    bare = request_on(cluster_of(**nothing, context_bytes=None)).job
    kind = replace(bare.cluster.device, measured=None)
    plain = replace(bare, cluster=replace(bare.cluster, device=kind, measured=None), software="hybrid-gloo")
    assert seconds_of(bare) == pytest.approx(seconds_of(plain))


def test_an_accelerator_keeps_its_data_sheet_and_takes_the_measured_times() -> None:
    """What CUDA machines write: peaks and links of the known kind, so that utilisation keeps its meaning."""
    machine = {**content()["measured"]["machine"], "accelerator": "NVIDIA H100 80GB HBM3", "backend": "nccl"}
    product = {"m": 2048, "k": 4096, "n": 4096, "dtype": "bf16", "seconds": 2e-4}
    found = Measurements.model_validate({**content()["measured"], "machine": machine, "matmul": [product]})
    cluster = parse_cluster(cluster_content(found, 79.1 * 2**30))
    assert cluster.device.name == "H100-SXM-80GB-measured"
    assert cluster.device.flops == parse_cluster("1x4xH100").device.flops
    assert cluster.device.memory_bytes == pytest.approx(79.1 * 2**30, rel=1e-3)
    assert matmul_seconds(cluster.device, m=2048, k=4096, n=4096, dtype="fp16") == pytest.approx(2e-4)
    software = make_request(model(), cluster, global_batch_size=8).job.software
    assert isinstance(software, Software)
    assert (software.name, software.is_launch_ahead) == ("hybrid-measured", 1.0)
    other = found.model_copy(update={"machine": found.machine.model_copy(update={"accelerator": "ACME X1"})})
    unknown = parse_cluster(cluster_content(other, 16e9)).device
    assert unknown.name == "ACME-X1-measured"
    assert unknown.flops["bf16"] == pytest.approx(2 * 2048 * 4096 * 4096 / 2e-4, rel=1e-3)


def test_sensitivities_are_those_of_the_formula() -> None:
    """A correction to what was measured must not swallow a device or a link that is made faster afterwards."""
    job = request_on(cluster_of()).job
    for change in ({"flops": 2.0}, {"memory": 2.0}, {"inside": 2.0}):
        assert all(a < b for a, b in zip(seconds_of(scaled_job(job, **change)), seconds_of(job), strict=True)), change


# ---------------------------------------------------------------- layouts that were run


def trials_like(job: Job, *, work: float, communication: float, fixed: float) -> list[Trial]:
    """Runs of a machine that is so many times slower than the plan."""
    software = software_of(job.software) if isinstance(job.software, str) else job.software
    slower = replace(job, software=scaled_software(software, work, communication, fixed))
    common = {
        "model": job.model.name,
        "num_parameters": job.model.num_parameters,
        "seq": job.seq,
        "global_batch_size": job.global_batch_size,
        "compute": "fp32",
        "optimizer": "AdamW",
        "spread": 0.05,
        "num_steps": 9,
        "hosts": [HERE.host],
        "date": "2026-11-30",
        "torch": "2.13.0",
    }
    found = []
    for layout in LAYOUTS:
        given = {
            name: value for name in layout.__slots__ if (value := getattr(layout, name)) != getattr(Candidate(), name)
        }
        tensors = memory(job, layout).worst.tensors_bytes
        figures = {
            "layout": given,
            "predicted_seconds": 1.0,
            "predicted_state_bytes": 1,
            "predicted_process_bytes": 1.0,
            "step_seconds": step_time(slower, layout).total_seconds,
            "state_bytes": 1,
            "process_bytes": round(tensors * 1.02 + 5e8),
            "tensor_bytes": tensors,
        }
        found.append(Trial.model_validate({**common, **figures}))
    return found


def test_measured_layouts_correct_the_next_plan(tmp_path: Path) -> None:
    """The rule of docs/calibrate.md: three factors in logarithms; used by the next plan, and left out when asked."""
    file = tmp_path / "here.yaml"
    file.write_text(yaml.safe_dump(content()), encoding="utf-8")
    plain = request_on(file)
    assert plain.correction is None
    trials = trials_like(plain.job, work=1.6, communication=0.7, fixed=1.0)
    assert save_trials(file, trials) == trials_file(file)
    asked = request_on(file)
    assert asked.correction is not None
    assert asked.correction.work == pytest.approx(1.6, rel=0.05)
    assert asked.correction.communication == pytest.approx(0.7, rel=0.1)
    assert asked.correction.error_before > 0.25
    assert asked.correction.error_after < 0.02
    assert seconds_of(asked.job) == pytest.approx([one.step_seconds for one in trials], rel=0.02)
    assert memory(asked.job, LAYOUTS[0]).worst.device.expected == pytest.approx(trials[0].process_bytes, rel=0.01)
    assert seconds_of(request_on(file, use_measurements=False).job) == seconds_of(plain.job)
    # Factors of earlier runs are no part of what later ones are compared with.
    assert with_trials(asked, trials).correction == asked.correction
    # The answer says so, with where it comes from; constants too.
    plans = plan(model(), file, **SETTINGS)
    told = plans.to_dict()["correction"]
    assert told["work"] == pytest.approx(asked.correction.work)
    assert "3 measured layouts" in told["source"]
    software = plans.request.job.software
    assert isinstance(software, Software)
    assert "measured layouts" in software.sources["matmul_fraction"].source
    # One run moves what it is made of, most of all the work; a rerun takes the place of its predecessor.
    (one,) = (trial for trial in trials if trial.layout == trials[0].layout)
    alone = with_trials(plain, [one]).correction
    assert alone is not None
    assert abs(alone.work - 1) > abs(alone.fixed - 1)
    save_trials(file, [one.model_copy(update={"step_seconds": 99.0})])
    assert sorted(trial.step_seconds for trial in read_trials(file))[-1] == 99.0
    assert len(read_trials(file)) == len(trials)


def test_layouts_of_another_model_or_machine_correct_nothing() -> None:
    """What was measured elsewhere says nothing here."""
    plain = request_on(cluster_of())
    trials = trials_like(plain.job, work=2.0, communication=1.0, fixed=1.0)
    for change in (
        {"model": "other"},
        {"seq": 64},
        {"compute": "bf16"},
        {"optimizer": "SGD"},
        {"hosts": ("elsewhere",)},
    ):
        changed = [trial.model_copy(update=change) for trial in trials]
        assert with_trials(plain, changed).correction is None, change


# ---------------------------------------------------------------- what is refused


def refused(call: Any) -> str:
    with pytest.raises(HybridError) as caught:
        call()
    return str(caught.value)


def test_files_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """A calibration of other ranks, and a broken file of runs, would silently price another machine."""
    other = content()
    other["nodes"] = [{"devices": 2, "kind": "cpu-measured"}]
    assert "taken on 1 host(s) of 4 ranks, and the cluster has 2" in refused(lambda: parse_cluster(other))
    curve = {"kind": "all_reduce", "size": 3, "stride": 1, "points": [{"num_bytes": 8, "seconds": 1e-3}]}
    assert "groups of 3, 1 apart" in refused(lambda: cluster_of(collectives=[curve]))
    assert "measured.step.step_seconds" in refused(
        lambda: cluster_of(step={"step_seconds": -1, "micro_batch_seconds": 0})
    )
    file = tmp_path / "here.yaml"
    file.write_text(yaml.safe_dump(content()), encoding="utf-8")
    trials_file(file).write_text("trials: [{model: GPT}]", encoding="utf-8")
    assert "--no-measurements" in refused(lambda: request_on(file))
    request_on(file, use_measurements=False)


def test_layouts_run_only_where_the_file_was_measured(tmp_path: Path) -> None:
    """Times of this machine beside a plan for another are no comparison; all reasons at once, before any search."""
    file = tmp_path / "here.yaml"

    def reasons(model_text: Any = "tests.models:build", source: Any = None, **options: Any) -> str:
        made = make_request(model(), source or file, **{**SETTINGS, **options})
        return refused(lambda: check_measurable(made, model_text))

    file.write_text(yaml.safe_dump(content()), encoding="utf-8")
    check_measurable(request_on(file), "tests.models:build")
    assert "hybrid calibrate --ranks 4" in reasons(source="1x4xcpu")
    text = reasons("gpt3-125m", optimizer="muon")
    assert "package.module:factory" in text
    assert "optimizer Muon" in text
    machine = {**content()["measured"]["machine"], "hosts": ["another"], "cores": 1000}
    file.write_text(yaml.safe_dump(content(machine=machine)), encoding="utf-8")
    text = reasons()
    assert "host another there" in text
    assert "cores 1000 there" in text


def test_a_calibration_that_could_not_be_written_does_not_begin(tmp_path: Path) -> None:
    """Two minutes of measuring for nothing; and nobody's own cluster file is replaced."""
    (tmp_path / "own.yaml").write_text("cluster: 2x8xH100", encoding="utf-8")
    (tmp_path / "folder.yaml").mkdir()
    for name, reason in (
        ("here.txt", "name it here.yaml"),
        ("missing/here.yaml", "is no folder"),
        ("folder.yaml", "is a folder"),
        ("own.yaml", "it is not replaced"),
    ):
        assert reason in refused(lambda name=name: calibrate(tmp_path / name)), name
    assert "expected a whole number of at least 1" in refused(lambda: calibrate(tmp_path / "here.yaml", ranks=0))
    assert "at most" in refused(
        lambda: calibrate(tmp_path / "here.yaml", ranks=10**6)
    )  # it would take the machine down
    assert "cannot be written (" in refused(lambda: calibrate("/proc/here.yaml", ranks=1))  # permissions say it could


def test_the_file_of_the_page_is_one() -> None:
    """docs/calibrate.md shows what the command writes; people will cut it down by hand."""
    page = (Path(__file__).parents[2] / "docs" / "calibrate.md").read_text(encoding="utf-8")
    shown = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    assert set(shown["measured"]) == set(content()["measured"]) | {"load"}
    assert parse_cluster(shown).measured is not None
