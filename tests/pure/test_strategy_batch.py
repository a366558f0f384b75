"""The batch equation, and settings that would do nothing next to others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.errors import StrategyError
from hybrid.strategy import DistributedStrategy, GradientClipping
from hybrid.strategy.resolved import AmpSettings, PipelineSettings, RecomputeSettings, TensorParallelSettings
from tests.pure.strategy_cases import refused

BATCH = ("micro_batch_size", "accumulate_steps", "global_batch_size")


@pytest.mark.parametrize(
    ("given_sizes", "expected"),
    [
        ({}, (None, 1, None)),
        ({"accumulate_steps": 3}, (None, 3, None)),
        ({"micro_batch_size": 2}, (2, 1, 8)),
        ({"micro_batch_size": 2, "accumulate_steps": 3}, (2, 3, 24)),
        ({"global_batch_size": 24}, (6, 1, 24)),
        ({"global_batch_size": 24, "micro_batch_size": 2}, (2, 3, 24)),
        ({"global_batch_size": 24, "accumulate_steps": 3}, (2, 3, 24)),
        ({"global_batch_size": 24, "accumulate_steps": 3, "micro_batch_size": 2}, (2, 3, 24)),
    ],
)
def test_the_missing_size_follows(given_sizes: dict[str, int], expected: tuple[int | None, ...]) -> None:
    resolved = DistributedStrategy(given_sizes).resolve(4)
    assert tuple(getattr(resolved, name) for name in BATCH) == expected


@pytest.mark.parametrize(
    ("given_sizes", "words"),
    [
        (
            {"global_batch_size": 20, "micro_batch_size": 2, "accumulate_steps": 3},
            ["global_batch_size = 20", "micro_batch_size 2 × accumulate_steps 3 × data-parallel size 4 = 24", "= 24"],
        ),
        (
            {"global_batch_size": 32, "micro_batch_size": 2, "accumulate_steps": 3},
            ["accumulate_steps = 4", "global_batch_size = 24"],
        ),
        ({"global_batch_size": 30}, ["30", "data-parallel size 4", "28 or 32"]),
        ({"global_batch_size": 32, "micro_batch_size": 3}, ["= 12", "24 or 36", "micro_batch_size = 2 or 4"]),
        ({"global_batch_size": 3, "micro_batch_size": 1}, ["= 4", "global_batch_size = 4"]),
        ({"global_batch_size": 32, "accumulate_steps": 5}, ["= 20", "20 or 40", "accumulate_steps = 4 or 8"]),
        (
            {"global_batch_size": 32, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 5}},
            ["not a multiple of gradient_merge_configs.k_steps 5 ×", "gradient_merge_configs.k_steps = 4 or 8"],
        ),
    ],
)
def test_sizes_that_contradict_are_refused_with_values_that_work(given_sizes: dict[str, int], words: list[str]) -> None:
    refused(given_sizes, 4, *words)


@given(st.fixed_dictionaries({}, optional={name: st.integers(1, 24) for name in BATCH}), st.integers(1, 6))
@settings(deadline=None)
def test_the_equation_holds_or_a_problem_names_it(given_sizes: dict[str, int], world_size: int) -> None:
    """Protects the loss scale: a batch that is not what was said would change the learning."""
    strategy = DistributedStrategy(given_sizes)
    if strategy.problems(world_size):
        assert "global_batch_size" in given_sizes
        return
    resolved = strategy.resolve(world_size)
    for name, value in given_sizes.items():
        assert getattr(resolved, name) == value
    if "global_batch_size" in given_sizes or "micro_batch_size" in given_sizes:
        assert resolved.micro_batch_size is not None
        product = resolved.micro_batch_size * resolved.accumulate_steps * resolved.data_parallel_size
        assert resolved.global_batch_size == product


def stage(number: int, **more: Any) -> dict[str, Any]:
    return {"sharding": True, "sharding_configs": {"stage": number, **more}}


LOSS_SCALING = {"init_loss_scaling": 1024.0, "growth_interval": 100, "growth_factor": 4.0, "backoff_factor": 0.25}


@pytest.mark.parametrize(
    ("given_settings", "words"),
    [
        (stage(0, overlap_param_gather=True), ["overlap_param_gather = True", "does nothing at stage 0"]),
        (stage(0, partition="element"), ["partition = 'element'", "does nothing at stage 0"]),
        (stage(1, grad_reduce="every_micro_batch"), ["grad_reduce = 'every_micro_batch'", "stage 1", "stage 2"]),
        (
            {**stage(2, grad_reduce=4), "accumulate_steps": 2},
            ["grad_reduce = 4", "accumulate_steps 2", "from 1 to 2"],
        ),
        (
            {"hybrid_configs": {"sharding_configs": {"split_param": True}}},
            ["split_param = True (as partition: 'element')", "while sharding is off"],
        ),
        (
            stage(2, grad_reduce=2),
            ["grad_reduce = 2", "accumulate_steps 1 (the default)", "leave it out, or give more accumulate_steps"],
        ),
        (
            {**stage(2, grad_reduce=4), "global_batch_size": 8, "micro_batch_size": 2},
            ["grad_reduce = 4", "accumulate_steps 2 (derived)"],
        ),
        (stage(2, units=["Block"]), ["sharding_configs.units = ['Block'] does nothing at stage 2", "choose stage 3"]),
        (stage(1, prefetch=0), ["sharding_configs.prefetch = 0 does nothing at stage 1", "choose stage 3"]),
        (
            {"amp": True, "amp_configs": {"level": "O2", "dtype": "float16"}, **stage(2, grad_dtype="param")},
            ["grad_dtype = 'param'", "cannot be unscaled", "'float32'"],
        ),
        (stage(3, overlap_param_gather=True), ["overlap_param_gather = True does nothing at stage 3", "prefetch"]),
        *(
            (
                {"amp": True, "amp_configs": {key: value}},
                [f"amp_configs.{key} = {value!r} does nothing", "dtype = 'bfloat16' (the default)", "'float16'"],
            )
            for key, value in LOSS_SCALING.items()
        ),
        (
            {"amp": True, "amp_configs": {"use_pure_bf16": True, "incr_ratio": 4}},
            ["amp_configs.incr_ratio = 4.0", "use_pure_bf16 = True (as amp_dtype: 'bfloat16')"],
        ),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused_by_name(given_settings: dict[str, Any], words: list[str]) -> None:
    refused(given_settings, 2, *words)


@pytest.mark.parametrize(
    "given_settings",
    [
        stage(0, bucket_bytes=1, overlap_comm=False, overlap_param_gather=False, grad_reduce="last_micro_batch"),
        stage(1, partition="parameter", overlap_param_gather=True, grad_dtype="param"),
        {**stage(2, grad_reduce=2, partition="element", reduce_dtype="float32"), "accumulate_steps": 4},
        stage(2, grad_reduce="last_micro_batch"),
        stage(3, units=["Block"], prefetch=0, partition="parameter", overlap_param_gather=False),
        {**stage(3, grad_reduce=2, shard_size=1, reduce_dtype="bf16"), "accumulate_steps": 2, "recompute": True},
        {"amp": True, "amp_configs": {"dtype": "fp16", "custom_fp32": ["LayerNorm"], **LOSS_SCALING}},
        {"amp": True, "amp_configs": {"level": "o2", "dtype": "bf16"}, **stage(3, grad_dtype="bfloat16")},
        {"amp": True, "amp_configs": {"level": "O2", "dtype": "float16"}, **stage(2, grad_dtype="float32")},
        {"recompute": True, "recompute_configs": {"units": ["h.0"], "policy": "selective", "preserve_rng": False}},
    ],
)
@pytest.mark.parametrize("world_size", [1, 4])
def test_what_makes_sense_is_accepted_on_one_process_and_on_several(
    given_settings: dict[str, Any], world_size: int
) -> None:
    DistributedStrategy(given_settings).resolve(world_size)


@pytest.mark.parametrize(
    ("number", "grad_reduce"),
    [(0, "last_micro_batch"), (1, "last_micro_batch"), (2, "every_micro_batch"), (3, "every_micro_batch")],
)
def test_auto_reduction_follows_the_stage(number: int, grad_reduce: str) -> None:
    assert DistributedStrategy(stage(number, grad_reduce="auto")).resolve(2).grad_reduce == grad_reduce


@pytest.mark.parametrize(
    ("given_settings", "words"),
    [
        ({"hybrid_configs": {"sep_degree": 2}}, ["sep_degree = 2", "context parallel"]),
        ({"hybrid_configs": {"sep_degree": -1, "dp_degree": 1}}, ["sep_degree = 2", "context parallel"]),
    ],
)
def test_what_is_not_built_is_refused_with_that_word(given_settings: dict[str, Any], words: list[str]) -> None:
    """Protects against a setting that is accepted before anything acts on it."""
    refused(given_settings, 2, "not available yet", *words)


def test_tensor_parallel_arrives_as_given() -> None:
    """Protects every field on its way to the runtime, under our names and Fleet's."""
    plan = {"blocks.*.qkv": {"style": "colwise", "fused": 3}, "blocks.*.proj": "rowwise"}
    resolved = DistributedStrategy(
        tensor_parallel=True,
        tensor_parallel_configs={"mp_degree": 2, "sequence_parallel": True, "plan": plan, "verify": True},
    ).resolve(4)
    assert resolved.tensor_parallel == TensorParallelSettings(degree=2, sequence_parallel=True, plan=plan, verify=True)
    assert (resolved.data_parallel_size, resolved.layout.degree("tp")) == (2, 2)
    assert DistributedStrategy(hybrid_configs={"mp_degree": 1}).resolve(4).tensor_parallel is None


@pytest.mark.parametrize("setting", [{"sequence_parallel": True}, {"plan": {"a": "colwise"}}, {"verify": True}])
def test_settings_of_tensor_parallel_need_a_degree_above_1(setting: dict[str, Any]) -> None:
    """Protects against a setting that would do nothing."""
    given_settings = {"tensor_parallel": True, "tensor_parallel_configs": {"degree": 1, **setting}}
    refused(given_settings, 2, f"tensor_parallel_configs.{next(iter(setting))}", "degree of 1")


@pytest.mark.parametrize("plan", [{}, [], {"a": 3}, {3: "colwise"}, {"": "colwise"}, "colwise"])
def test_a_plan_of_another_form_is_refused(plan: Any) -> None:
    with pytest.raises(StrategyError, match=r"tensor_parallel_configs\.plan = "):
        DistributedStrategy(tensor_parallel=True, tensor_parallel_configs={"degree": 2, "plan": plan})


def test_a_pipeline_arrives_as_given() -> None:
    """Protects every field on its way to the runtime, under our names and Fleet's."""
    configs = {
        "pp_degree": 2,
        "schedule_mode": "VPP",
        "virtual_stages": 2,
        "accumulate_steps": 4,
        "split": [1, 2, 2, 1],
    }
    resolved = DistributedStrategy(pipeline=True, accumulate_steps=4, pipeline_configs=configs).resolve(4)
    assert resolved.pipeline == PipelineSettings(degree=2, schedule="interleaved", virtual_stages=2, split=(1, 2, 2, 1))
    assert resolved.pipeline.num_chunks == 4
    names = {"FThenB": "gpipe", "VPP": "interleaved", "ZBH1": "zb-h1", "ZBVPP": "zbv"}
    for fleet, name in names.items():
        assert DistributedStrategy(pipeline_configs={"schedule_mode": fleet}).pipeline_configs["schedule"] == name
    assert DistributedStrategy(hybrid_configs={"pp_degree": 1}).resolve(4).pipeline is None


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ({"degree": 1, "schedule": "gpipe"}, "pipeline degree of 1"),
        ({"degree": 1, "split": "uniform"}, "pipeline degree of 1"),
        ({"degree": 2, "schedule": "interleaved", "virtual_stages": 2, "accumulate_steps": 3}, "use 2 or 4"),
        ({"degree": 2, "schedule": "1f1b", "virtual_stages": 2, "accumulate_steps": 4}, "virtual_stages"),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused_before_anything_starts(configs: dict[str, Any], words: str) -> None:
    refused({"pipeline": True, "pipeline_configs": configs}, 4, words)


@pytest.mark.parametrize("split", ["half", "layer:", [], [0, 2], ["a", 2], [" "], 3])
def test_a_split_of_another_form_is_refused(split: Any) -> None:
    with pytest.raises(StrategyError, match=r"pipeline_configs\.split = "):
        DistributedStrategy(pipeline=True, pipeline_configs={"degree": 2, "split": split})


def test_mixed_precision_and_recompute_arrive_as_given() -> None:
    """Protects every field on its way to the runtime, under our names and Fleet's."""
    amp = {"dtype": "half", "level": "O2", "custom_black_list": ["Norm"], "incr_every_n_steps": 3, "decr_ratio": 0.25}
    resolved = DistributedStrategy(
        amp=True, amp_configs=amp, recompute=True, recompute_configs={"units": ["Block"], "preserve_rng": False}
    ).resolve(2)
    assert resolved.amp == AmpSettings(
        dtype="float16",
        level="O2",
        custom_fp32=("Norm",),
        init_loss_scaling=65536.0,
        growth_interval=3,
        growth_factor=2.0,
        backoff_factor=0.25,
    )
    assert resolved.recompute == RecomputeSettings(units=("Block",), policy="full", preserve_rng=False)
    assert DistributedStrategy().resolve(2).amp is DistributedStrategy().resolve(2).recompute is None


def test_gradients_of_bfloat16_do_not_fit_into_float16() -> None:
    """Protects against gradients that become zero or infinite: nothing scales them into the smaller range."""
    low = {"amp": True, "amp_configs": {"level": "O2"}}
    refused({**stage(2, grad_dtype="float16"), **low}, 2, "grad_dtype = 'float16' with amp_configs.dtype = 'bfloat16'")
    DistributedStrategy({**stage(2, grad_dtype="param"), **low}).resolve(2)


def test_float16_on_the_wire_without_a_loss_scale_is_said() -> None:
    sent = stage(1, reduce_dtype="float16")
    assert any("below about 6e-8 become zero" in note for note in DistributedStrategy(sent).resolve(2).notes)
    scaled = DistributedStrategy({**sent, "amp": True, "amp_configs": {"dtype": "float16"}}).resolve(2)
    assert scaled.notes == ()


@pytest.mark.parametrize(
    ("given_clip", "expected"),
    [
        (None, None),
        (1, GradientClipping(kind="norm", max_norm=1.0, norm_type=2.0)),
        ({"max_norm": 6.5, "norm_type": 1}, GradientClipping(kind="norm", max_norm=6.5, norm_type=1.0)),
        ({"clip_norm": "inf"}, GradientClipping(kind="norm", max_norm=float("inf"), norm_type=2.0)),
        ({"clip_value": 2}, GradientClipping(kind="value", clip_value=2.0)),
    ],
)
def test_clipping_by_norm_or_by_value(given_clip: object, expected: GradientClipping | None) -> None:
    assert DistributedStrategy(gradient_clipping=given_clip).resolve(1).gradient_clipping == expected


@pytest.mark.parametrize(
    ("given_clip", "words"),
    [
        ({"max_norm": 1, "clip_value": 2}, ["max_norm = 1", "clip_value = 2", "keep one"]),
        ({"norm_type": 1}, ["neither max_norm nor clip_value"]),
        ({"clip_value": 2, "norm_type": 1}, ["norm_type = 1", "does nothing with clip_value"]),
        ({}, ["max_norm or clip_value"]),
        (-1, ["max_norm = -1", "above 0"]),
        ({"max_nrm": 1}, ["did you mean 'max_norm'"]),
    ],
)
def test_clipping_that_says_two_things_or_none_is_refused(given_clip: object, words: list[str]) -> None:
    refused({"gradient_clipping": given_clip}, 1, *words)
