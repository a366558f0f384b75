"""A plain GPT over bytes; it knows nothing of hybrid.

Shapes: B sequences, T positions, H heads, D hidden width, V byte values.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["DEMO_HEADS", "DEMO_LENGTH", "GPT"]

NUM_BYTES = 256
DEMO_LENGTH = 64  # bytes of a sequence in `hybrid demo`
DEMO_HEADS = 5


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.num_heads = num_heads
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
        batch, length, _ = x_BTD.shape
        # [B, T, 3D] -> three times [B, H, T, D/H]
        heads = self.query_key_value(x_BTD).view(batch, length, 3, self.num_heads, self.head_dim)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Bytes [B, T] -> logits of the next byte [B, T, V]; the head is the embedding's own weight."""

    def __init__(
        self, *, width: int = 320, num_layers: int = 8, num_heads: int = DEMO_HEADS, max_length: int = 256
    ) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self.head.weight = self.embedding.weight
        self._initialise(num_layers)

    def _initialise(self, num_layers: int) -> None:
        """GPT-2's: 0.02 everywhere, and less where a block adds to the residual stream."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                is_residual = name.endswith(("attention_out", "mlp_out"))
                nn.init.normal_(module.weight, std=0.02 / (2 * num_layers) ** 0.5 if is_residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        positions_T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        # Scaled, as in "Attention Is All You Need" §3.4: one weight serves as small head and as large input.
        x_BTD = self.embedding(bytes_BT) * self.width**0.5 + self.position(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))
