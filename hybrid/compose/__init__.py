"""The only place that knows all parts: it puts them together around a user's model and optimizer."""

from __future__ import annotations

__all__: list[str] = []
