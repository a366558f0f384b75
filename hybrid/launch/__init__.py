"""How the processes of a job are started and find each other."""

from __future__ import annotations

__all__: list[str] = []
