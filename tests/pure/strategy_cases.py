"""Helpers of the strategy tests: the problems of a strategy, a layout without its axes, random strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import strategies as st

from hybrid.contracts.layout import Layout
from hybrid.errors import StrategyError
from hybrid.strategy import DistributedStrategy
from hybrid.strategy.resolve import work_out
from hybrid.strategy.settings import Settings, all_settings

__all__ = ["keys_with_samples", "layout_of", "problems_of", "refused", "settings_dicts"]


def problems_of(call: Callable[[], object]) -> tuple[str, ...]:
    """The problems with which the call is refused."""
    with pytest.raises(StrategyError) as caught:
        call()
    return caught.value.problems


def refused(settings: dict[str, Any], world_size: int, *words: str) -> str:
    """Refused with exactly one problem, which holds all these words."""
    problems = problems_of(lambda: DistributedStrategy(settings).resolve(world_size))
    assert len(problems) == 1, problems
    assert all(word in problems[0] for word in words), problems[0]
    return problems[0]


def layout_of(settings: dict[str, Any], world_size: int) -> Layout:
    """The layout, also of axes that nothing runs on yet; no other problem is allowed."""
    result = work_out(DistributedStrategy(settings), world_size)
    other = [problem for problem in result.problems if "not available yet" not in problem]
    assert other == []
    assert result.layout is not None
    return result.layout


def samples_of(schema: dict[str, Any]) -> list[Any]:
    """Values of a scalar setting, from its schema."""
    if "anyOf" in schema:
        return [value for option in schema["anyOf"] for value in samples_of(option)]
    if "enum" in schema:
        return list(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    match schema.get("type"):
        case "boolean":
            return [True, False]
        case "integer":
            return [1, 3]
        case "number":
            return list(schema.get("examples", [0.25, 3.0]))
        case "array":
            return [["Block", "Head"]] if schema["items"]["type"] == "string" else [[1, 2]]
        case "string":
            return list(schema["examples"])
    return []  # null, or a section


def keys_with_samples() -> Iterator[tuple[type[Settings], str, Any]]:
    """Every key that is accepted anywhere, with values for it: (section, key, value)."""
    for kind in all_settings():
        schema = _properties(kind)
        for key in kind.all_keys():
            if kind.section_type(kind.ALIASES.get(key, key)) is None:
                for value in _SPECIAL.get((kind.PATH, key), samples_of(schema[key])):
                    yield kind, key, value


_ORDER = ["pp", "dp", "sharding", "sep", "mp"]
_SPECIAL = {("hybrid_configs", "order"): [_ORDER, ",".join(reversed(_ORDER))]}


def _properties(kind: type[Settings]) -> dict[str, Any]:
    schema = DistributedStrategy.json_schema()
    for name in kind.PATH.split(".") if kind.PATH else ():
        section = schema["properties"][name]
        schema = next(option for option in section["anyOf"] if option.get("type") == "object")
    found: dict[str, Any] = schema["properties"]
    return found


def nested(path: str, value: Any) -> dict[str, Any]:
    """`nested("a.b", 1)` is `{"a": {"b": 1}}`."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


@st.composite
def settings_dicts(draw: st.DrawFn) -> dict[str, Any]:
    """Some accepted settings, valid each by itself; together they may contradict one another."""
    chosen = draw(st.lists(st.sampled_from(_ALL), max_size=12, unique_by=lambda item: _canonical(*item[:2])))
    settings: dict[str, Any] = {}
    for kind, key, value in chosen:
        home = settings
        for name in kind.PATH.split(".") if kind.PATH else ():
            home = home.setdefault(name, {})
        home[key] = value
    return settings


def _canonical(kind: type[Settings], key: str) -> tuple[str, str]:
    return kind.PATH, kind.ALIASES.get(key, key)


_ALL = list(keys_with_samples())
