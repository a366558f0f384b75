"""Values given beside the file: they fill in 'auto' and what is missing, and must agree with what is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hybrid.errors import StrategyError
from hybrid.strategy.importing.key_table import KeyTable
from hybrid.strategy.importing.walk import count, is_auto
from hybrid.units import parse_number

__all__ = ["merged", "parse_given"]


def parse_given(text: str) -> tuple[str, Any]:
    """`KEY=VALUE`, as on the command line; the value as JSON where it is JSON, else as text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise StrategyError(f"--set {text}: expected KEY=VALUE, such as train_micro_batch_size_per_gpu=4")
    try:
        return key.strip(), json.loads(value)
    except (ValueError, RecursionError):
        return key.strip(), value


def merged(
    config: Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    table: KeyTable | None,
    arguments: Mapping[str, tuple[str, ...]],
    source: str,
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The file's settings with the given ones in their places, what contradicts, and the paths that the file had not.

    The file's dict is not touched.

    Args:
        config: what the file says, nested.
        given: key -> value; a key is a path, or a name that stands in one place only.
        table: the format's keys, to find names by; without it a key is a path.
        arguments: names of another tool's arguments -> the paths they fill.
        source: the file, for messages.
    """
    result: dict[str, Any] = _copy(config)
    problems: list[str] = []
    added: list[str] = []
    for name, value in given.items():
        try:
            places = _places(name, value, result, table, arguments)
        except ValueError as error:
            problems.append(f"{name} = {value!r} (given): {error}")
            continue
        for path, filled in places.items():
            if _lookup(config, path) is None:
                added.append(path)
            problem = _put(result, path, filled, name=name, source=source)
            if problem is not None:
                problems.append(problem)
    return result, problems, added


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _places(
    name: str,
    value: Any,
    config: Mapping[str, Any],
    table: KeyTable | None,
    arguments: Mapping[str, tuple[str, ...]],
) -> dict[str, Any]:
    """Path -> value for one given key."""
    if table is None:
        return {name: value}
    if name == "hidden_size":
        return _by_hidden_size(value, config)
    if table.is_section(name) and f"{name}.enabled" in table.rows and not isinstance(value, Mapping):
        return {f"{name}.enabled": value}
    if table.is_section(name) and not isinstance(value, Mapping):
        raise ValueError(f"it is a section; give one of its keys, such as {name}.{table.siblings(f'{name}.x')[0]}")
    if table.row(name) is not None or table.is_section(name):
        return {name: value}
    paths = arguments.get(name)
    if paths is not None:
        open_paths = [path for path in paths if is_auto(_lookup(config, path))]
        return dict.fromkeys(open_paths or paths[:1], value)
    homes = table.homes(name) + [path for path in _open_paths(config) if path.rpartition(".")[2] == name]
    homes = list(dict.fromkeys(homes))
    in_file = [path for path in homes if _lookup(config, path) is not None]
    chosen = in_file if len(in_file) == 1 else homes
    if len(chosen) == 1:
        return {chosen[0]: value}
    if chosen:
        raise ValueError(f"it stands in several places; give one of {', '.join(chosen)}")
    raise ValueError(table.unknown(name).partition(": ")[2])


def _by_hidden_size(value: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that the Trainer takes from the model's width, where they are open."""
    width = count(value, minimum=1)
    sizes = {
        "zero_optimization.reduce_bucket_size": width * width,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * width * width),
        "zero_optimization.stage3_param_persistence_threshold": 10 * width,
    }
    chosen = {path: size for path, size in sizes.items() if is_auto(_lookup(config, path))}
    if not chosen:
        raise ValueError(f"none of {', '.join(sizes)} is 'auto', so nothing depends on it; leave it out")
    return chosen


def _open_paths(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += _open_paths(value, f"{prefix}{key}.")
        elif is_auto(value):
            found.append(f"{prefix}{key}")
    return found


def _lookup(config: Mapping[str, Any], path: str) -> Any:
    found: Any = config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _put(config: dict[str, Any], path: str, value: Any, *, name: str, source: str) -> str | None:
    """Write one value, other keys of its section stay; a sentence where the file says something else."""
    home: Any = config
    *sections, key = path.split(".")
    for section in sections:
        if home.get(section) is None:
            home[section] = {}
        home = home[section]
        if not isinstance(home, dict):
            return f"{path} = {value!r} (given): {section} is {home!r} in {source or 'the settings'}, not a section"
    before = home.get(key)
    if before is None or is_auto(before):
        home[key] = value
        return None
    if _plain(before) == _plain(value):
        return None
    by = "" if name == path else f" (as {name})"
    return (
        f"{path} = {before!r} in {source or 'the settings'}, but {value!r} is given beside it{by}: one setting from "
        f"two places; change the one or leave out the other"
    )


def _plain(value: Any) -> Any:
    """Numbers and booleans out of text, to compare by."""
    if not isinstance(value, str):
        return value
    if value.strip().lower() in {"true", "false"}:
        return value.strip().lower() == "true"
    try:
        return parse_number(value)
    except (ValueError, OverflowError):
        return value.strip()
