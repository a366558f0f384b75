"""A strategy as text: JSON and YAML, in the same shape as the dicts of the Python form.

Only what was set is written, so a file says what its author decided; everything else keeps following the
defaults of the version that reads it (`hybrid explain` shows them all). Keys that stand twice are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hybrid.contracts.unique_keys import KeyTwiceError, UniqueKeys
from hybrid.errors import StrategyError

__all__ = ["read_json", "read_text", "read_yaml", "to_yaml", "write_text"]

_MOST_LEVELS = 50
_TOO_DEEP = f"sections lie within sections more than {_MOST_LEVELS} levels deep, or one holds itself"
_SUFFIXES = {".json": "json", ".yaml": "yaml", ".yml": "yaml"}


def to_yaml(settings: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, default_flow_style=None)
    return text


def read_json(text: str) -> Any:
    try:
        return _flat_enough(json.loads(text, object_pairs_hook=_unique))
    except StrategyError:
        raise
    except ValueError as error:  # a JSONDecodeError, or a number with thousands of digits
        raise StrategyError(f"not JSON: {error}") from None
    except RecursionError:
        raise StrategyError(_TOO_DEEP) from None


def read_yaml(text: str) -> Any:
    try:
        settings = _flat_enough(yaml.load(text, Loader=UniqueKeys))
    except KeyTwiceError as error:
        raise StrategyError(str(error)) from None
    except yaml.YAMLError as error:
        raise StrategyError(f"not YAML: {error}") from None
    except RecursionError:
        raise StrategyError(_TOO_DEEP) from None
    return {} if settings is None else settings  # an empty file sets nothing


def _flat_enough(settings: Any) -> Any:
    """The settings; StrategyError if they go deeper than anybody means, or (a YAML anchor) hold themselves."""
    level: Mapping[int, Any] = {0: [settings]}
    for _ in range(_MOST_LEVELS + 1):
        inside = (child for one in level.values() for child in (one.values() if isinstance(one, dict) else one))
        level = {id(child): child for child in inside if isinstance(child, dict | list)}
    if level:
        raise StrategyError(_TOO_DEEP)
    return settings


def read_text(path: Path) -> Any:
    kind = _kind(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # as some editors write it
    except OSError as error:
        raise StrategyError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise StrategyError(f"is not text in UTF-8: {error}") from None
    return read_json(text) if kind == "json" else read_yaml(text)


def write_text(path: Path, *, as_json: Callable[[], str], as_yaml: Callable[[], str]) -> None:
    text = as_json() + "\n" if _kind(path) == "json" else as_yaml()
    path.write_text(text, encoding="utf-8")


def _kind(path: Path) -> str:
    kind = _SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise StrategyError(f"{path.name}: the name must end in .json, .yaml or .yml to say what it is")
    return kind


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in pairs:
        if key in settings:
            raise StrategyError(f"{key!r} stands twice: {settings[key]!r} and {value!r}; keep one")
        settings[key] = value
    return settings
