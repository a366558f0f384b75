"""YAML in which no key stands twice: the plain loader takes the last one without a word."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

__all__ = ["KeyTwiceError", "UniqueKeys"]

_MERGE = "tag:yaml.org,2002:merge"


class KeyTwiceError(ValueError):
    """A key that stands twice in one section."""


class UniqueKeys(yaml.SafeLoader):
    """The safe loader, for `yaml.load(text, Loader=UniqueKeys)`.

    Raises:
        KeyTwiceError: with the key and its second line.
        yaml.YAMLError: what is no YAML; also what looks like a date or a number and is none (`2026-13-01`), of which
            the plain loader raises a bare ValueError.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:  # `<<: *other`, whose keys those that stand here may replace
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # the loader says so
            if key in seen:
                raise KeyTwiceError(f"{key!r} stands twice (line {key_node.start_mark.line + 1}); keep one")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except KeyTwiceError:
            raise
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None
