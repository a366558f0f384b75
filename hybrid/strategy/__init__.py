"""`DistributedStrategy` and what it resolves to: fields, aliases, validation, text form. No torch."""

from __future__ import annotations

from hybrid.strategy.resolved import GradientClipping, ResolvedStrategy
from hybrid.strategy.strategy import DistributedStrategy

__all__ = ["DistributedStrategy", "GradientClipping", "ResolvedStrategy"]
