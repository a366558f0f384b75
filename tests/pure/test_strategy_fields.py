"""Assignments: typed, checked at once, replacing; numbers as text (case BC-73); keys that are slips."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest

import hybrid
from hybrid.errors import StrategyError
from hybrid.strategy import DistributedStrategy
from tests.pure.strategy_cases import problems_of


def test_attribute_style_is_the_documented_one() -> None:
    """Protects the snippet that users start from."""
    strategy = hybrid.DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"stage": 2, "shard_size": 8}  # type: ignore[assignment]
    resolved = strategy.resolve(16)
    assert (resolved.zero_stage, resolved.shard_size, resolved.data_parallel_size) == (2, 8, 16)


def test_assignment_replaces_the_section_and_leaves_the_dict_alone() -> None:
    """Protects against merging, and against later changes of the caller's dict reaching the strategy."""
    settings = {"stage": 2, "shard_size": 4}
    strategy = DistributedStrategy(sharding=True, sharding_configs=settings)
    strategy.sharding_configs = {"stage": "1"}  # type: ignore[assignment]
    assert strategy.sharding_configs.to_dict() == {"stage": 1}
    settings["stage"] = 3
    assert strategy.sharding_configs["stage"] == 1
    assert settings == {"stage": 3, "shard_size": 4}


def test_copy_copy_shares_no_section() -> None:
    """A change of the copy's section changed the strategy that it was copied from."""
    strategy = DistributedStrategy(sharding=True, sharding_configs={"stage": 2})
    other = copy.copy(strategy)
    other.sharding_configs.stage = 3
    assert strategy.sharding_configs.stage == 2


def test_a_deleted_setting_is_its_default() -> None:
    """`del strategy.sharding` left an object that no longer knew the setting."""
    strategy = DistributedStrategy(sharding=True, micro_batch_size=2)
    del strategy.sharding
    assert (strategy.sharding, strategy.is_set("sharding")) == (False, False)
    assert strategy.to_dict() == {"micro_batch_size": 2}
    with pytest.raises(AttributeError):
        del strategy.shardin


def test_a_section_taken_from_another_strategy_is_a_copy() -> None:
    first = DistributedStrategy(sharding=True, sharding_configs={"stage": 2})
    second = DistributedStrategy(sharding=True)
    second.sharding_configs = first.sharding_configs
    second.sharding_configs["stage"] = 1
    assert first.sharding_configs.stage == 2


def test_a_refused_assignment_changes_nothing() -> None:
    strategy = DistributedStrategy(sharding=True, sharding_configs={"stage": 2, "bucket_bytes": 64})
    before = strategy.to_dict()
    for change in ({"stage": 7}, {"bucket_bytes": 128, "stge": 1}, 5, ["stage"], {1: 2}):
        with pytest.raises(StrategyError):
            strategy.sharding_configs = change  # type: ignore[assignment]
        with pytest.raises((StrategyError, TypeError, ValueError)):
            strategy.sharding_configs.update(change)
    assert strategy.to_dict() == before


def test_sections_are_mappings() -> None:
    """Protects code written for dicts: reading, writing, deleting, copying into a dict."""
    section = DistributedStrategy(sharding_configs={"sharding_degree": 4}).sharding_configs
    assert section["shard_size"] == section["sharding_degree"] == section.shard_size == 4
    section["stage"] = "2"
    assert (section["stage"], section.get("stage"), section.get("nothing", 7)) == (2, 2, 7)
    assert dict(section)["bucket_bytes"] == 25 * 2**20
    assert "sharding_degree" in section
    assert "stge" not in section
    assert len(section) == len(list(section))
    del section["stage"]
    assert section.to_dict() == {"shard_size": 4}
    section.update(stage=2, grad_reduce=2)
    assert section.to_dict() == {"stage": 2, "shard_size": 4, "grad_reduce": 2}
    with pytest.raises(KeyError):
        section["stge"]


def test_assigning_into_a_section_is_checked() -> None:
    strategy = DistributedStrategy(sharding=True)
    problems = problems_of(lambda: strategy.sharding_configs.__setitem__("stage", 4))
    assert "sharding_configs.stage = 4" in problems[0]
    assert "nearest is 3" in problems[0]


def test_none_means_nothing_given() -> None:
    """Protects `null` in files: an optional setting is back at its default, any other refuses it."""
    strategy = DistributedStrategy(micro_batch_size=4, gradient_clipping=1.0, sharding_configs={"shard_size": 2})
    strategy.micro_batch_size = None
    strategy.gradient_clipping = None
    strategy.sharding_configs["shard_size"] = None
    assert strategy == DistributedStrategy()
    assert (
        "sharding_configs.stage = None" in problems_of(lambda: DistributedStrategy(sharding_configs={"stage": None}))[0]
    )


@pytest.mark.parametrize(
    ("path", "given", "value"),
    [
        ("sharding", "true", True),
        ("sharding", "False", False),
        ("sharding_configs.bucket_bytes", "5e8", 500_000_000),
        ("sharding_configs.bucket_bytes", 5e8, 500_000_000),
        ("sharding_configs.bucket_bytes", "16MiB", 16 * 2**20),
        ("sharding_configs.stage", "2", 2),
        ("sharding_configs.stage", 2.0, 2),
        ("sharding_configs.grad_reduce", "4", 4),
        ("sharding_configs.grad_reduce", "every_micro_batch", "every_micro_batch"),
        ("sharding_configs.grad_dtype", "FP32", "float32"),
        ("sharding_configs.reduce_dtype", "torch.bfloat16", "bfloat16"),
        ("sharding_configs.overlap_comm", "false", False),
        ("amp_configs.dtype", "torch.float16", "float16"),
        ("amp_configs.init_loss_scaling", "2e4", 20000.0),
        ("micro_batch_size", "8", 8),
        ("timeout_seconds", "1e2", 100.0),
        ("gradient_clipping", "0.5", {"max_norm": 0.5}),
        ("gradient_clipping", {"max_norm": 1, "norm_type": "inf"}, {"max_norm": 1.0, "norm_type": "inf"}),
        ("seed", "0", 0),
        ("hybrid_configs.order", "pp, dp, sharding, mp", ["pp", "dp", "sharding", "mp"]),
    ],
)
def test_text_is_converted_where_nothing_is_lost(path: str, given: Any, value: Any) -> None:
    """BC-73: `5e8` in YAML is text; it must not reach the step as text."""
    section, _, key = path.rpartition(".")
    strategy = DistributedStrategy({section: {key: given}} if section else {key: given})
    stored = strategy.to_dict()[section][key] if section else strategy.to_dict()[key]
    assert stored == value
    assert type(stored) is type(value)


@pytest.mark.parametrize(
    ("path", "given", "words"),
    [
        ("sharding", 1, ["true or false", "1 (int)"]),
        ("sharding", "yes please", ["true or false"]),
        ("sharding_configs.stage", True, ["whole number from 0 to 3", "True (bool)"]),
        ("sharding_configs.stage", 1.5, ["1.5", "1 and 2"]),
        ("sharding_configs.stage", "two", ["'two' (str)"]),
        ("sharding_configs.shard_size", 0, ["0 is not a degree", "-1"]),
        ("sharding_configs.shard_size", -2, ["at least -1"]),
        ("sharding_configs.bucket_bytes", 0, ["at least 1", "nearest is 1"]),
        ("sharding_configs.bucket_bytes", "25 miles", ["25MiB"]),
        ("sharding_configs.bucket_bytes", float("inf"), ["number of bytes", "inf"]),
        ("sharding_configs.grad_dtype", "float23", ["did you mean 'float32'"]),
        ("sharding_configs.grad_reduce", "every_microbatch", ["did you mean 'every_micro_batch'"]),
        ("sharding_configs.grad_reduce", 0, ["at least 1"]),
        ("sharding_configs.grad_reduce", True, ["True (bool)"]),
        ("sharding_configs.units", "Block", ["['Block']"]),
        ("sharding_configs.units", [], ["leave the setting out"]),
        ("sharding_configs.prefetch", -1, ["at least 0"]),
        ("amp_configs.dtype", "fp32", ["no mixed precision", "leave amp out", "custom_fp32"]),
        ("amp_configs.dtype", "fp8", ["'bfloat16', 'float16'"]),
        ("amp_configs.init_loss_scaling", "inf", ["above 0 and below 1.7", "inf"]),
        ("amp_configs.growth_factor", 1, ["a number above 1"]),
        ("amp_configs.backoff_factor", 1.0, ["above 0 and below 1"]),
        ("amp_configs.level", "O3", ["'O1', 'O2'"]),
        ("recompute_configs.policy", "half", ["'full', 'selective'"]),
        ("timeout_seconds", 0, ["above 0", "cannot be switched off", "leave the setting out for its default", "86400"]),
        ("timeout_seconds", float("inf"), ["above 0", "inf"]),
        ("timeout_seconds", float("nan"), ["nan"]),
        ("seed", -1, ["from 0 to", "nearest is 0"]),
        ("loss_reduction", "avg", ["'mean', 'sum'"]),
        ("gradient_clipping.max_norm", 0, ["above 0", "None"]),
        ("hybrid_configs.order", {"pp": 1}, ["list of names"]),
    ],
)
def test_values_that_cannot_be_meant_are_refused_with_their_path(path: str, given: Any, words: list[str]) -> None:
    section, _, key = path.rpartition(".")
    problems = problems_of(lambda: DistributedStrategy({section: {key: given}} if section else {key: given}))
    assert len(problems) == 1
    assert problems[0].startswith(f"{path} = ")
    assert all(word in problems[0] for word in words), problems[0]


def test_auto_is_taken_only_where_it_means_something_and_all_are_listed() -> None:
    """BC-73: every 'auto' of a foreign file in one error, with its path."""
    settings = {
        "micro_batch_size": "auto",
        "global_batch_size": "auto",
        "gradient_clipping": "auto",
        "timeout_seconds": "auto",
        "sharding": True,
        "sharding_configs": {"bucket_bytes": "auto", "stage": "auto", "grad_reduce": "auto", "partition": "auto"},
    }
    problems = problems_of(lambda: DistributedStrategy(settings))
    assert len(problems) == 6
    assert all("'auto', which has no meaning here" in problem for problem in problems[:2]), problems
    for path in ("micro_batch_size", "gradient_clipping.max_norm", "sharding_configs.bucket_bytes", "timeout_seconds"):
        assert any(problem.startswith(f"{path} = 'auto'") for problem in problems), path


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shardin": True}, ["shardin:", "did you mean 'sharding'"]),
        ({"sharding_configs": {"stge": 1}}, ["sharding_configs.stge", "did you mean 'stage'"]),
        ({"sharding_configs": {"sharding_degre": 1}}, ["did you mean 'sharding_degree'"]),
        ({"stage": 2}, ["stage:", "belongs at sharding_configs.stage"]),
        ({"pipeline_configs": {"bucket_bytes": 1}}, ["pipeline_configs.bucket_bytes", "sharding_configs.bucket_bytes"]),
        ({"sharding_configs": {"micro_batch_size": 1}}, ["micro_batch_size or pipeline_configs.micro_batch_size"]),
        ({"bucket_byte": 2}, ["did you mean 'sharding_configs.bucket_bytes'"]),
        ({"zero_stage": 2}, ["here it is called sharding_configs.stage"]),
        ({"gradient_accumulation_steps": 2}, ["here it is called accumulate_steps"]),
        ({"zero_hpz_partition_size": 8}, ["a second copy of the parameters per node is not available; leave it out"]),
        ({"recompute_configs": {"zzz": 2}}, ["known here: units, policy, preserve_rng"]),
    ],
)
def test_a_slip_gets_the_key_or_the_place_that_was_meant(settings: dict[str, Any], words: list[str]) -> None:
    problems = problems_of(lambda: DistributedStrategy(settings))
    assert len(problems) == 1
    assert all(word in problems[0] for word in words), problems[0]


def test_unknown_attributes_are_refused_in_both_directions() -> None:
    """Protects against `strategy.shardng = True` doing nothing."""
    strategy = DistributedStrategy()
    with pytest.raises(StrategyError, match="did you mean 'sharding'"):
        strategy.shardng = True
    with pytest.raises(AttributeError, match="did you mean 'sharding'"):
        _ = strategy.shardng  # type: ignore[attr-defined]
    assert not hasattr(strategy, "anything_else")


def test_two_spellings_of_one_setting_must_agree() -> None:
    equal = DistributedStrategy(sharding_configs={"shard_size": 4, "sharding_degree": 4})
    assert equal.sharding_configs.to_dict() == {"shard_size": 4}
    problems = problems_of(lambda: DistributedStrategy(sharding_configs={"shard_size": 4, "sharding_degree": 8}))
    assert len(problems) == 1
    for word in ("sharding_configs.shard_size = 4", "sharding_configs.sharding_degree = 8", "two spellings"):
        assert word in problems[0]


def test_all_problems_come_at_once() -> None:
    settings = {"sharding_configs": {"stge": 2, "stage": 5, "bucket_bytes": True}, "amp": 1, "typo": 1, "lamb": True}
    assert len(problems_of(lambda: DistributedStrategy(settings))) == 6


def test_equality_is_about_what_was_set() -> None:
    first = DistributedStrategy(sharding=True, sharding_configs={"sharding_degree": 4})
    second = DistributedStrategy(sharding=True, sharding_configs={"shard_size": "4"})
    assert first == second
    assert first.digest() == second.digest()
    assert first != DistributedStrategy(sharding=True)
    assert first != "strategy"


def test_nothing_here_needs_torch() -> None:
    """Protects the command line: a strategy is checked on machines without torch."""
    code = (
        "import sys, hybrid; s = hybrid.DistributedStrategy(sharding=True); s.explain(4); s.json_schema();"
        "import hybrid.cli.explain; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
