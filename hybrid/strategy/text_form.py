"""A strategy as text: JSON and YAML, in the same shape as the dicts of the Python form.

Only what was set is written, so a file says what its author decided; everything else keeps following the
defaults of the version that reads it (`hybrid explain` shows them all). Keys that stand twice are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import yaml

from hybrid.errors import StrategyError

__all__ = ["read_json", "read_text", "read_yaml", "to_yaml", "write_text"]

_SUFFIXES = {".json": "json", ".yaml": "yaml", ".yml": "yaml"}


def to_yaml(settings: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, default_flow_style=None)
    return text


def read_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise StrategyError(f"not JSON: {error}") from None


def read_yaml(text: str) -> Any:
    try:
        settings = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise StrategyError(f"not YAML: {error}") from None
    return {} if settings is None else settings  # an empty file sets nothing


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


class _UniqueKeys(yaml.SafeLoader):
    """The safe loader, but a key that stands twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise StrategyError(f"{key!r} stands twice (line {key_node.start_mark.line + 1}); keep one")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)
