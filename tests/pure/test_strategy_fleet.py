"""Fleet's settings: aliases, older places, one setting from two places (BC-76), dictionaries (BC-78)."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid.errors import StrategyError
from hybrid.strategy import DistributedStrategy
from hybrid.strategy.fleet_refusals import REFUSALS
from hybrid.strategy.resolve import work_out
from tests.pure.strategy_cases import layout_of, nested, problems_of, refused

LEGACY = {"sharding": True, "sharding_configs": {"sharding_degree": 4, "mp_degree": 1, "pp_degree": 1, "dp_degree": 4}}


def test_legacy_sharding_configs_are_replicas_of_shard_groups() -> None:
    """BC-78 (a): 4 replica groups of 4-way shards, and the groups are printed."""
    strategy = DistributedStrategy(LEGACY)
    layout = strategy.resolve(16).layout
    assert layout.groups(("dp_shard",)) == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert layout.groups(("dp_replicate",))[0] == (0, 4, 8, 12)
    assert "(0 1 2 3) (4 5 6 7) (8 9 10 11) (12 13 14 15)" in strategy.explain(16)


def test_legacy_settings_equal_the_native_ones() -> None:
    """BC-78 (a), scaled to 4 processes."""
    legacy = {"sharding_degree": 2, "mp_degree": 1, "pp_degree": 1, "dp_degree": 2}
    native = DistributedStrategy(sharding=True, sharding_configs={"shard_size": 2}).resolve(4)
    ported = DistributedStrategy(sharding=True, sharding_configs=legacy).resolve(4)
    assert ported.layout == native.layout
    assert (ported.zero_stage, ported.shard_size) == (native.zero_stage, native.shard_size) == (1, 2)


def test_order_as_text_keeps_mp_innermost() -> None:
    """BC-78 (b)."""
    configs = {"dp_degree": 2, "mp_degree": 2, "pp_degree": 2, "sharding_degree": 1, "order": "pp,dp,sharding,mp"}
    layout = layout_of({"hybrid_configs": configs}, 8)
    assert [axis for axis in layout.axis_names if layout.degree(axis) > 1] == ["pp", "dp_replicate", "tp"]
    assert layout.groups(("tp",)) == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_disagreeing_dictionaries_are_refused_with_both_values() -> None:
    """BC-78 (c)."""
    settings = {**LEGACY, "hybrid_configs": {"sharding_degree": 2}}
    refused(
        settings, 16, "sharding_configs.sharding_degree = 4", "hybrid_configs.sharding_degree = 2", "different values"
    )


def test_a_missing_dp_degree_is_derived_and_said() -> None:
    """BC-78 (d)."""
    strategy = DistributedStrategy(sharding=True, sharding_configs={"sharding_degree": 8})
    assert strategy.resolve(16).layout.degree("dp_replicate") == 2
    line = next(line for line in strategy.explain(16).splitlines() if line.strip().startswith("dp_replicate "))
    assert "derived: data-parallel size 16 / dp_shard 8" in line


def test_a_missing_stage_is_printed_as_the_default() -> None:
    """BC-78 (e): stage 1, as in Fleet."""
    line = next(line for line in DistributedStrategy(LEGACY).explain(16).splitlines() if "zero_stage" in line)
    assert line.split() == ["zero_stage", "1", "default"]


def test_a_sharding_degree_in_hybrid_configs_switches_stage_1_on() -> None:
    """Protects Fleet scripts, where that degree alone shards the optimizer state; it is said in a note."""
    strategy = DistributedStrategy(hybrid_configs={"sharding_degree": 4})
    resolved = strategy.resolve(8)
    assert (resolved.zero_stage, resolved.shard_size, resolved.data_parallel_size) == (1, 4, 8)
    assert any("hybrid_configs.sharding_degree = 4 switches sharding on" in note for note in resolved.notes)
    strategy.sharding = False
    (problem,) = strategy.problems(8)
    assert "sharding = False, but hybrid_configs.sharding_degree = 4" in problem


@pytest.mark.parametrize(
    "sections",
    [
        {"accumulate_steps": 4, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
        {"accumulate_steps": 4, "sharding": True, "sharding_configs": {"gradient_merge_acc_step": 2}},
        {"accumulate_steps": 4, "hybrid_configs": {"sharding_configs": {"accumulate_steps": 2}}},
    ],
)
def test_accumulation_from_two_places_must_agree(sections: dict[str, Any]) -> None:
    """BC-76: differing values are refused with both places; equal ones pass."""
    refused(sections, 2, "accumulate_steps = 4", "= 2", "different values", "keep one")
    agreed = DistributedStrategy({**sections, "accumulate_steps": 2})
    assert agreed.resolve(2).accumulate_steps == 2
    assert "accumulate_steps = " in agreed.explain(2)


def test_micro_batch_size_from_two_places_must_agree() -> None:
    """BC-76, in the pipeline section, which may stand without a second stage."""
    settings = {
        "micro_batch_size": 4,
        "pipeline": True,
        "pipeline_configs": {"degree": 1, "micro_batch_size": 2, "accumulate_steps": 8},
    }
    refused(settings, 2, "micro_batch_size = 4", "pipeline_configs.micro_batch_size = 2")
    resolved = DistributedStrategy({**settings, "micro_batch_size": 2}).resolve(2)
    assert (resolved.micro_batch_size, resolved.accumulate_steps, resolved.global_batch_size) == (2, 8, 32)


def test_bucket_sizes_in_two_units_are_compared_in_bytes() -> None:
    """BC-76: 32 MiB is 32 MiB, in whichever field; a contradiction shows both spellings."""
    settings = {"sharding": True, "sharding_configs": {"bucket_bytes": "32MiB"}, "fuse_grad_size_in_MB": 32}
    assert DistributedStrategy(settings).resolve(2).bucket_bytes == 32 * 2**20
    refused(
        {**settings, "fuse_grad_size_in_MB": 16},
        2,
        "sharding_configs.bucket_bytes = 33554432",
        "fuse_grad_size_in_MB = 16 (as bucket_bytes: 16777216)",
    )


def test_setting_one_key_keeps_the_others_of_the_section() -> None:
    """BC-76: overriding one key must not replace the section."""
    strategy = DistributedStrategy(sharding=True, sharding_configs={"stage": 2, "bucket_bytes": 64})
    strategy.sharding_configs["stage"] = 1
    assert strategy.sharding_configs.to_dict() == {"stage": 1, "bucket_bytes": 64}


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({"fuse_grad_size_in_MB": 4}, "bucket_bytes", 4 * 2**20),
        ({"hybrid_configs": {"sharding_configs": {"comm_buffer_size_MB": 4}}}, "bucket_bytes", 4 * 2**20),
        ({"sharding": True, "sharding_configs": {"segment_broadcast_MB": 4}}, "bucket_bytes", 4 * 2**20),
        ({"sharding": True, "sharding_configs": {"optimize_offload": True}}, "offload", "optimizer"),
        ({"sharding": True, "sharding_configs": {"optimize_offload": False}}, "offload", "none"),
        ({"hybrid_configs": {"sharding_configs": {"comm_overlap": False}}}, "overlap_comm", False),
        ({"gradient_scale_configs": {"scale_strategy": "sum"}}, "loss_reduction", "sum"),
        ({"fp16_allreduce": True}, "reduce_dtype", "float16"),
        ({"fp16_allreduce": False}, "reduce_dtype", "grad"),
        (
            {"hybrid_configs": {"sharding_degree": 2, "sharding_configs": {"split_param": True}}},
            "partition",
            "element",
        ),
        (
            {"hybrid_configs": {"sharding_degree": 2, "sharding_configs": {"split_param": "false"}}},
            "partition",
            "parameter",
        ),
    ],
)
def test_mapped_fields_are_used_and_said(settings: dict[str, Any], name: str, value: object) -> None:
    resolved = DistributedStrategy(settings).resolve(2)
    assert getattr(resolved, name) == value
    assert any(name in note for note in resolved.notes), resolved.notes


@pytest.mark.parametrize(
    ("flags", "level", "dtype"),
    [
        ({"use_pure_fp16": True}, "O2", "float16"),
        ({"use_pure_bf16": "true", "use_pure_fp16": False}, "O2", "bfloat16"),
        ({"use_pure_bf16": True, "level": "O2", "dtype": "bf16"}, "O2", "bfloat16"),
        ({"use_pure_fp16": False}, "O1", "bfloat16"),
    ],
)
def test_pure_precision_is_a_level_and_a_dtype(flags: dict[str, Any], level: str, dtype: str) -> None:
    """Protects Fleet's O2 scripts; what they say is shown with its path."""
    strategy = DistributedStrategy(amp=True, amp_configs=flags)
    resolved = strategy.resolve(2)
    assert resolved.amp is not None
    assert (resolved.amp.level, resolved.amp.dtype) == (level, dtype)
    assert all(f"amp_configs.{flag}" in strategy.explain(2) for flag in flags)


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ({"use_pure_fp16": True, "level": "O1"}, ["level = 'O1'", "use_pure_fp16 = True (as amp_level: 'O2')"]),
        (
            {"use_pure_fp16": True, "dtype": "bf16"},
            ["dtype = 'bfloat16'", "use_pure_fp16 = True (as amp_dtype: 'float16')"],
        ),
        (
            {"use_pure_fp16": True, "use_pure_bf16": True},
            ["use_pure_fp16 = True (as amp_dtype", "use_pure_bf16 = True"],
        ),
    ],
)
def test_pure_precision_must_agree_with_level_and_dtype(configs: dict[str, Any], words: list[str]) -> None:
    refused({"amp": True, "amp_configs": configs}, 2, *words)


def test_what_always_happens_here_is_accepted_with_a_note() -> None:
    resolved = DistributedStrategy(find_unused_parameters=True, fuse_all_reduce_ops=False).resolve(2)
    assert any("find_unused_parameters = True: unused parameters are always handled" in note for note in resolved.notes)


@pytest.mark.parametrize(("path", "off", "reason"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_refused_fields_say_why_and_their_off_values_pass(path: str, off: tuple[object, ...], reason: str) -> None:
    """Protects against a Fleet setting that is taken and then ignored: 'off' is the only thing it can say."""
    problems = problems_of(lambda: DistributedStrategy(nested(path, "something else")))
    assert len(problems) == 1
    assert problems[0].startswith(f"{path} = 'something else': {reason}")
    assert len(reason) > 20
    for value in off:
        strategy = DistributedStrategy(nested(path, value))
        assert nested(path, value) == strategy.to_dict()
        assert any(path in row and "asks for nothing" in note for row, _, note in work_out(strategy, 1).gathered.fleet)


@pytest.mark.parametrize(
    ("settings", "way_out"),
    [
        ({"lamb": True}, "distributed_optimizer"),
        ({"lars": "true"}, "distributed_optimizer"),
        ({"dgc": True}, "gradient accumulation"),
        ({"localsgd": True}, "accumulate_steps"),
        ({"sync_batch_norm": True}, "convert_sync_batchnorm"),
        ({"hybrid_configs": {"ep_degree": 2}}, "not available yet"),
        ({"hybrid_configs": {"sharding_configs": {"offload_opt_buffer_size": 8}}}, "offload = 'optimizer'"),
    ],
)
def test_refusals_show_the_way(settings: dict[str, Any], way_out: str) -> None:
    assert way_out in problems_of(lambda: DistributedStrategy(settings))[0]


@pytest.mark.parametrize(
    ("value", "meant"), [(True, "optimizer"), ("false", "none"), (None, "none"), ("Parameters", "parameters")]
)
def test_offload_takes_fleets_boolean(value: object, meant: str) -> None:
    """Protects Fleet's scripts, whose `offload` is a boolean, and the text form, in which it stays what it means."""
    strategy = DistributedStrategy({"sharding": True, "sharding_configs": {"stage": 3, "offload": value}})
    assert strategy.resolve(2).offload == meant
    assert DistributedStrategy(strategy.to_dict()) == strategy


def test_offloaded_parameters_need_stage_3() -> None:
    """Protects against a setting that could do nothing: below stage 3 no rank has a part of the parameters only."""
    for stage in (0, 1, 2):
        settings = {"sharding": True, "sharding_configs": {"stage": stage, "offload": "parameters"}}
        refused(settings, 2, f"at stage {stage}", "choose stage 3", "'optimizer', which works at every stage")
    refused({"sharding_configs": {"offload": "optimizer"}}, 2, "sharding was not set", "set sharding = True")
    both = {"stage": 3, "offload": "parameters", "optimize_offload": True}
    refused({"sharding": True, "sharding_configs": both}, 2, "2 places", "optimize_offload")
    problems_of(lambda: DistributedStrategy({"sharding_configs": {"offload": "cpu"}}))


def test_fields_of_fleet_can_be_read_and_taken_back() -> None:
    strategy = DistributedStrategy()
    assert strategy.lamb is False  # type: ignore[attr-defined]
    strategy.fuse_grad_size_in_MB = "16"
    assert strategy.fuse_grad_size_in_MB == 16  # type: ignore[attr-defined]
    strategy.fuse_grad_size_in_MB = None
    assert strategy == DistributedStrategy()
    with pytest.raises(StrategyError):
        strategy.fuse_grad_size_in_MB = 0


def test_degrees_of_hybrid_configs_need_no_flag_and_open_the_section() -> None:
    """Protects Fleet's dygraph scripts, which give pipeline_configs and pp_degree without `pipeline = True`."""
    strategy = DistributedStrategy(
        hybrid_configs={"pp_degree": 2}, pipeline_configs={"accumulate_steps": 4, "micro_batch_size": 2}
    )
    resolved = strategy.resolve(4)
    assert resolved.pipeline is not None
    assert (resolved.pipeline.degree, resolved.accumulate_steps, resolved.micro_batch_size) == (2, 4, 2)


def test_the_default_order_is_said_where_it_differs_from_fleets() -> None:
    result = work_out(DistributedStrategy(hybrid_configs={"pp_degree": 2, "dp_degree": 2}), 4)
    assert any("Fleet's default has dp outermost" in note for note in result.notes)
