"""A strategy in the making: settings with the keys that gave them, notes, problems."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from hybrid.strategy.importing.notes import KeyKind, KeyNote

__all__ = ["Draft"]

_DROP = "; --allow-drop leaves it out"


@dataclass(slots=True, kw_only=True)
class Draft:
    """What has been found so far; converters write here, `import_config` reads the result."""

    source: str
    world_size: int | None
    allow_drop: bool
    settings: dict[str, Any] = field(default_factory=dict)
    """Nested, as `DistributedStrategy` takes it."""
    origins: dict[str, str] = field(default_factory=dict)
    """Path of a setting -> the key that gave it."""
    keys: list[KeyNote] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    script: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    """Keys that were given beside the file, and are not in it."""

    def note(self, path: str, value: Any, kind: KeyKind, *, target: str = "", sentence: str = "") -> None:
        self.keys.append(KeyNote(path=path, value=value, kind=kind, target=target, sentence=sentence))

    def give(self, setting: str, value: Any, *, path: str) -> bool:
        """Set a setting by its path; False, and a problem, where another key gave it another value."""
        home: MutableMapping[str, Any] = self.settings
        *sections, name = setting.split(".")
        for section in sections:
            home = home.setdefault(section, {})
        if name in home and home[name] != value:
            self.problems.append(
                f"{path} gives {setting} = {value!r}, but {self.origins[setting]} gives {home[name]!r}: one setting "
                f"from two places; keep one"
            )
            return False
        home[name] = value
        self.origins.setdefault(setting, path)
        return True

    def use(self, path: str, value: Any, setting: str, ours: Any, sentence: str = "") -> None:
        """A key of the file that becomes a setting."""
        if self.give(setting, ours, path=path):
            self.note(path, value, "mapped", target=f"{setting} = {shown(ours)}", sentence=sentence)

    def refuse(self, path: str, value: Any, sentence: str) -> None:
        """A key that cannot be honoured: a problem, or left out where that was allowed."""
        if self.allow_drop:
            self.note(path, value, "dropped", sentence=sentence)
        else:
            self.problems.append(f"{path} = {value!r}: {sentence}{_DROP}")

    def said(self, path: str) -> Any:
        """The value of a key that has its note; None if there is none."""
        return next((note.value for note in self.keys if note.path == path), None)

    def lookup(self, setting: str) -> Any:
        """The value of a setting, None if it was not given."""
        found: Any = self.settings
        for name in setting.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def with_origins(self, problem: str) -> str:
        """A problem of the strategy, with the keys of the file that gave the settings it names."""
        keys = [
            key
            for setting, key in self.origins.items()
            if key != setting and re.search(rf"(?<![\w.]){re.escape(setting)}(?![\w.])", problem)
        ]
        return f"{problem} (from {', '.join(dict.fromkeys(keys))})" if keys else problem


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
