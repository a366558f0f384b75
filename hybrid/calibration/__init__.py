"""Measuring a machine for the planner: `hybrid calibrate`, and layouts that are run to be compared with their plan."""

from __future__ import annotations

__all__: list[str] = []
