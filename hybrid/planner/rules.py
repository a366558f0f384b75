"""Figures of the planner that belong to no device and no software stack: `data/rules.yaml`, each with its source."""

from __future__ import annotations

from functools import cache
from typing import Any

from hybrid.planner.data_file import read_data_file

__all__ = ["rule"]


def rule(name: str) -> Any:
    """The value of one of them."""
    return _entries()[name]["value"]


@cache
def _entries() -> dict[str, dict[str, Any]]:
    return dict(read_data_file("rules.yaml"))
