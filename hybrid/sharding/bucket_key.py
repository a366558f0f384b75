"""What all parameters of a bucket share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybrid.contracts.layout import axis_name

__all__ = ["BucketKey"]


@dataclass(frozen=True, slots=True)
class BucketKey:
    """Parameters that differ in any of this lie in different buckets.

    sync_axes: mesh axes over which gradients are summed.
    copy_axes: mesh axes over which other ranks hold the same parameters: one of them counts them in a norm.
    chunk: pipeline chunk of this rank that computes with them.
    """

    dtype: torch.dtype
    grad_dtype: torch.dtype
    sync_axes: tuple[str, ...]
    copy_axes: tuple[str, ...] = ()
    chunk: int = 0

    @property
    def is_over_stages(self) -> bool:
        """Whether other pipeline stages hold them too: their gradients are summed once per step."""
        return any(axis_name(axis) == "pp" for axis in self.sync_axes)
