"""Figures of the planner that belong to no device and no software stack: `data/rules.yaml`, each with its source."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml

__all__ = ["rule"]


def rule(name: str) -> Any:
    """The value of one of them."""
    return _entries()[name]["value"]


@cache
def _entries() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load(files("hybrid.planner").joinpath("data/rules.yaml").read_text(encoding="utf-8")))
