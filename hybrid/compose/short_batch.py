"""A first batch with fewer samples than the strategy's batch sizes say: seldom the end of an epoch."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from hybrid.compose.batch import num_samples

if TYPE_CHECKING:
    from hybrid.compose.runtime import Runtime

__all__ = ["warn_of_short_batch"]


def warn_of_short_batch(runtime: Runtime, batch: Any) -> None:
    """Warn if the first batch of `train_batch` is short; later ones may be the tail of an epoch."""
    strategy = runtime.strategy
    if runtime.has_trained_batch or strategy.micro_batch_size is None:
        return
    found, expected = num_samples(batch), strategy.micro_batch_size * strategy.accumulate_steps
    if found < expected:
        warnings.warn(
            f"this rank's first batch has {found} samples, but micro_batch_size = {strategy.micro_batch_size} × "
            f"accumulate_steps = {strategy.accumulate_steps} asks for {expected} (global_batch_size = "
            f"{strategy.global_batch_size} over {strategy.data_parallel_size} data-parallel ranks): the step is that "
            "of the smaller batch. Give the data loader that batch size; the end of an epoch is as it should be",
            stacklevel=5,  # the caller of model.train_batch
        )
