"""The `hybrid` command: parse, call, print. No torch is imported here; heavy work runs in other processes."""

from __future__ import annotations

__all__: list[str] = []
