"""Layers that are cut over the tp ranks, for models written by hand: the public names in one place."""

from __future__ import annotations

from hybrid.tensor.cut_module import CutModule, TensorParallelInfo, local_part, set_group_provider, shared_region
from hybrid.tensor.embedding import ColumnParallelEmbedding, VocabParallelEmbedding
from hybrid.tensor.head import VocabParallelHead
from hybrid.tensor.linear import ColumnParallel, ColumnParallelLinear, RowParallel, RowParallelLinear

__all__ = [
    "ColumnParallel",
    "ColumnParallelEmbedding",
    "ColumnParallelLinear",
    "CutModule",
    "RowParallel",
    "RowParallelLinear",
    "TensorParallelInfo",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "local_part",
    "set_group_provider",
    "shared_region",
]
