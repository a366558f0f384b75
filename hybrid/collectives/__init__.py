"""Collectives: the only place, with `hybrid.mesh`, that calls torch.distributed."""

from __future__ import annotations

__all__: list[str] = []
