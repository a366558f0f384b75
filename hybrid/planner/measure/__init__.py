"""Live models on fake tensors: the one part of the planner with torch, imported when a module is to be described."""

from __future__ import annotations

from hybrid.planner.measure.model import measure_model

__all__ = ["measure_model"]
