"""The model that all benchmarks train: a GPT with separate embedding and head.

Shapes: B sequences, T positions, H heads, D hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

__all__ = ["SIZES", "BenchGPT", "Block", "Size", "make_batch"]


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
    # For the test that the benchmarks run at all.
    "tiny": Size(width=32, num_layers=2, num_heads=2, vocabulary=64, sequence=8, micro_batch=1),
}


class Block(nn.Module):
    """Pre-norm attention and MLP. Shapes follow from the layers' outputs, so that it works with a part of the heads."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_size = width // num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self._attend(self.attention_norm(x_BTD))
        return x_BTD + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x_BTD))))

    def _attend(self, x_BTD: torch.Tensor) -> torch.Tensor:
        # [B, T, 3D] -> three times [B, H, T, D/H]
        heads = self.query_key_value(x_BTD).unflatten(-1, (3, -1, self.head_size))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))


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
