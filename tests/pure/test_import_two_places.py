"""`hybrid.import_config`: one setting from two places of a file, or from a file and the call; where keys belong."""

from __future__ import annotations

from typing import Any

import pytest

import hybrid
from hybrid.strategy.importing.given import parse_given
from tests.pure.strategy_cases import problems_of

UNDER_ACCELERATE = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}


@pytest.mark.parametrize(
    ("config", "given", "words"),
    [
        (
            {"zero_optimization": {"stage": 1}, "zero_optimization.stage": 2},
            {},
            ["zero_optimization.stage: a key with a dot", "write 'stage' into the section zero_optimization"],
        ),
        (
            {"bf16": {"enabled": True}, "bfloat16": {"enabled": False}},
            {},
            ["bf16.enabled = True", "bfloat16.enabled = False", "keep bf16"],
        ),
        (
            {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 0, "stage3_prefetch_bucket_size": 5e7}},
            {},
            ["stage3_prefetch_bucket_size = 50000000.0", "zero_optimization.prefetch_bucket_size = 0", "keep stage3_"],
        ),
        ({"bf16": {"enabled": True}, "bfloat16": True}, {}, ["bfloat16 = True beside bf16"]),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload": True, "offload_optimizer": {"device": "none"}}},
            {},
            ["cpu_offload = true", "offload_optimizer.device = 'none'", "keep offload_optimizer"],
        ),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_param": False, "offload_param": {"device": "cpu"}}},
            {},
            ["cpu_offload_param = false", "offload_param.device = 'cpu'"],
        ),
        (UNDER_ACCELERATE, {"zero_optimization.stage": 3}, ["zero_optimization.stage = 2", "3 is given beside it"]),
        (UNDER_ACCELERATE | {"mixed_precision": "bf16"}, {"bf16": False}, ["bf16.enabled = True", "False is given"]),
    ],
)
def test_two_values_are_refused_with_both(config: dict[str, Any], given: dict[str, Any], words: list[str]) -> None:
    """One of them would win without a word, and the run would not be what its author reads."""
    (problem,) = problems_of(lambda: hybrid.import_config(config, given=given))
    assert all(word in problem for word in words), problem


def test_two_places_may_agree() -> None:
    """Of the two names of a section each fills in what the other leaves open."""
    config = {
        "bf16": {"enabled": "auto"},
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 3, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
    }
    strategy, _ = hybrid.import_config(config)
    assert strategy.amp_configs.dtype == "bfloat16"
    assert strategy.sharding_configs.offload == "optimizer"
    older, _ = hybrid.import_config({"bfloat16": {"enabled": "auto"}}, given={"bf16": True})
    assert older.amp


@pytest.mark.parametrize("word", ["fsdp", "Fsdp", None])
def test_the_type_of_an_accelerate_file_counts_in_any_case(word: str | None) -> None:
    """Its section acts with it: read in another case, `fsdp_config` would be passed over and all be cut."""
    config = {"distributed_type": word, "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}
    strategy, _ = hybrid.import_config(config, format="accelerate")
    assert strategy.sharding_configs.stage == 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"fp16": {"enabled": True}}}, "zero_optimization.fp16: there is no key 'fp16' here"),
        ({"zero_optimization": {"tp": {"tp_size": 2}}}, "it belongs at tensor_parallel.tp"),
        ({"Zero-Optimization": {"stage": 2}}, "for 'Zero-Optimization' did you mean 'zero_optimization'?"),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, "belongs at fsdp_config.fsdp_sharding_strategy"),
        ({"sharding_strategy": "FULL_SHARD"}, "belongs at fsdp_config.fsdp_sharding_strategy"),
        ({"train_batch_size": 10**400}, "one of more than 300 digits"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_its_own(config: dict[str, Any], words: str) -> None:
    (problem,) = problems_of(lambda: hybrid.import_config(config))
    assert words in problem


def test_what_is_no_json_behind_set_is_text() -> None:
    """Also numbers that Python does not read."""
    digits = "1" * 5000
    assert parse_given(f"train_batch_size={digits}") == ("train_batch_size", digits)


def test_names_without_stage3_before_them_are_the_same_keys() -> None:
    """DeepSpeed reads both, and published files have both."""
    section = {
        "stage": 3,
        "sub_group_size": 0,
        "prefetch_bucket_size": 0,
        "stage3_prefetch_bucket_size": "auto",
        "max_live_parameters": 0,
        "gather_16bit_weights_on_model_save": True,
    }
    strategy, notes = hybrid.import_config({"zero_optimization": section}, format="deepspeed")
    assert strategy.to_dict()["sharding_configs"]["prefetch"] == 0
    told = {note.path for note in notes.keys}
    assert {f"zero_optimization.stage3_{name}" for name in ("prefetch_bucket_size", "max_live_parameters")} <= told
