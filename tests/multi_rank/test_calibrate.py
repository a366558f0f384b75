"""`hybrid calibrate` and `hybrid plan --measure` on real ranks: what they find is what the planner takes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hybrid.calibration.calibrate import calibrate
from hybrid.calibration.cluster_content import cluster_content, write_cluster_file
from hybrid.calibration.effort import Effort
from hybrid.calibration.measure_plans import measure_plans
from hybrid.calibration.ranks import measure_here
from hybrid.calibration.trial import TrialResult, TrialSpec, run_trial
from hybrid.contracts.cluster import parse_cluster
from hybrid.contracts.measurements import Measurements
from hybrid.errors import PlanError
from hybrid.launch.machine import this_machine
from hybrid.planner.collectives import collective_seconds, measured_fabric
from hybrid.planner.plan import Plans, plan
from hybrid.planner.software import Software
from hybrid.strategy import DistributedStrategy
from tests.ranks import RankFailure, run_ranks
from tests.runnable.command import hybrid_here

TINY = Effort(
    window_seconds=0.001,
    num_windows=2,
    matmuls=((16, 32, 48),),
    more_dtypes=(),
    attentions=((1, 2, 16, 8),),
    pointwise=(4096, 16384),
    optimizer_elements=4096,
    messages=(1024, 65536),
)
WIDTH, VOCABULARY, TOKENS = 30, 51, 12
REFERENCE = "tests.multi_rank.test_calibrate:gpt"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 90), nn.Linear(90, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def gpt() -> tuple[nn.Module, torch.Tensor]:
    """A model and a sample of it, as `--model` takes them."""
    blocks = [Block() for _ in range(3)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))
    return model, torch.zeros(1, TOKENS, dtype=torch.long)


def other() -> tuple[nn.Module, torch.Tensor]:
    """Not the model that was planned."""
    model, sample = gpt()
    model.append(nn.LayerNorm(VOCABULARY))
    return model, sample


def measured() -> tuple[str, float, int]:
    """On one rank; a second job in the same process must find nothing left of the first."""
    told: list[int] = []
    found = measure_here(is_quick=True, say=lambda done, total, label: told.append(total - done), effort=TINY)
    assert told == sorted(told, reverse=True)
    return found.measurements.model_dump_json(exclude={"seconds", "load"}), found.free_bytes, told[-1]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster file of two ranks of this machine."""
    one, other = run_ranks(measured, 2)
    assert one == other  # medians of all ranks' windows, not of each by itself
    text, free_bytes, left = one
    assert left == 0
    found = Measurements.model_validate({**json.loads(text), "seconds": 1.0})
    path = tmp_path_factory.mktemp("calibrated") / "here.yaml"
    write_cluster_file(path, cluster_content(found, free_bytes))
    return path


def planned(cluster: Path, **options: Any) -> Plans:
    with torch.device("meta"):
        model, _ = gpt()
    sample = torch.zeros(1, TOKENS, dtype=torch.long)
    settings: dict[str, Any] = {"global_batch_size": 8, "precision": "fp32", "sample": sample, **options}
    return plan(model, cluster, **settings)


def test_a_calibrated_machine_is_a_cluster_that_plan_takes(file: Path) -> None:
    """The file has every part, on these ranks; the plan says where its figures come from."""
    cluster = parse_cluster(file)
    found = cluster.measured
    assert found is not None
    assert found.machine.ranks_per_host == cluster.num_devices == 2
    assert {(point.m, point.k, point.n, point.is_weight) for point in found.matmul} == {
        (16, 32, 48, False),
        (32, 16, 48, True),
    }
    assert [point.is_backward for point in found.attention] == [False, True]
    assert len(found.pointwise) == 2
    assert {curve.kind for curve in found.collectives} == {"all_reduce", "all_gather", "reduce_scatter", "send"}
    assert all([one.num_bytes for one in curve.points] == [1024, 65536] for curve in found.collectives)
    assert None not in (found.launch, found.step, found.optimizer_bytes_per_second, found.context_bytes)
    assert cluster.device.flops["fp32"] == pytest.approx(
        2 * 16 * 32 * 48 / min(p.seconds for p in found.matmul), rel=0.01
    )
    best = planned(file).best
    assert best.time.parts["overhead"] == pytest.approx(found.step.step_seconds if found.step else 0.0)
    assert cluster.notes[-1].startswith(f"measured {found.date} by hybrid calibrate on")
    shown = hybrid_here("cluster", "show", str(file), cwd=file.parent)
    assert "2 ranks on" in " ".join(shown.stdout.split())
    assert json.loads(hybrid_here("cluster", "show", str(file), "--json", cwd=file.parent).stdout)["num_devices"] == 2


def in_a_world(spec: TrialSpec, strategy: DistributedStrategy, ranks: int) -> TrialResult:
    results: list[TrialResult] = run_ranks(run_trial, ranks, spec, strategy)
    assert len(set(results)) == 1
    return results[0]


def test_measured_layouts_are_kept_and_correct_the_plan(file: Path) -> None:
    """Run the layouts, compare, remember: the next plan's step is the measured one, and its state was exact."""
    plans = planned(file)
    trials = measure_plans(plans, 2, model=REFERENCE, steps=3, launch=in_a_world)
    assert [trial.candidate.label for trial in trials] == list(plans.advice.measure_first[:2])
    for trial in trials:
        assert trial.num_steps == 3
        assert trial.state_bytes == pytest.approx(trial.predicted_state_bytes, rel=0.01)
        assert trial.process_bytes > trial.tensor_bytes
    again = planned(file)
    assert again.request.correction is not None
    assert again.request.correction.trials == trials
    assert again.request.correction.error_after <= again.request.correction.error_before
    assert planned(file, use_measurements=False).best.time.total_seconds == plans.best.time.total_seconds
    with pytest.raises(PlanError, match="give the model that was planned"):
        measure_plans(again, 1, model="tests.multi_rank.test_calibrate:other", steps=1, launch=in_a_world)
    # A pipeline takes the sample, and is run like any other layout.
    (piped,) = measure_plans(planned(file, fixed={"pp": 2}), 1, model=REFERENCE, steps=1, launch=in_a_world)
    assert piped.candidate.pp == 2


def measured_as_hosts(names: tuple[str, ...]) -> tuple[str, float]:
    """As if each rank were on the host of its name."""
    here = replace(this_machine(), host=names[int(os.environ["RANK"])])
    with mock.patch("hybrid.calibration.ranks.this_machine", return_value=here):
        found = measure_here(is_quick=True, effort=TINY)
    return found.measurements.model_dump_json(), found.free_bytes


def test_several_hosts_are_measured_together() -> None:
    """Near groups, far groups and all ranks have curves of their own, and the plan takes each for its kind."""
    text, free_bytes = run_ranks(measured_as_hosts, 4, ("one", "one", "two", "two"))[0]
    cluster = parse_cluster(cluster_content(Measurements.model_validate_json(text), free_bytes))
    assert (cluster.num_devices, cluster.num_domains) == (4, 2)
    assert cluster.measured is not None
    curves = {(curve.kind, curve.size, curve.stride): curve for curve in cluster.measured.collectives}
    assert {(size, stride) for _, size, stride in curves} == {(2, 1), (2, 2), (4, 1)}
    software = Software(collective_seconds=0.0)
    fabric = measured_fabric(cluster, software)
    for (kind, size, stride), curve in curves.items():
        links = cluster.axis_links(size=size, stride=stride)
        for point in curve.points:
            seconds = collective_seconds(kind, point.num_bytes, links, fabric=fabric, software=software)
            assert seconds == pytest.approx(point.seconds, rel=1e-3), (kind, size, stride)
    with pytest.raises(RankFailure, match="ranks per host differ"):
        run_ranks(measured_as_hosts, 3, ("one", "one", "two"))


def inside_a_job(folder: Path) -> str:
    with pytest.raises(PlanError) as caught:
        calibrate(folder / "here.yaml", ranks=3)
    return str(caught.value)


def test_refused_by_name(file: Path, tmp_path: Path) -> None:
    """Ranks that are not there, and what the command line says of plans that cannot be measured."""
    assert "the launcher has started 2" in run_ranks(inside_a_job, 2, tmp_path)[0]
    done = hybrid_here("calibrate", "--ranks", "0", "--out", "here.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected a whole number of at least 1" in done.stderr
    asked = ("plan", "--model", "gpt3-125m", "--precision", "fp32", "--global-batch", "8", "--measure", "2")
    done = hybrid_here(*asked, "--cluster", "1x2xcpu", cwd=tmp_path)
    assert done.returncode == 2
    assert "first hybrid calibrate --ranks 2" in done.stderr
    assert "package.module:factory" in done.stderr
    done = hybrid_here(*asked, "--cluster", str(file), "--no-measurements", "--why", "tp=2", cwd=tmp_path)
    assert done.returncode == 2
    assert "leave one out" in done.stderr
    assert "looks at others" in done.stderr
