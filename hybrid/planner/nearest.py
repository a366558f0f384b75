"""Names near a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(name: str, known: Iterable[str], *, limit: int = 3) -> str:
    """`"; did you mean a, b or c?"`, or the known ones where none is near and they are few, or nothing."""
    names = sorted(dict.fromkeys(known))
    lowered = {other.lower(): other for other in names}
    found = [lowered[near] for near in difflib.get_close_matches(name.lower(), lowered, n=limit, cutoff=0.5)]
    if found:
        return f"; did you mean {_either(found)}?"
    return f"; known: {', '.join(names)}" if len(names) <= 30 else ""


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
