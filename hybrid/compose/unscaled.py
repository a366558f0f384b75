"""Which gradients have had the loss scale of a plain loop's `GradScaler` taken out of them: it works by optimizer."""

from __future__ import annotations

from collections.abc import Collection

from hybrid.errors import OptimizerError
from hybrid.sharding.engine import ShardingEngine
from hybrid.sharding.optimizer_state import OptimizerShards

__all__ = ["UnscaledGradients"]


class UnscaledGradients:
    """Of one model's settled gradients, those that are without scale."""

    def __init__(self, engine: ShardingEngine) -> None:
        self._engine = engine
        self._settlement = -1
        self._fqns: set[str] = set()

    def note(self, fqns: Collection[str]) -> None:
        """These have been divided by the scale."""
        if self._settlement != self._engine.settlements:
            self._settlement = self._engine.settlements
            self._fqns.clear()
        self._fqns.update(fqns)

    def _still_scaled(self) -> list[str]:
        """Those that came with the ones that were divided, and were not; empty where nothing was."""
        if self._settlement != self._engine.settlements:
            return []
        return [
            fqn
            for bucket in self._engine.buckets
            for fqn, has_gradient in zip(bucket.fqns, bucket.has_gradient_anywhere, strict=True)
            if has_gradient and fqn not in self._fqns
        ]

    def check_before_clip(self) -> None:
        """Raises OptimizerError: the scale is out of some gradients and in others, and all are clipped together."""
        scaled = self._still_scaled()
        if scaled:
            raise OptimizerError(
                f"strategy.gradient_clipping clips the gradients of all optimizers together, and that of {scaled[0]!r} "
                "still has the loss scale: call scaler.unscale_(optimizer) for every optimizer of the model before the "
                "first scaler.step(optimizer), and freeze what no optimizer holds"
            )

    def are_all(self, shards: OptimizerShards) -> bool:
        """Whether all gradients of an optimizer are without scale, as far as somebody divided any."""
        return self._settlement == self._engine.settlements and not shards.fqns().intersection(self._still_scaled())
