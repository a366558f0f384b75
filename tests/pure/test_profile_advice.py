"""What a profile says: advice by axis, its data form, the table, the peak of a device."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from hybrid.profile.advice import advise, exposed_fraction
from hybrid.profile.peak import peak_flops
from hybrid.profile.profile import Profile, RankProfile, Traffic
from hybrid.profile.table import profile_as_text

SETTINGS: dict[str, Any] = {
    "zero_stage": 2,
    "shard_size": 2,
    "bucket_bytes": 25 * 2**20,
    "num_buckets": 1,
    "gradient_bytes": 16 * 2**20,
    "overlap_comm": True,
    "overlap_param_gather": False,
    "grad_reduce": "every_micro_batch",
    "reshard_after": "unit",
    "prefetch": 1,
    "accumulate_steps": 1,
    "schedule": None,
    "virtual_stages": 1,
    "local_world_size": 8,
}


def profile_of(
    waits: dict[tuple[str, str], list[tuple[float, ...]]],
    *,
    backward: float = 3.0,
    settings: dict[str, Any] | None = None,
    **degrees: int,
) -> Profile:
    """Steps of which 7 s are computed, and waits (axis, op) -> by rank and step."""
    num_ranks = len(next(iter(waits.values())))
    ranks = []
    for rank in range(num_ranks):
        traffic = tuple(
            Traffic(axis=axis, op=op, exposed_by_step=by_rank[rank]) for (axis, op), by_rank in waits.items()
        )
        ranks.append(
            RankProfile(
                rank=rank,
                step_seconds=7.0 + sum(one.exposed_seconds for one in traffic),
                forward_seconds=6.0 - backward,
                backward_seconds=backward,
                optimizer_seconds=0.5,
                other_seconds=0.5,
                between_seconds=0.0,
                traffic=traffic,
                communication_seconds={},
                flops=1e9,
                trace_file=f"rank{rank}.trace.json",
            )
        )
    profile = Profile(
        world_size=num_ranks,
        num_steps=len(next(iter(waits.values()))[0]),
        degrees={"pp": 1, "dp_replicate": 1, "dp_shard": num_ranks, "cp": 1, "tp": 1, **degrees},
        settings=SETTINGS | (settings or {}),
        device="cpu",
        dtype="float32",
        versions={},
        ranks=tuple(ranks),
        untraced_step_seconds=5.0,
        tokens=100.0,
        peak_flops_per_device=None,
        peak_source="no peak is known for CPUs",
    )
    return Profile.from_dict({**profile.to_dict(), "advice": [vars_of(one) for one in advise(profile)]})


def vars_of(advice: Any) -> dict[str, Any]:
    return {name: getattr(advice, name) for name in advice.__dataclass_fields__}


REDUCE = ("dp_shard", "reduce_scatter")


def test_no_advice_up_to_the_threshold() -> None:
    """Protects from talk: 30 % of the step is the border, and it is inclusive."""
    assert advise(profile_of({REDUCE: [(3.0,), (3.0,)]})) == ()
    [advice] = profile_of({REDUCE: [(3.1,), (3.1,)]}).advice
    assert advice.axis == "dp_shard"
    assert advice.fraction == pytest.approx(3.1 / 10.1)


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"overlap_comm": False}, "sharding_configs.overlap_comm"),
        ({}, "sharding_configs.bucket_bytes"),
        ({"num_buckets": 64, "gradient_bytes": 2**20}, "sharding_configs.bucket_bytes"),
        ({"num_buckets": 4, "accumulate_steps": 4}, "sharding_configs.grad_reduce"),
        ({"num_buckets": 4, "accumulate_steps": 4, "grad_reduce": "last_micro_batch"}, "accumulate_steps"),
    ],
)
def test_reduction_names_what_holds_it_back(settings: dict[str, Any], first: str) -> None:
    """Protects the order: what costs nothing comes before what changes the batch."""
    [advice] = profile_of({REDUCE: [(5.0,), (5.0,)]}, settings=settings).advice
    assert advice.settings[0] == first, advice.text
    assert "micro_batch_size" in advice.settings


def test_where_nothing_could_hide_it_accumulation_comes_first() -> None:
    """Smaller buckets overlap with backward only; beside a backward of no length they gain nothing."""
    [advice] = profile_of({REDUCE: [(50.0,), (50.0,)]}, backward=0.1).advice
    assert advice.settings[0] == "accumulate_steps"
    assert "grad_reduce = 'last_micro_batch'" in advice.text


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {"sharding_configs.overlap_param_gather"}),
        ({"zero_stage": 3}, {"sharding_configs.prefetch", "sharding_configs.stage"}),
        (
            {"zero_stage": 3, "accumulate_steps": 2, "prefetch": 2},
            {"sharding_configs.reshard_after", "sharding_configs.stage"},
        ),
        ({"zero_stage": 3, "local_world_size": 1}, {"sharding_configs.shard_size"}),
    ],
)
def test_gathering_names_what_its_stage_has(settings: dict[str, Any], wanted: set[str]) -> None:
    """Protects from settings that do nothing at a stage: `resolve` would refuse them."""
    [advice] = profile_of({("dp_shard", "all_gather"): [(5.0,), (5.0,)]}, settings=settings).advice
    assert wanted <= set(advice.settings), advice.text
    if settings.get("zero_stage") == 3:
        assert "sharding_configs.overlap_param_gather" not in advice.settings


def test_waiting_for_a_late_rank_is_no_transfer() -> None:
    """Protects from changing settings where one rank has the longer batch, even another one in each step."""
    profile = profile_of({REDUCE: [(8.0, 0.1), (0.1, 8.0)]})
    assert exposed_fraction(profile) > 0.3
    [advice] = profile.advice
    assert (advice.axis, advice.settings) == ("", ())
    assert "slower" in advice.text
    [advice] = profile_of({REDUCE: [(9.0, 9.0), (0.1, 0.1)]}).advice
    assert "rank 1" in advice.text


def test_other_axes_have_their_own_advice() -> None:
    """A pipeline waits for its stages, and tensor parallel within a layer; buckets change neither."""
    pipeline = {"accumulate_steps": 2, "schedule": "1f1b"}
    waits = {("pp", "receive"): [(7.0,), (0.5,)], ("pp", "send"): [(0.5,), (0.0,)]}
    [advice] = profile_of(waits, settings=pipeline, pp=2, dp_shard=1).advice
    assert advice.settings == ("accumulate_steps", "pipeline_configs.virtual_stages")
    assert "from 33% to 20%" in advice.text
    [uneven] = profile_of(waits, settings=pipeline | {"accumulate_steps": 16}, pp=2, dp_shard=1).advice
    assert uneven.settings[0] == "pipeline_configs.split"
    [tensor] = profile_of({("tp", "all_reduce"): [(4.0,), (4.0,)]}, tp=2, dp_shard=1).advice
    assert tensor.settings[0] == "tensor_parallel_configs.degree"
    [agreed] = profile_of({("world", "control"): [(4.0,), (4.0,)]}).advice
    assert agreed.settings == ("accumulate_steps",)


def test_data_form_and_table_hold_everything() -> None:
    """Protects `--json`, by which runs are compared, and the table: every rank, axis, rate, and why there is no MFU."""
    profile = profile_of({REDUCE: [(5.0, 5.0), (6.0, 6.0)], ("world", "control"): [(0.0, 0.0), (1.0, 1.0)]})
    facts = json.loads(json.dumps(profile.to_dict()))
    assert Profile.from_dict(facts) == profile
    assert facts["tokens_per_second"] == 20
    assert facts["flops_per_second"] == 4e8
    assert facts["mfu"] is None
    stream = io.StringIO()
    console = Console(file=stream, width=100)
    for part in profile_as_text(profile):
        console.print(part)
    text = " ".join(stream.getvalue().split())
    for words in (
        "rank 0 rank 1",
        "step 13 s 100% 12 s 14 s",
        "exposed communication 6 s 46% 5 s 7 s",
        "dp_shard 5.5 s 42% 5 s 6 s",
        "100 tokens a step, 20 tokens/s",
        "MFU: not given, no peak is known for CPUs",
        "more than 30%",
    ):
        assert words in text, text
    known = Profile.from_dict({**facts, "peak_flops_per_device": 1e9, "peak_source": "H"})
    assert known.mfu == pytest.approx(0.2)


def test_host_times_of_a_gpu_give_no_advice() -> None:
    """The host waits for NCCL nowhere, or for other reasons: advice from its times would be invented."""
    profile = replace(profile_of({REDUCE: [(50.0,), (50.0,)]}), device="NVIDIA H200", advice=())
    assert advise(profile) == ()
    stream = io.StringIO()
    Console(file=stream, width=200).print(*profile_as_text(profile))
    assert "no advice" in stream.getvalue()


def test_many_ranks_are_shown_by_least_and_most() -> None:
    """Protects the table from a column per rank where no terminal is so wide."""
    profile = profile_of({REDUCE: [(float(rank % 7),) for rank in range(64)]})
    stream = io.StringIO()
    Console(file=stream, width=80).print(*profile_as_text(profile))
    assert "rank 63 " not in stream.getvalue()
    assert "least on rank most on rank" in " ".join(stream.getvalue().split())


@pytest.mark.parametrize(
    ("device", "dtype", "kind", "teraflops"),
    [
        ("NVIDIA H200", "bfloat16", "H200-SXM-141GB", 989),
        ("NVIDIA H100 80GB HBM3", "bfloat16", "H100-SXM-80GB", 989),
        ("NVIDIA H100 PCIe", "bfloat16", "H100-PCIe-80GB", 756),
        ("NVIDIA A100-SXM4-80GB", "float16", "A100-SXM", 312),
        ("Tesla V100-SXM2-16GB", "float32", "V100-SXM2", 15.7),
        ("NVIDIA GeForce RTX 4090", "bfloat16", "RTX4090-24GB", 165),
    ],
)
def test_peaks_of_devices_by_their_drivers_names(device: str, dtype: str, kind: str, teraflops: float) -> None:
    """Protects the MFU: drivers call products otherwise than the table of kinds does."""
    peak, name = peak_flops(device, dtype)
    assert peak is not None, name
    assert name.startswith(kind)
    assert peak / 1e12 == pytest.approx(teraflops, rel=0.01)


def test_no_peak_is_said_in_words() -> None:
    """A made-up peak would give a made-up MFU."""
    assert peak_flops("cpu", "float32") == (None, "no peak is known for CPUs")
    peak, why = peak_flops("NVIDIA Tegra X1", "float32")
    assert peak is None
    assert "Tegra X1" in why
    assert peak_flops("Tesla V100-SXM2-16GB", "bfloat16")[0] is None
