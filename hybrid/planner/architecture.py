"""The dimensions of a transformer, from which everything else about it follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Architecture", "Experts", "Kernels", "LatentAttention"]

Kernels = Literal["fused", "eager"]
"""`fused`: norms, rotary positions and gated activations are one kernel each that saves its inputs only (Megatron-LM,
Transformer Engine, `torch.nn.functional.rms_norm`). `eager`: as Transformers writes them, operation by operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer.

    Args:
        num: routed experts.
        top_k: of them, per token.
        ffn: inner width of one.
        shared_ffn: inner width of the experts that every token passes; 0 without.
        first_dense: so many leading blocks have an ordinary feed-forward layer.
        has_shared_gate: the shared expert's output is weighted by a gate of its own (Qwen2-MoE).
    """

    num: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    first_dense: int = 0
    has_shared_gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention (arXiv:2405.04434, section 2.1).

    Args:
        query_rank: width of the compressed queries; 0 where they are not compressed.
        kv_rank: of the compressed keys and values.
        nope_dim, rope_dim: parts of a query or key without and with rotary position.
        value_dim: of a head's values.
    """

    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model.

    Args:
        name: of the model.
        family: key of `planner/parameter_names.py`.
        layers, hidden, heads, kv_heads, head_dim, ffn, vocab: dimensions.
        max_seq: rows of a learned position table, or the longest sequence; 0 without a limit.
        made_for_seq: of rotary positions, which any length has: the longest that the configuration names; 0: none.
        default_seq: tokens per sample where none are named.
        is_gated: two matrices up, SwiGLU or GeGLU, instead of one.
        activation: `gelu_new` is GELU written out in Python, six operations where kernels are eager.
        norm: `layer` has a bias.
        norms_per_block: 2; 4 where what attention and feed-forward give back is normalised too (Gemma 2).
        is_pre_norm: norms stand before attention and feed-forward, not after them.
        is_parallel: attention and feed-forward read the same input (GPT-NeoX), which is kept once.
        has_final_norm: one more after the last block.
        has_qk_norm: queries and keys are normalised, each head by itself (Qwen3).
        qkv_bias, out_bias, mlp_bias, head_bias: whether they are there.
        positions: `learned` adds a table of `position_rows`.
        position_rows: rows of that table.
        num_segments: rows of a table of segments (BERT).
        embedding_norm: a norm after the embedding (BERT).
        embedding_width: of the token table where it is not `hidden` (OPT-350M); projections lead in and out.
        head: `lm`; `mlm` has a dense layer, an activation and a norm before; `pretraining` also tells whether two
            sentences follow each other; `classes` reads one token; `none`.
        is_tied: the head is the token table.
        is_table_cut: tensor parallel cuts the token table, and a head tied to it (not Gemma's, which scales its rows).
        is_causal: as attention is.
        is_norm_fp32: eager norms multiply by the weight in fp32 (Gemma), so that they keep twice their input in it.
        hidden_dropout, attention_dropout, embedding_dropout: whether there is any.
        patch: side of an image patch (ViT) and `image`, of the image; 0 for text.
        experts, latent: see there.
        activation_bytes: of an element.
        kernels: see `Kernels`.
        logit_bytes: per element of the logits that the head keeps to backward: 6 is a 16-bit tensor and its fp32
            log-softmax (torch's cross entropy), 4 Megatron-LM's, `activation_bytes` that of `hybrid.cross_entropy`.
        counts_statistics: whether mean and 1/deviation of norms (8 bytes per token) count; the closed form of
            arXiv:2205.05198 leaves them out.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_seq: int = 0
    made_for_seq: int = 0
    default_seq: int = 2048
    is_gated: bool = False
    activation: Literal["gelu", "gelu_new", "relu", "silu"] = "gelu"
    norm: Literal["layer", "rms"] = "layer"
    norms_per_block: Literal[2, 4] = 2
    is_pre_norm: bool = True
    is_parallel: bool = False
    has_final_norm: bool = True
    has_qk_norm: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    head_bias: bool = False
    positions: Literal["learned", "rotary"] = "learned"
    position_rows: int = 0
    num_segments: int = 0
    embedding_norm: bool = False
    embedding_width: int = 0
    head: Literal["lm", "mlm", "pretraining", "classes", "none"] = "lm"
    is_tied: bool = True
    is_table_cut: bool = True
    is_causal: bool = True
    hidden_dropout: bool = False
    attention_dropout: bool = False
    embedding_dropout: bool = False
    is_norm_fp32: bool = False
    patch: int = 0
    image: int = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    activation_bytes: int = 2
    kernels: Kernels = "fused"
    logit_bytes: int = 6
    counts_statistics: bool = False

    @property
    def is_eager(self) -> bool:
        return self.kernels == "eager"

    @property
    def is_head_cut(self) -> bool:
        """Whether tensor parallel cuts the head: one tied to a table that stays whole stays so, too."""
        return self.is_table_cut or not self.is_tied

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        return self.latent.value_dim if self.latent is not None else self.head_dim

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.first_dense
