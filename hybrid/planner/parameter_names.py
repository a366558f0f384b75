"""What each family of models calls its modules, in the order in which it registers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Role -> name of the module that has it.

    Args:
        blocks: name of a block; `{}` is its number.
        embedding, block, head: roles in the order of registration, of layers outside the blocks in that of their calls;
            those that a model lacks are passed over.
        before_blocks: roles of embedding and head that are registered before the blocks, in that order; empty where
            these are the embedding's as they stand.
        is_transposed: its linear layers hold (in, out), as GPT-2's Conv1D.
        gathered: layers with fused weights that the model's own plan cuts without their parts in mind: each rank
            gathers what they give and takes its part of it again before the row layer. No sequence parallel there.
        extra_positions: rows of the position table beyond the longest sequence (OPT: 2).
        adds_positions: see `UnitSpec`.
    """

    blocks: str
    embedding: Mapping[str, str]
    block: Mapping[str, str]
    head: Mapping[str, str]
    before_blocks: tuple[str, ...] = ()
    is_transposed: bool = False
    gathered: tuple[str, ...] = ()
    extra_positions: int = 0
    adds_positions: Literal["", "sample", "batch"] = ""

    @property
    def sequence_refusal(self) -> str:
        """Why the runtime does not cut the sequence; empty where it does. A test asks `contracts/tensor_rules.py`."""
        if not self.gathered:
            return ""
        return (
            "between the blocks each rank has a part of the sequence, but what the fused layers "
            f"{' and '.join(self.gathered)} give is gathered whole"
        )


_QKV = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
_MLP = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
_NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
_EXPERTS = {"experts_up": "mlp.experts.gate_up_proj", "experts_down": "mlp.experts.down_proj"}
_EMBEDDING = {"token": "model.embed_tokens"}
_HEAD = {"final_norm": "model.norm", "head": "lm_head"}


def _llama(block: Mapping[str, str], *, gathered: tuple[str, ...] = ()) -> Family:
    return Family(blocks="model.layers.{}", embedding=_EMBEDDING, block=block, head=_HEAD, gathered=gathered)


FAMILIES: Mapping[str, Family] = {
    "megatron": Family(
        blocks="decoder.layers.{}",
        embedding={"token": "embedding.word_embeddings", "position": "embedding.position_embeddings"},
        block={
            "norm1": "input_layernorm",
            "out": "self_attention.linear_proj",
            "qkv": "self_attention.linear_qkv",
            "norm2": "pre_mlp_layernorm",
            "gate_up": "mlp.linear_fc1",
            "up": "mlp.linear_fc1",
            "down": "mlp.linear_fc2",
        },
        head={"final_norm": "decoder.final_layernorm", "head": "output_layer"},
    ),
    "gpt2": Family(
        blocks="transformer.h.{}",
        embedding={"token": "transformer.wte", "position": "transformer.wpe"},
        adds_positions="sample",
        block={
            "norm1": "ln_1",
            "qkv": "attn.c_attn",
            "out": "attn.c_proj",
            "norm2": "ln_2",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        },
        head={"final_norm": "transformer.ln_f", "head": "lm_head"},
        is_transposed=True,
    ),
    "gpt_neo": Family(
        blocks="transformer.h.{}",
        embedding={"token": "transformer.wte", "position": "transformer.wpe"},
        adds_positions="sample",
        block={
            "norm1": "ln_1",
            "k": "attn.attention.k_proj",
            "v": "attn.attention.v_proj",
            "q": "attn.attention.q_proj",
            "out": "attn.attention.out_proj",
            "norm2": "ln_2",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        },
        head={"final_norm": "transformer.ln_f", "head": "lm_head"},
    ),
    "gpt_neox": Family(
        blocks="gpt_neox.layers.{}",
        embedding={"token": "gpt_neox.embed_in"},
        block={
            "norm1": "input_layernorm",
            "norm2": "post_attention_layernorm",
            "qkv": "attention.query_key_value",
            "out": "attention.dense",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        },
        head={"final_norm": "gpt_neox.final_layer_norm", "head": "lm_head"},
    ),
    "opt": Family(
        blocks="model.decoder.layers.{}",
        embedding={
            "token": "model.decoder.embed_tokens",
            "position": "model.decoder.embed_positions",
            "project_in": "model.decoder.project_in",
        },
        block={
            "k": "self_attn.k_proj",
            "v": "self_attn.v_proj",
            "q": "self_attn.q_proj",
            "out": "self_attn.out_proj",
            "norm1": "self_attn_layer_norm",
            "up": "fc1",
            "down": "fc2",
            "norm2": "final_layer_norm",
        },
        head={
            "final_norm": "model.decoder.final_layer_norm",
            "project_out": "model.decoder.project_out",
            "head": "lm_head",
        },
        before_blocks=("token", "position", "project_out", "project_in", "final_norm"),
        extra_positions=2,
        adds_positions="batch",
    ),
    "bert": Family(
        blocks="bert.encoder.layer.{}",
        embedding={
            "token": "bert.embeddings.word_embeddings",
            "position": "bert.embeddings.position_embeddings",
            "segment": "bert.embeddings.token_type_embeddings",
            "embedding_norm": "bert.embeddings.LayerNorm",
        },
        block={
            "q": "attention.self.query",
            "k": "attention.self.key",
            "v": "attention.self.value",
            "out": "attention.output.dense",
            "norm1": "attention.output.LayerNorm",
            "up": "intermediate.dense",
            "down": "output.dense",
            "norm2": "output.LayerNorm",
        },
        head={
            "pooler": "bert.pooler.dense",
            "head_bias": "cls.predictions",
            "transform": "cls.predictions.transform.dense",
            "transform_norm": "cls.predictions.transform.LayerNorm",
            "head": "cls.predictions.decoder",
            "next_sentence": "cls.seq_relationship",
        },
    ),
    "vit": Family(
        blocks="vit.layers.{}",
        embedding={
            "class_token": "vit.embeddings.cls_token",
            "position_values": "vit.embeddings.position_embeddings",
            "patch": "vit.embeddings.patch_embeddings.projection",
        },
        block={
            "q": "attention.q_proj",
            "k": "attention.k_proj",
            "v": "attention.v_proj",
            "out": "attention.o_proj",
            "norm1": "layernorm_before",
            "norm2": "layernorm_after",
            "up": "mlp.fc1",
            "down": "mlp.fc2",
        },
        head={"final_norm": "vit.layernorm", "head": "classifier"},
    ),
    "llama": _llama({**_QKV, "out": "self_attn.o_proj", **_MLP, **_NORMS}),
    "qwen3": _llama(
        {
            **_QKV,
            "out": "self_attn.o_proj",
            "q_norm": "self_attn.q_norm",
            "k_norm": "self_attn.k_norm",
            **_MLP,
            **_NORMS,
        }
    ),
    "phi3": _llama(
        {
            "out": "self_attn.o_proj",
            "qkv": "self_attn.qkv_proj",
            "gate_up": "mlp.gate_up_proj",
            "down": "mlp.down_proj",
            **_NORMS,
        },
        gathered=("self_attn.qkv_proj", "mlp.gate_up_proj"),
    ),
    "gemma2": _llama(
        {
            **_QKV,
            "out": "self_attn.o_proj",
            **_MLP,
            "norm1": "input_layernorm",
            "post1": "post_attention_layernorm",
            "norm2": "pre_feedforward_layernorm",
            "post2": "post_feedforward_layernorm",
        }
    ),
    "mixtral": _llama({**_QKV, "out": "self_attn.o_proj", "router": "mlp.gate", **_EXPERTS, **_NORMS}),
    "qwen3_moe": _llama(
        {
            **_QKV,
            "out": "self_attn.o_proj",
            "q_norm": "self_attn.q_norm",
            "k_norm": "self_attn.k_norm",
            **_EXPERTS,
            "router": "mlp.gate",
            **_MLP,
            **_NORMS,
        }
    ),
    "deepseek": _llama(
        {
            "q": "self_attn.q_proj",
            "q_a": "self_attn.q_a_proj",
            "q_a_norm": "self_attn.q_a_layernorm",
            "q_b": "self_attn.q_b_proj",
            "kv_a": "self_attn.kv_a_proj_with_mqa",
            "kv_a_norm": "self_attn.kv_a_layernorm",
            "kv_b": "self_attn.kv_b_proj",
            "out": "self_attn.o_proj",
            **_EXPERTS,
            "router": "mlp.gate",
            "shared_gate": "mlp.shared_experts.gate_proj",
            "shared_up": "mlp.shared_experts.up_proj",
            "shared_down": "mlp.shared_experts.down_proj",
            **_MLP,
            **_NORMS,
        }
    ),
}
