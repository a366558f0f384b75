"""Feeding a run: which samples each data-parallel coordinate reads, and where it stands in an epoch."""

from __future__ import annotations

from hybrid.data.coordinate import DataCoordinate, set_coordinate_provider
from hybrid.data.sampler import DistributedBatchSampler

__all__ = ["DataCoordinate", "DistributedBatchSampler", "set_coordinate_provider"]
