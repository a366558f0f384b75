"""A batch made of no samples, for the replicas that a short tail leaves without any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["EmptyAwareCollate", "cut_to_zero"]


class EmptyAwareCollate:
    """Collates as usual; an empty list becomes the batch of the first sample with its batch dim cut to zero.

    Shapes and dtypes are then those of every other batch, and a model, a loss and a reduction run on it
    without a special case. Picklable, for DataLoader workers. torch is imported when a batch is made, so that
    the sampler itself works without it.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._dataset = dataset
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        from torch.utils.data import default_collate

        collate = default_collate if self._collate is None else self._collate
        if samples:
            return collate(samples)
        return cut_to_zero(collate([self._dataset[0]]))


def cut_to_zero(batch: Any) -> Any:
    """The batch without its samples: tensors [n, ...] become [0, ...], lists of one item become empty."""
    import torch

    if isinstance(batch, torch.Tensor):
        return batch[:0] if batch.dim() > 0 else batch
    if isinstance(batch, Mapping):
        return {name: cut_to_zero(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(cut_to_zero, batch))
    if isinstance(batch, list | tuple):
        is_one_object = len(batch) == 1 and not isinstance(batch[0], torch.Tensor | Mapping | list | tuple)
        kept = [] if is_one_object else map(cut_to_zero, batch)  # a string, say, is an entry of its own
        return tuple(kept) if isinstance(batch, tuple) else list(kept)
    return batch
