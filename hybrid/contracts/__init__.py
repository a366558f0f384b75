"""The single truths of the project, without torch: pure values that every other part reads."""

from __future__ import annotations

__all__: list[str] = []
