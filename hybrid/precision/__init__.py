"""Mixed precision: in which type each module computes, and loss scaling for float16."""

from __future__ import annotations

__all__: list[str] = []
