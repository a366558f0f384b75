"""Properties of every strategy: text forms lose nothing, no key is without effect, degrees multiply or are refused."""

from __future__ import annotations

import copy
import json
import math
import pickle
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.contracts.layout import AXES
from hybrid.errors import StrategyError
from hybrid.strategy import DistributedStrategy
from hybrid.strategy.explain import rows
from hybrid.strategy.gather import FLAGS
from hybrid.strategy.resolve import work_out
from hybrid.strategy.settings import all_settings
from tests.pure.strategy_cases import keys_with_samples, nested, settings_dicts

SCHEMA = DistributedStrategy.json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


@given(settings_dicts())
@settings(deadline=None)
def test_text_forms_lose_nothing(given_settings: dict[str, Any]) -> None:
    """Protects files, copies and pickles: the same settings come back, and the same digest."""
    strategy = DistributedStrategy(given_settings)
    for again in (
        DistributedStrategy.from_json(strategy.to_json()),
        DistributedStrategy.from_yaml(strategy.to_yaml()),
        DistributedStrategy.from_dict(strategy.to_dict()),
        eval(repr(strategy), {"DistributedStrategy": DistributedStrategy}),
        copy.deepcopy(strategy),
        strategy.copy(),
        pickle.loads(pickle.dumps(strategy)),
    ):
        assert again == strategy
        assert again.to_dict() == strategy.to_dict()
        assert again.digest() == strategy.digest()
        assert _decided(again) == _decided(strategy)


def _decided(strategy: DistributedStrategy) -> tuple[list[tuple[str, str]], int]:
    """Every value, and how many problems there are (their text names the spelling, which a file does not keep)."""
    result = work_out(strategy, 8)
    return [(row.setting, row.value) for row in rows(result)], len(result.problems)


@given(settings_dicts())
@settings(deadline=None)
def test_the_schema_accepts_what_validation_accepts(given_settings: dict[str, Any]) -> None:
    """Protects editors from marking a good file as wrong."""
    VALIDATOR.validate(given_settings)
    strategy = DistributedStrategy(given_settings)
    VALIDATOR.validate(json.loads(strategy.to_json()))
    VALIDATOR.validate(yaml.safe_load(strategy.to_yaml()))


@given(settings_dicts())
@settings(deadline=None)
def test_the_caller_keeps_his_dict(given_settings: dict[str, Any]) -> None:
    before = copy.deepcopy(given_settings)
    DistributedStrategy(given_settings).problems(8)
    assert given_settings == before


@given(settings_dicts(), st.integers(1, 16))
@settings(deadline=None)
def test_resolve_gives_the_whole_world_or_says_what_is_wrong(given_settings: dict[str, Any], world_size: int) -> None:
    """Protects against a layout that leaves processes idle, and against problems without a path and an end."""
    strategy = DistributedStrategy(given_settings)
    problems = strategy.problems(world_size)
    if problems:
        for call in (strategy.resolve, strategy.explain):
            with pytest.raises(StrategyError) as caught:
                call(world_size)
            assert caught.value.problems == problems
        assert all("= None" not in problem for problem in problems)
        return
    resolved = strategy.resolve(world_size)
    assert resolved.layout.world_size == resolved.world_size == world_size
    assert math.prod(resolved.layout.degree(axis) for axis in AXES) == world_size
    assert resolved.data_parallel_size % resolved.shard_size == 0
    if resolved.global_batch_size is not None:
        assert resolved.micro_batch_size is not None
        batch = resolved.micro_batch_size * resolved.accumulate_steps * resolved.data_parallel_size
        assert resolved.global_batch_size == batch
    assert "auto" not in {row.value for row in rows(work_out(strategy, world_size))}
    assert resolved.describe()


ALL_KEYS = list(keys_with_samples())


@pytest.mark.parametrize(
    ("kind", "key", "value"), ALL_KEYS, ids=[f"{kind.path_of(key)}={value}" for kind, key, value in ALL_KEYS]
)
def test_no_accepted_key_is_without_effect(kind: Any, key: str, value: Any) -> None:
    """Protects the promise that no setting is ignored: each one shows among the values, with where it came from."""
    flag = next((flag for flag, section in FLAGS.items() if section == kind.PATH), None)
    base: dict[str, Any] = {flag: True} if flag else {}
    plain = DistributedStrategy(base)
    given_settings = {**base, **nested(kind.path_of(key), value)}
    strategy = DistributedStrategy(given_settings)
    assert strategy != plain
    assert strategy.digest() != plain.digest()
    shown, before = work_out(strategy, 12), work_out(plain, 12)
    assert (list(rows(shown)), shown.problems) != (list(rows(before)), before.problems)


def _objects(schema: dict[str, Any], path: str = "") -> dict[str, set[str]]:
    """Path of each section in the schema -> its keys."""
    found = {path: set(schema["properties"])}
    for name, inner in schema["properties"].items():
        for option in inner.get("anyOf", ()):
            if option.get("type") == "object" and "properties" in option:  # a plan's keys are names of modules
                assert option["additionalProperties"] is False
                found.update(_objects(option, f"{path}.{name}" if path else name))
    return found


def test_the_schema_knows_exactly_the_keys_of_validation() -> None:
    """Protects editors from offering a key that is refused, or hiding one that is accepted."""
    assert _objects(SCHEMA) == {kind.PATH: set(kind.all_keys()) for kind in all_settings()}
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
