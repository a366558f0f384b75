"""The model that all benchmarks train: a GPT with separate embedding and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from hybrid.demo.gpt import Block

__all__ = ["SIZES", "BenchGPT", "Size", "make_batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Model and micro-batch of one benchmark size."""

    width: int
    num_layers: int
    num_heads: int
    vocabulary: int
    sequence: int
    micro_batch: int


SIZES = {
    "S": Size(width=256, num_layers=8, num_heads=8, vocabulary=8192, sequence=128, micro_batch=4),
    "M": Size(width=768, num_layers=8, num_heads=12, vocabulary=16384, sequence=128, micro_batch=2),
}


class BenchGPT(nn.Module):
    """Token ids [B, T] -> mean cross-entropy of the next token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.sequence, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.num_heads) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(tokens_BT) + self.position.weight
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        return functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def make_batch(size: Size, *, step: int, rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of one of four fixed random batches."""
    generator = torch.Generator().manual_seed(1000 + step % 4)
    shape = (size.micro_batch * num_ranks, size.sequence + 1)
    rows = torch.randint(size.vocabulary, shape, generator=generator)
    mine = rows[rank * size.micro_batch : (rank + 1) * size.micro_batch]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
