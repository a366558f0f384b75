"""The keys of one format, each with its answer: `data/*.csv`, read once.

    mapped    gives a setting of ours, `target`
    script    gives lines of the training script: it is no part of a strategy
    equal     whatever is asked for is what happens here
    harmless  steers something that does not exist here; results do not depend on it
    refused   not done here: the values of `off` ask for nothing and are accepted, any other is refused; but those of
              `default`, which that tool takes anyway, are accepted with a word on what is different

A path that ends in `.*` answers all keys of its section that have no line of their own.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from hybrid.strategy.values import closest

__all__ = ["KeyRow", "KeyTable", "key_table"]

_MOST_LISTED = 12
_MOST_HOMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """One key: how its value is read and what becomes of it."""

    path: str
    kind: str
    type: str
    off: tuple[Any, ...]
    default: tuple[Any, ...]
    target: str
    sentence: str

    def is_off(self, value: Any) -> bool:
        """Whether this value asks for nothing."""
        if isinstance(value, Mapping):
            return value.get("enabled") is False or value in self.off
        return any(type(value) is type(off) and value == off for off in self.off)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTable:
    """All rows of one format, by path."""

    rows: Mapping[str, KeyRow]

    def row(self, path: str) -> KeyRow | None:
        """The row of this path, its own or that of its section."""
        return self.rows.get(path) or self.rows.get(f"{path.rpartition('.')[0]}.*")

    def is_section(self, path: str) -> bool:
        return any(name.startswith(f"{path}.") for name in self.rows)

    def siblings(self, path: str) -> list[str]:
        """The names that can stand beside this one."""
        prefix = path.rpartition(".")[0]
        start = f"{prefix}." if prefix else ""
        names = (name[len(start) :].split(".")[0] for name in self.rows if name.startswith(start))
        return [name for name in dict.fromkeys(names) if name != "*"]

    def homes(self, leaf: str) -> list[str]:
        """All paths that end in this name."""
        return [name for name in self.rows if name.rpartition(".")[2] == leaf]

    def unknown(self, path: str) -> str:
        """One sentence about a key that stands nowhere here: what was probably meant."""
        leaf = path.rpartition(".")[2]
        guess = closest(leaf, self.siblings(path))
        homes = [*self.homes(leaf), *self._sections(leaf)]
        if len(homes) > _MOST_HOMES:  # `enabled` stands in many sections: naming them all points nowhere
            homes = []
        if homes and guess is not None:
            return f"{path}: unknown key; did you mean {guess!r}, or {' or '.join(homes)}?"
        if homes:
            return f"{path}: there is no key {leaf!r} here; it belongs at {' or '.join(homes)}"
        if guess is not None:
            return f"{path}: unknown key; did you mean {guess!r}?"
        elsewhere = closest(leaf, self._leaves())
        if elsewhere is not None and len(self.homes(elsewhere)) <= _MOST_HOMES:
            return f"{path}: unknown key; did you mean {' or '.join(self.homes(elsewhere))}?"
        known = self.siblings(path)
        if not known:
            return f"{path}: unknown key; {path.rpartition('.')[0]} is a value, not a section"
        more = ", ..." if len(known) > _MOST_LISTED else ""
        return f"{path}: unknown key; known beside it: {', '.join(known[:_MOST_LISTED])}{more}"

    def _sections(self, leaf: str) -> list[str]:
        """All sections of this name."""
        found = (f".{name}".partition(f".{leaf}.") for name in self.rows)
        return list(dict.fromkeys(f"{before}.{leaf}".removeprefix(".") for before, match, _ in found if match))

    def _leaves(self) -> Iterable[str]:
        return {name.rpartition(".")[2] for name in self.rows} - {"*"}


@cache
def key_table(name: str) -> KeyTable:
    """The table of `data/<name>.csv`."""
    text = files("hybrid.strategy.importing").joinpath("data", f"{name}.csv").read_text(encoding="utf-8")
    rows = {
        line["path"]: KeyRow(
            path=line["path"],
            kind=line["kind"],
            type=line["type"],
            off=tuple(json.loads(line["off"] or "[]")),
            default=tuple(json.loads(line["default"] or "[]")),
            target=line["target"],
            sentence=line["sentence"],
        )
        for line in csv.DictReader(text.splitlines())
    }
    return KeyTable(rows=rows)
