"""Profiles of real steps: what they measure, what they advise, what they leave behind."""

from __future__ import annotations

import csv
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hybrid
from hybrid.collectives import ranges
from hybrid.collectives.shared_memory import OFF_VARIABLE
from hybrid.profile.profile import Profile
from hybrid.profile.step_profiler import StepProfiler
from tests.ranks import run_ranks


def trained(
    sizes: tuple[int, ...],
    samples: int,
    directory: Path | None,
    *,
    num_steps: int = 3,
    fails_at: int | None = None,
    **settings: Any,
) -> list[float]:
    """Losses of a chain of layers; with a directory the last steps but one are profiled."""
    if directory is not None:
        settings |= {"profile": True, "profile_configs": {"steps": 1, "warmup": 1, "directory": str(directory)}}
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    model = hybrid.distributed_model(nn.Sequential(*layers), strategy=hybrid.DistributedStrategy(settings))
    optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    rank = hybrid.get_mesh().coordinate("dp_shard")
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(samples, sizes[0], generator=generator)
    labels = torch.randn(samples, sizes[-1], generator=generator)
    losses = []
    for step in range(num_steps):
        given = (inputs, labels) if step != fails_at else (inputs[:, :-1], labels)
        try:
            losses.append(float(model.train_batch(given, optimizer, loss_fn=nn.functional.mse_loss).loss))
        except RuntimeError:
            assert step == fails_at
    assert ranges.get_listener() is None
    assert StepProfiler._under_way is None
    return losses


def trained_over_gloo(*args: Any, **strategy: Any) -> Any:
    os.environ[OFF_VARIABLE] = "0"
    return trained(*args, **strategy)


def profiled(directory: Path) -> Profile:
    return Profile.from_dict(json.loads((directory / "profile.json").read_text()))


def names_in(trace: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}


def test_a_run_bound_by_communication_is_told_to_send_less_often(tmp_path: Path) -> None:
    """The advice is what a profile is for: 32 MiB of gradients for two samples must name the axis and accumulation."""
    stage = {"sharding": True, "sharding_configs": {"stage": 2}}
    run_ranks(trained_over_gloo, 2, (2048, 2048, 2048), 2, tmp_path, **stage)
    profile = profiled(tmp_path)
    about_axis = [advice for advice in profile.advice if advice.axis == "dp_shard"]
    assert about_axis, profile.advice
    assert "accumulate_steps" in about_axis[0].settings
    for rank in profile.ranks:
        parts = rank.compute_seconds + rank.optimizer_seconds + rank.other_seconds + rank.exposed_seconds
        assert parts == pytest.approx(rank.step_seconds)
        assert rank.communication_seconds["dp_shard"] >= rank.exposed("dp_shard") > 0
        sent = {one.op: one.sent_bytes for one in rank.traffic if one.axis == "dp_shard"}
        assert sent["reduce_scatter"] == pytest.approx(2 * 2048 * 2049 * 4 / 2, rel=0.01)
    # Two layers, forward and the weights' gradients; and the inputs' gradient of the second.
    assert profile.flops_per_step == pytest.approx(2 * 5 * 2 * 2 * 2048**2, rel=0.01)


@pytest.mark.full  # what others do on the machine makes ranks wait, and the shares of a step with it
def test_a_run_bound_by_computation_is_left_alone(tmp_path: Path) -> None:
    """Protects from advice that would change a layout for nothing: many samples, few parameters."""
    stage = {"sharding": True, "sharding_configs": {"stage": 1}}
    run_ranks(trained, 2, (256, 256, 256), 4096, tmp_path, **stage)
    # On a busy machine a rank may come late, which is said; but no setting is blamed.
    assert [advice.settings for advice in profiled(tmp_path).advice if advice.settings] == []


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (
            {"sharding": True, "sharding_configs": {"stage": 3, "units": ["Sequential"]}, "accumulate_steps": 2},
            {
                "forward micro-batch 1",
                "backward micro-batch 0",
                "gather unit 1",
                "reduce bucket 0",
                "reduce_scatter dp_shard",
                "optimizer step",
                "step 2",
            },
        ),
        (
            {"pipeline": True, "pipeline_configs": {"degree": 2, "accumulate_steps": 2}},
            {"forward F0.1", "backward B0.0", "receive pp_backward", "optimizer step"},
        ),
        (
            {"sharding": True, "sharding_configs": {"stage": 1}, "recompute": True},
            {"gather bucket 0", "all_gather dp_shard", "settle, norm and clip"},
        ),
    ],
    ids=["stage 3", "pipeline", "recompute"],
)
def test_numbers_stay_and_the_trace_has_the_names(settings: dict[str, Any], wanted: set[str], tmp_path: Path) -> None:
    """Protects the training from being changed by those who watch it, and the trace from names nobody finds."""
    sizes = (15, 17, 17, 17, 3)
    losses = run_ranks(trained, 2, sizes, 4, tmp_path, **settings)
    assert losses == run_ranks(trained, 2, sizes, 4, None, **settings)
    assert wanted <= names_in(tmp_path / "rank0.trace.json")
    assert (tmp_path / "rank1.trace.json").exists()
    assert (profiled(tmp_path).flops_per_step or 0) > 0


def test_a_step_that_fails_ends_the_profile_and_not_the_training(tmp_path: Path) -> None:
    """Protects who catches an error and goes on: torch has one profiler, which must be free again."""
    losses = run_ranks(trained, 2, (15, 17, 17), 4, tmp_path, fails_at=1, num_steps=4)
    assert len(losses[0]) == 3
    assert not (tmp_path / "profile.json").exists()


def logged(directory: Path) -> list[Any]:
    torch.manual_seed(7)
    model = hybrid.distributed_model(nn.Linear(5, 3), strategy=hybrid.DistributedStrategy(gradient_clipping=1.0))
    optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.4))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    records: list[hybrid.StepRecord] = []
    model.add_step_callback(hybrid.CsvLogger(directory / "logs" / "run.csv", every=2), first_step=11)
    remove = model.add_step_callback(records.append)
    batch = (torch.ones(4, 5), torch.ones(4, 3))
    results = []
    for step in (True, False, True, True, True):
        if len(records) == 3:
            remove()
        results.append(model.train_batch(batch, optimizer, schedule, loss_fn=nn.functional.mse_loss, step=step))
    assert [record.loss for record in records] == [results[index].loss for index in (0, 2, 3)]
    assert records[0].samples == results[0].samples == 8
    assert records[0].memory_bytes["parameters"] >= 72
    assert not hasattr(records[0], "__dict__")
    return [(record.step, record.lr, record.skipped, record.rank) for record in records]


def test_callbacks_hear_of_every_step_once_and_one_rank_writes(tmp_path: Path) -> None:
    """Protects the curves of a run: the step's own learning rate, numbers that go on, no line of each rank."""
    for rank, records in enumerate(run_ranks(logged, 2, tmp_path)):
        assert records == [(1, (0.4,), False, rank), (2, (0.2,), False, rank), (3, (0.1,), False, rank)]
    with (tmp_path / "logs" / "run.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["12", "14"]
    assert [float(row["lr"]) for row in rows] == [0.2, 0.05]
    assert all(float(row["loss"]) > 0 and float(row["grad_norm"]) > 0 for row in rows)
    run_ranks(logged, 2, tmp_path)  # a run that goes on appends
    assert (tmp_path / "logs" / "run.csv").read_text().count("step") == 1
    assert len((tmp_path / "logs" / "run.csv").read_text().splitlines()) == 5
