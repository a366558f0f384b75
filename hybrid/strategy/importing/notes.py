"""What an import did with each key of the file: for people as text, for programs as plain data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["ImportNotes", "KeyKind", "KeyNote"]

KeyKind = Literal["mapped", "script", "equal", "harmless", "changed", "dropped"]

_TITLES: dict[KeyKind, str] = {
    "mapped": "became a setting",
    "script": "belongs in your script",
    "equal": "is so here anyway",
    "harmless": "has nothing to act on here; no effect on results",
    "changed": "is different here",
    "dropped": "LEFT OUT (--allow-drop): what you asked for is not done",
}
_WIDEST_KEY = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyNote:
    """One key of the file and what became of it."""

    path: str
    value: Any
    kind: KeyKind
    target: str
    """What it gives: `sharding_configs.stage = 2`; empty where it gives nothing."""
    sentence: str

    @property
    def said(self) -> str:
        return f"{self.path} = {json.dumps(self.value, ensure_ascii=False, default=str)}"

    @property
    def answer(self) -> str:
        return "; ".join(part for part in (self.target, self.sentence) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportNotes:
    """All that an import has to say beside the strategy."""

    format: str
    source: str
    """The file's name; empty for a dict."""
    world_size: int | None
    keys: tuple[KeyNote, ...]
    changes: tuple[str, ...]
    """What means something else here than there, although every key was taken."""
    script: tuple[str, ...]
    """Lines for the training script, in their order."""
    worked_out: tuple[str, ...]
    """What followed from the world size: a line for each value."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "source": self.source,
            "world_size": self.world_size,
            "keys": [asdict(key) for key in self.keys],
            "changes": list(self.changes),
            "script": list(self.script),
            "worked_out": list(self.worked_out),
        }

    def to_text(self) -> str:
        lines = [f"{self.source or 'settings'}: {self.format}, {len(self.keys)} keys"]
        width = min(max((len(key.said) for key in self.keys), default=0), _WIDEST_KEY)
        for kind, title in _TITLES.items():
            chosen = [key for key in self.keys if key.kind == kind]
            if chosen:
                lines += ["", title, *(f"  {key.said:<{width}}  {key.answer}".rstrip() for key in chosen)]
        if self.changes:
            lines += ["", "what changes in meaning", *(f"  - {change}" for change in self.changes)]
        if self.script:
            lines += ["", "lines for your script", *(f"  {line}" for line in self.script)]
        if self.worked_out:
            lines += ["", f"worked out for {self.world_size} processes", *(f"  {line}" for line in self.worked_out)]
        return "\n".join(lines)

    __str__ = to_text
