"""The world equation (case BC-75), axis order, flags: all that decides which rank stands where."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.contracts.layout import AXES
from hybrid.strategy import DistributedStrategy
from hybrid.strategy.resolve import work_out
from tests.pure.strategy_cases import layout_of, problems_of, refused


def shard(size: int | None = None, stage: int = 2) -> dict[str, Any]:
    configs = {"stage": stage} if size is None else {"stage": stage, "shard_size": size}
    return {"sharding": True, "sharding_configs": configs}


def degrees(settings: dict[str, Any], world_size: int) -> dict[str, int]:
    layout = layout_of(settings, world_size)
    return {axis: layout.degree(axis) for axis in AXES if layout.degree(axis) > 1}


@pytest.mark.parametrize(
    ("settings", "world_size", "expected"),
    [
        ({}, 1, {}),
        ({}, 8, {"dp_replicate": 8}),
        (shard(), 1, {}),
        (shard(), 8, {"dp_shard": 8}),
        (shard(-1), 8, {"dp_shard": 8}),
        (shard(2), 8, {"dp_replicate": 4, "dp_shard": 2}),
        (shard(1), 8, {"dp_replicate": 8}),
        (shard(stage=0), 8, {"dp_replicate": 8}),
        (shard(1, stage=0), 8, {"dp_replicate": 8}),
        ({"sharding": True, "hybrid_configs": {"dp_degree": 2}}, 8, {"dp_replicate": 2, "dp_shard": 4}),
        ({"hybrid_configs": {"mp_degree": 2}}, 8, {"dp_replicate": 4, "tp": 2}),
        ({"hybrid_configs": {"mp_degree": -1, "dp_degree": 2}}, 8, {"dp_replicate": 2, "tp": 4}),
        ({"hybrid_configs": {"pp_degree": -1, "sharding_degree": 4}}, 8, {"dp_shard": 4, "pp": 2}),
        ({"hybrid_configs": {"sharding_degree": 1, "mp_degree": 2}}, 8, {"dp_replicate": 4, "tp": 2}),
        ({"hybrid_configs": {"sharding_degree": -1, "mp_degree": 2}}, 8, {"dp_shard": 4, "tp": 2}),
        (
            {**shard(), "tensor_parallel": True, "tensor_parallel_configs": {"degree": 2}},
            8,
            {"dp_shard": 4, "tp": 2},
        ),
    ],
)
def test_open_degrees_follow_from_the_world(
    settings: dict[str, Any], world_size: int, expected: dict[str, int]
) -> None:
    """BC-75: -1 is resolved; sharding 1 is plain data parallel; one process works."""
    assert degrees(settings, world_size) == expected


@pytest.mark.parametrize(
    ("settings", "world_size", "words"),
    [
        (shard(3), 4, ["shard_size = 3", "data-parallel size 4", "1, 2, 4"]),
        (shard(8), 4, ["shard_size = 8", "data-parallel size 4", "larger", "1, 2, 4"]),
        (shard(8), 1, ["shard_size = 8", "data-parallel size 1", "values that work: 1"]),
        ({"hybrid_configs": {"dp_degree": 4}}, 8, ["dp_degree = 4", "= 4, but world_size is 8", "4 processes", "= 8"]),
        (
            {"sharding": True, "hybrid_configs": {"dp_degree": 2, "sharding_degree": 2}},
            8,
            ["dp_replicate 2 × dp_shard 2", "world_size is 8", "dp_degree = 4", "sharding_degree = 4"],
        ),
        (
            {"sharding": True, "hybrid_configs": {"dp_degree": 3}},
            8,
            ["dp_degree = 3", "data-parallel size 8", "1, 2, 4, 8"],
        ),
        (
            {"sharding": True, "hybrid_configs": {"dp_degree": 8}},
            8,
            ["dp_degree = 8", "cuts nothing", "leave it out"],
        ),
        (
            {"sharding": True, "hybrid_configs": {"dp_degree": -1, "sharding_degree": -1}},
            8,
            ["dp_degree = -1", "sharding_degree = -1", "only one degree can be derived"],
        ),
        (shard(2, stage=0), 8, ["shard_size = 2", "stage 0", "nothing is cut"]),
    ],
)
def test_degrees_that_cannot_be_are_refused_in_one_sentence(
    settings: dict[str, Any], world_size: int, words: list[str]
) -> None:
    """BC-75: each axis, the product, and values that work; never idle processes."""
    refused(settings, world_size, *words)


@pytest.mark.parametrize(
    ("tp", "pp", "world_size", "words"),
    [
        (2, 3, 8, ["pp 3 × cp 1 × tp 2 = 6", "world_size 8", "hybrid_configs.pp_degree = 2 or 4", "6 or 12"]),
        (3, 1, 8, ["tp 3 = 3", "world_size 8", "hybrid_configs.mp_degree = 2 or 4"]),
        (4, 1, 6, ["tp 4 = 4", "world_size 6", "hybrid_configs.mp_degree = 3 or 6"]),
        (16, 1, 8, ["tp 16 = 16", "world_size 8", "hybrid_configs.mp_degree = 8", "16"]),
    ],
)
def test_model_axes_that_do_not_divide_the_world(tp: int, pp: int, world_size: int, words: list[str]) -> None:
    """BC-75: the equation stands in the message although the axes themselves cannot run yet."""
    strategy = DistributedStrategy(hybrid_configs={"mp_degree": tp, "pp_degree": pp})
    problems = [text for text in strategy.problems(world_size) if "not available yet" not in text]
    assert len(problems) == 1
    assert all(word in problems[0] for word in words), problems[0]


@pytest.mark.parametrize("degree", [0, -2, 1.5, True, "two", "auto"])
@pytest.mark.parametrize("axis", ["dp_degree", "mp_degree", "pp_degree", "sharding_degree", "sep_degree"])
def test_what_is_no_degree_is_refused_at_once(axis: str, degree: object) -> None:
    """BC-75: -2 is not automatic and 0 is not 1."""
    problems = problems_of(lambda: DistributedStrategy(hybrid_configs={axis: degree}))
    assert problems[0].startswith(f"hybrid_configs.{axis} = {degree!r}: ")


@pytest.mark.parametrize("world_size", [0, -1, True, 2.5, "many"])
def test_what_is_no_world_size_is_refused(world_size: Any) -> None:
    assert "world_size" in problems_of(lambda: DistributedStrategy().resolve(world_size))[0]


def test_problems_of_unbuilt_axes_come_with_all_the_others() -> None:
    """Protects 'all problems at once': the product, the axes, the batch, the flag."""
    strategy = DistributedStrategy(
        hybrid_configs={"mp_degree": 2, "pp_degree": 3, "sep_degree": 2},
        gradient_merge=True,
        amp_configs={"level": "O2"},
    )
    problems = " | ".join(strategy.problems(8))
    assert problems.count("not available yet") == 1
    for words in (
        "pp 3 × cp 2 × tp 2 = 12",
        "amp was not set",
        "sep_degree = 2: context parallel",
        "gradient_merge = True",
    ):
        assert words in problems


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sharding_configs": {"stage": 2}}, ["sharding_configs", "'stage': 2", "was not set", "sharding = True"]),
        ({"sharding": False, "sharding_configs": {"stage": 2}}, ["sharding is False"]),
        ({"pipeline_configs": {"accumulate_steps": 2}}, ["pipeline was not set", "can be set on the strategy"]),
        ({"gradient_merge_configs": {"k_steps": 2}}, ["gradient_merge was not set"]),
        ({"tensor_parallel": True}, ["no degree", "tensor_parallel_configs = {'degree': 2}"]),
        ({"pipeline": True}, ["no degree", "pipeline_configs = {'degree': 2}"]),
        ({"gradient_merge": True}, ["no number of steps", "k_steps"]),
    ],
)
def test_a_section_without_its_flag_or_a_flag_without_its_section(settings: dict[str, Any], words: list[str]) -> None:
    """Protects against a section that is read by nobody."""
    refused(settings, 4, *words)


def test_degree_one_switches_an_axis_off() -> None:
    strategy = DistributedStrategy(
        tensor_parallel=True, tensor_parallel_configs={"degree": 1}, pipeline=True, pipeline_configs={"degree": 1}
    )
    assert strategy.resolve(2).layout.degree("tp") == 1


def test_the_order_of_axes_is_kept() -> None:
    """Protects the numbering: groups follow the given order, whatever axes it has."""
    fleet = {"dp_degree": 2, "mp_degree": 2, "pp_degree": 2, "sharding_degree": 1}
    layout = layout_of({"hybrid_configs": {**fleet, "order": ["mp", "pp", "sharding", "sep", "dp"]}}, 8)
    assert layout.axis_names == ("tp", "pp", "dp_shard", "cp", "dp_replicate")
    assert layout.groups(("tp",)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.groups(("dp_replicate",)) == ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (["dp", "pp", "mp"], ["sharding, sep left out", "'mp', 'sharding', 'sep'"]),
        (["dp", "pp", "mp", "sharding", "dp"], ["'dp' stands twice"]),
        (["dp", "pp", "model_parallel", "sharding", "sep"], ["'model_parallel' is not an axis"]),
        ("dp,pp,shardin,mp", ["did you mean 'sharding'"]),
    ],
)
def test_an_order_must_name_every_axis_once(order: object, words: list[str]) -> None:
    """BC-78 (f)."""
    refused({"hybrid_configs": {"order": order}}, 4, *words)


DEGREES = st.one_of(st.none(), st.just(-1), st.integers(1, 6))


@given(
    st.fixed_dictionaries(
        dict.fromkeys(("dp_degree", "mp_degree", "pp_degree", "sharding_degree", "sep_degree"), DEGREES)
    ),
    st.integers(0, 3),
    st.integers(1, 48),
)
@settings(deadline=None)
def test_degrees_multiply_to_the_world_or_are_refused(
    hybrid_configs: dict[str, int | None], stage: int, world_size: int
) -> None:
    """Protects the product: what was given is kept, and nothing is left idle."""
    strategy = DistributedStrategy(sharding=True, sharding_configs={"stage": stage}, hybrid_configs=hybrid_configs)
    result = work_out(strategy, world_size)
    if result.layout is None:
        assert any("not available yet" not in problem for problem in result.problems)
        return
    assert result.layout.world_size == world_size
    axis_of = {"dp_degree": "dp_replicate", "mp_degree": "tp", "pp_degree": "pp", "sep_degree": "cp"}
    for key, degree in hybrid_configs.items():
        if degree not in {None, -1}:
            assert result.layout.degree(axis_of.get(key, "dp_shard")) == degree
