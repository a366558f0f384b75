"""Random state of a run: alike where ranks must agree, different where they must not."""

from __future__ import annotations

import random

import numpy as np
import torch

__all__ = ["seed_everything", "seed_for_data_rank"]

# Far apart, so that the streams of neighbouring seeds and of data ranks do not meet.
_DATA_RANK_STRIDE = 1_000_003
_STAGE_STRIDE = 7_919_000_017


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch alike on all ranks: models built afterwards start from the same weights."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_for_data_rank(seed: int, *, data_rank: int, stage: int = 0) -> None:
    """Seed torch differently on each data-parallel rank and pipeline stage, so that their dropout masks differ."""
    torch.manual_seed(seed + _DATA_RANK_STRIDE * (data_rank + 1) + _STAGE_STRIDE * stage)
