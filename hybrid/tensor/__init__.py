"""Tensor parallelism: layers cut over the ranks of the axis tp, on local plain tensors.

The layers may be used by hand; `strategy.tensor_parallel` cuts an ordinary model into them.
"""

from __future__ import annotations

from hybrid.tensor import logits_shapes, logits_values  # noqa: F401 (what logits can do registers itself)
from hybrid.tensor.layers import (
    ColumnParallelEmbedding,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from hybrid.tensor.logits import VocabParallelLogits
from hybrid.tensor.loss import ParallelCrossEntropy, cross_entropy

__all__ = [
    "ColumnParallelEmbedding",
    "ColumnParallelLinear",
    "ParallelCrossEntropy",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "VocabParallelLogits",
    "cross_entropy",
]
