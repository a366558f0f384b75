"""A GPT written by hand, to be cut by a user's plan: q, k and v in one layer, logits as its output."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = [
    "GPT",
    "GPT_PLAN",
    "GROUPED_PLAN",
    "HEADS",
    "LENGTH",
    "LORA_PLAN",
    "SAMPLES",
    "VOCABULARY",
    "WIDTH",
    "Batch",
    "GroupedAttention",
    "logits_loss",
    "tokens",
]

SAMPLES, LENGTH, VOCABULARY, WIDTH, HEADS = 8, 8, 67, 16, 4

Batch = dict[str, torch.Tensor]


class Attention(nn.Module):
    """Causal attention whose queries, keys and values come from one layer; `rank`: with a LoRA-style side path."""

    def __init__(self, width: int, num_heads: int, *, dropout: float = 0.0, rank: int = 0) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = num_heads, width // num_heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        if rank:
            self.lora_a, self.lora_b = nn.Linear(width, rank, bias=False), nn.Linear(rank, 3 * width, bias=False)
            nn.init.normal_(self.lora_a.weight, std=0.3)
            nn.init.normal_(self.lora_b.weight, std=0.3)
        self.has_side_path = rank > 0
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.qkv(x)
        if self.has_side_path:
            fused = fused + self.lora_b(self.lora_a(x))
        heads = (part.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for part in fused.chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(*heads, dropout_p=dropout, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class GroupedAttention(nn.Module):
    """Causal attention of which two query heads share one of keys and values; layers and attributes as in Llama."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, width // num_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, num_kv_heads * self.head_dim)
        self.v_proj = nn.Linear(width, num_kv_heads * self.head_dim)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            layer(x).unflatten(-1, (n, self.head_dim)).transpose(1, 2) for layer, n in zip(layers, sizes, strict=True)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.inner_dropout, self.dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(self.inner_dropout(functional.gelu(self.up(x)))))


class Block(nn.Module):
    def __init__(self, *, dropout: float = 0.0, rank: int = 0, grouped: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn: nn.Module = Attention(WIDTH, HEADS, dropout=dropout, rank=rank)
        if grouped:
            self.attn = GroupedAttention(WIDTH, HEADS, HEADS // 2)
        self.mlp = FeedForward(WIDTH, 24, dropout=dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder with the logits as its output.

    Args:
        tied: the head is the embedding.
        unused: a layer, cut like the others, that no forward calls.
        rank: of trainable side paths beside the attention's weights; all other weights are frozen.
        grouped: fewer heads of keys and values than of queries.
        frozen: the embeddings are not trained, so that no input of the first block needs a gradient.
    """

    def __init__(
        self,
        *,
        tied: bool = False,
        unused: bool = False,
        rank: int = 0,
        dropout: float = 0.0,
        grouped: bool = False,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout=dropout, rank=rank, grouped=grouped) for _ in range(2))
        if unused:
            self.spare = FeedForward(WIDTH, 24)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.wte.weight
        if rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad = ".lora_" in name
        if frozen:
            self.wte.requires_grad_(False)
            self.wpe.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.wte(ids) + self.wpe.weight[: ids.shape[1]])
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


GPT_PLAN: dict[str, Any] = {
    "blocks.*.attn.qkv": {"style": "colwise", "fused": 3, "divide": ["num_heads"]},
    "blocks.*.attn.proj": "rowwise",
    "**.up": "colwise",
    "**.down": "rowwise",
}
LORA_PLAN = GPT_PLAN | {
    "blocks.*.attn.lora_a": "replicated",
    "blocks.*.attn.lora_b": {"style": "colwise", "fused": 3, "divide": ["num_heads"]},
}


GROUPED_PLAN = {"**.up": "colwise", "**.down": "rowwise"}  # the attention has known names


def tokens(step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def logits_loss(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(batch["ids"])
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), batch["labels"].reshape(-1))
