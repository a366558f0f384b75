"""Host memory of usual machines; `data/hosts.csv` holds every figure with its source."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

__all__ = ["HostKind", "usual_host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKind:
    """A machine that is sold, or rented, with devices of one kind.

    Args:
        name: of the machine.
        memory_bytes: of its processors, the least that is published: decimal units where the source has them.
        source: of the figure; with `date` of the look-up.
        notes: what the figure leaves open; may be empty.
    """

    name: str
    memory_bytes: int
    source: str
    date: str
    notes: str = ""


def usual_host(device: str, num_devices: int) -> HostKind | None:
    """The machine that usually has so many devices of this name; None where none is usual."""
    return _hosts().get((device, num_devices))


@cache
def _hosts() -> dict[tuple[str, int], HostKind]:
    text = resources.files("hybrid.contracts").joinpath("data", "hosts.csv").read_text(encoding="utf-8")
    return {
        (row["device"], int(row["devices"])): HostKind(
            name=row["name"],
            memory_bytes=int(row["memory_gibibytes"]) * 2**30,
            source=row["source"],
            date=row["date"],
            notes=row["notes"],
        )
        for row in csv.DictReader(text.splitlines())
    }
