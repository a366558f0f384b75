"""What each rank did from moment to moment of the last traced step; beside the profile, in a file of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hybrid.errors import HybridError

__all__ = ["TIMELINE_FILE", "RankTimeline", "Stretch", "read_timelines", "write_timelines"]

TIMELINE_FILE = "timeline.json"


class Stretch(NamedTuple):
    """Seconds count from the begin of the step on this rank."""

    start_seconds: float
    end_seconds: float
    part: str
    """forward, backward, optimizer, other, or communication that nothing hides."""
    axis: str = ""
    op: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """One step of one rank; stretches lie one behind the other and cover it."""

    rank: int
    begun_at_seconds: float
    """Of the machine's wall clock: by it ranks are set beside each other."""
    stretches: tuple[Stretch, ...]


def write_timelines(directory: Path, timelines: Sequence[RankTimeline]) -> None:
    """One line per rank."""
    lines = (
        json.dumps(
            {
                "rank": one.rank,
                "begun_at_seconds": one.begun_at_seconds,
                "stretches": [
                    [round(stretch.start_seconds, 7), round(stretch.end_seconds, 7), *stretch[2:]]
                    for stretch in one.stretches
                ],
            },
            separators=(",", ":"),
        )
        for one in timelines
    )
    (directory / TIMELINE_FILE).write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def read_timelines(path: Path) -> tuple[RankTimeline, ...]:
    """What `write_timelines` wrote.

    Raises:
        HybridError: the file cannot be read, or is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return tuple(
            RankTimeline(
                rank=one["rank"],
                begun_at_seconds=one["begun_at_seconds"],
                stretches=tuple(Stretch(*stretch) for stretch in one["stretches"]),
            )
            for one in found
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HybridError(f"cannot read the timelines {path}: {type(error).__name__}: {error}") from error
