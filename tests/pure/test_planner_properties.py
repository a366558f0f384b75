"""What must hold between plans: what is faster is never slower, what is cut keeps no more, what advice says is so."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from hybrid.contracts import cluster_regular
from hybrid.contracts.cluster_shape import add_inside
from hybrid.errors import PlanError
from hybrid.planner.cost import step_time
from hybrid.planner.job import Candidate, Job
from hybrid.planner.memory import memory
from hybrid.planner.options import state_options
from hybrid.planner.plan import plan
from hybrid.planner.remedies import LOSSES, remedy
from hybrid.planner.request_reading import make_request
from hybrid.planner.scaled import scaled_job
from hybrid.planner.traffic import state_bytes


def job_for(model: str, cluster: str, batch: int, **settings: Any) -> Job:
    return make_request(model, cluster, global_batch_size=batch, **settings).job


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("what", ["flops", "memory", "inside"])
def test_a_faster_device_slows_no_pipeline_that_the_host_binds(schedule: str, recompute: Any, what: str) -> None:
    """What launching takes longer was all in the first half of a split backward: the less the second took, the more."""
    job = job_for("gpt2-large", "1x4xH100", 100, seq=128, software="megatron-deepspeed-bf16")
    chunks = 2 if schedule == "zbv" else 1
    candidate = Candidate(
        pp=4, schedule=schedule, virtual_stages=chunks, micro_batch_size=25, num_micro_batches=4, recompute=recompute
    )
    before = step_time(job, candidate)
    assert before.parts["host"] > 0
    for times in (1.5, 2.0, 4.0):
        assert step_time(scaled_job(job, **{what: times}), candidate).total_seconds <= before.total_seconds * (
            1 + 1e-12
        )


def test_a_faster_device_sends_the_gradient_for_the_stage_before_no_later() -> None:
    """In fp32 it leaves before the products of weights: where the host binds, so does what it launches for these."""
    job = job_for("gpt2-large", "1x4xH100", 8, seq=64, precision="fp32")
    candidate = Candidate(pp=4, num_micro_batches=8)
    before = step_time(job, candidate).total_seconds
    for times in (2.0, 8.0, 64.0):
        assert step_time(scaled_job(job, flops=times), candidate).total_seconds <= before * (1 + 1e-12)


@pytest.mark.parametrize("software", ["megatron-core-2025", "sailor", "hybrid"])
@pytest.mark.parametrize(("schedule", "num_micro_batches"), [("1f1b", 1), ("gpipe", 1), ("gpipe", 4), ("1f1b", 8)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_buffers_that_always_hold_gradients_are_there_in_the_first_backward(
    software: str, schedule: str, num_micro_batches: int, recompute: Any
) -> None:
    """A stack with one buffer for all gradients has it beside the activations of all micro-batches, too."""
    job = job_for("llama3-8b", "1x4xA100-80GB", 4 * num_micro_batches, seq=2048, software=software)
    candidate = Candidate(
        pp=4, schedule=schedule, micro_batch_size=4, num_micro_batches=num_micro_batches, recompute=recompute
    )
    for stage in memory(job, candidate).stages:
        assert all(sum(parts.values()) <= stage.tensors_bytes for parts in stage.points.values())
        assert sum(stage.parts.values()) == stage.tensors_bytes


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zbv", 2)])
def test_a_higher_stage_needs_no_more_than_a_lower_one(num_micro_batches: int, schedule: str, chunks: int) -> None:
    """With one micro-batch stage 1 has cut gradients at the end of its backward as stage 2 has."""
    job = job_for("opt-125m", "2x8xH100", 24 * num_micro_batches, seq=1, precision="fp16")
    plain = Candidate(
        pp=2, schedule=schedule, virtual_stages=chunks, micro_batch_size=3, num_micro_batches=num_micro_batches
    )
    cut = replace(plain, dp_shard=8)
    held = [
        memory(job, one).worst.tensors_bytes
        for one in (replace(plain, dp_replicate=8), replace(cut, zero_stage=1), replace(cut, zero_stage=2))
    ]
    assert held[1] <= held[0] * (1 + 1e-3)  # padding is a few kB
    assert held[2] <= held[1] * (1 + 1e-3)


def test_parameters_may_stay_whole_between_the_forward_and_the_backward_of_one_micro_batch() -> None:
    """One gather per step, as stage 2 has one, and no longer than its two."""
    request = make_request("llama3-8b", "2x8xH100", global_batch_size=16, seq=4096)
    base = Candidate(dp_replicate=16, micro_batch_size=1, recompute="full")
    options = [one for one in state_options(request, base) if (one.zero_stage, one.dp_shard) == (3, 16)]
    assert sorted(one.reshard_after for one in options) == ["run", "unit"]
    by_unit, run = sorted(options, key=lambda one: one.reshard_after == "run")
    waits = [step_time(request.job, one).parts["gather_exposed"] for one in (by_unit, run)]
    assert waits[1] < 0.8 * waits[0]
    sent = [state_bytes(1_600_000, request.job.precision, one)["gather"] for one in (by_unit, run)]
    assert sent[0] == 2 * sent[1]
    assert memory(request.job, run).worst.tensors_bytes > memory(request.job, by_unit).worst.tensors_bytes


# What a remedy says -> the same layout with it.
CHANGES: dict[str, dict[str, Any]] = {
    "a smaller tp": {"tp": 2, "dp_replicate": 4},
    "virtual stages": {"schedule": "interleaved", "virtual_stages": 2},
    "more micro-batches": {"micro_batch_size": 1, "num_micro_batches": 16},
    "grad_reduce 'last_micro_batch'": {"grad_reduce": "last_micro_batch"},
    "reshard_after 'run'": {"reshard_after": "run"},
    "a lower ZeRO stage": {"zero_stage": 2},
    "a smaller shard_size": {"dp_replicate": 2, "dp_shard": 8},
    "ZeRO stage 1": {"zero_stage": 1, "dp_replicate": 1, "dp_shard": 16},
    "a larger shard_size": {"dp_replicate": 1, "dp_shard": 16},
    "a larger micro-batch": {"micro_batch_size": 4, "num_micro_batches": 4},
}
LAYOUTS = [
    ("tp_exposed", Candidate(tp=4, dp_replicate=4, num_micro_batches=16), "a smaller tp"),
    ("tp_exposed", Candidate(tp=4, dp_replicate=4, num_micro_batches=16, sequence_parallel=True), "a smaller tp"),
    (
        "pp_bubble", Candidate(pp=4, dp_replicate=4, num_micro_batches=8, micro_batch_size=2),
        "more micro-batches, or virtual stages, or a smaller pp",
    ),
    ("pp_bubble", Candidate(pp=4, dp_replicate=4, num_micro_batches=16, schedule="zb-h1"),
     "a larger global batch, or a smaller pp"),
    (
        "dp_exposed",
        Candidate(dp_shard=16, num_micro_batches=4, zero_stage=2, grad_reduce="every_micro_batch"),
        "grad_reduce 'last_micro_batch', or a larger global batch",
    ),
    ("dp_exposed", Candidate(dp_replicate=16, num_micro_batches=4), "a larger global batch"),
    (
        "gather_exposed", Candidate(dp_shard=16, num_micro_batches=4, zero_stage=3),
        "reshard_after 'run', or a lower ZeRO stage, or a smaller shard_size",
    ),
    ("gather_exposed", Candidate(dp_shard=16, num_micro_batches=4, zero_stage=1), "a smaller shard_size"),
    ("optimizer", Candidate(dp_replicate=16, num_micro_batches=4), "ZeRO stage 1"),
    ("optimizer", Candidate(dp_replicate=2, dp_shard=8, num_micro_batches=4, zero_stage=1), "a larger shard_size"),
    ("optimizer", Candidate(dp_shard=16, num_micro_batches=4, zero_stage=1), "more devices"),
    ("host", Candidate(dp_replicate=16, num_micro_batches=16), "a larger micro-batch, or a compiler that fuses them"),
    ("recompute", Candidate(dp_replicate=16, recompute="full"), "more memory or more tp, so that they can be kept"),
    ("recompute", Candidate(tp=8, dp_replicate=2, recompute="full"), "more memory, so that they can be kept"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "candidate", "ways"), LAYOUTS, ids=lambda value: getattr(value, "label", None))
def test_what_is_told_to_be_smaller_with_something_is(part: str, candidate: Candidate, ways: str) -> None:
    """Not what the layout does already, nor what it cannot do; and the part falls when it is done."""
    is_small = part == "host"
    model, seq = ("gpt3-125m", 64) if is_small else ("gpt3-2.7b", 2048)
    batch = candidate.dp * candidate.micro_batch_size * candidate.num_micro_batches
    job = job_for(model, "2x8xA100-80GB", batch, seq=seq, network="8x100G")
    assert remedy(part, job, candidate) == ways
    before = step_time(job, candidate).parts[part]
    assert before > 0
    for way in ways.split(", or "):
        if way in CHANGES:
            changed = replace(candidate, **CHANGES[way])
            assert step_time(job, changed).parts[part] < before, way


def test_every_loss_has_ways() -> None:
    job = job_for("gpt3-125m", "2x8xH100", 16)
    assert all(remedy(part, job, Candidate(tp=2, pp=2, dp_shard=4, zero_stage=3)) for part in LOSSES)


@pytest.mark.parametrize(("shard_size", "is_slow"), [(8, False), (32, True)])
def test_stage_3_is_slow_where_it_gathers_over_a_slow_network_only(shard_size: int, is_slow: bool) -> None:
    """Shards inside a node are gathered on its own links, whatever joins the nodes."""
    fixed = f"tp=1,pp=1,zero_stage=3,shard_size={shard_size}"
    notes = plan(
        "gpt3-1.3b", "4x8xA100-80GB", global_batch_size=64, network="1x100G", fixed=fixed, num_plans=1
    ).advice.notes
    assert any("stage 3 gathers every unit over" in note for note in notes) == is_slow


def test_a_domain_larger_than_the_cluster_is_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only devices that there are get drawn: a slip of the keyboard took all memory."""
    drawn: list[int] = []

    def count(graph: Any, domain: str, names: list[str], kind: Any) -> None:
        drawn.append(len(names))
        add_inside(graph, domain, names, kind)

    monkeypatch.setattr(cluster_regular, "add_inside", count)
    whole, larger = (job_for("gpt3-125m", "2x8xH100", 16, domain=size).cluster for size in (16, 2**20))
    assert larger.links([[0, 3, 9]]) == whole.links([[0, 3, 9]])
    assert larger.pair(1, 12) == whole.pair(1, 12)
    assert 0 < max(drawn, default=0) <= 16


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"global_batch_size": None}, "global_batch_size = None: expected a whole number"),
        ({"num_plans": None}, "num_plans = None: expected a whole number"),
        ({"fixed": None}, "fixed = None: expected names and values"),
        ({"fixed": {3: 4}}, "fixed = {3: 4}: expected names and values"),
        ({"software": 5}, "software = 5: expected the name"),
        ({"software": {}}, "software = {}: expected the name"),
        ({"memory_bytes": True}, "memory_bytes = True: expected the bytes"),
        ({"flash_attention": "no"}, "flash_attention = 'no': expected True or False"),
        ({"use_measurements": "no"}, "use_measurements = 'no': expected True or False"),
    ],
)
def test_what_is_of_another_type_is_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    """The word "no" was taken for yes, an empty software for the usual one; others ended in a traceback."""
    with pytest.raises(PlanError, match=re.escape(said)):
        plan("gpt3-125m", "8xH100", **{"global_batch_size": 8, **wrong})
