"""Transformers in closed form: every unit of a model from its dimensions.

Activations are those of one process; what tensor parallel cuts is marked (`ActivationBytes`). For a GPT block the
sums are those of arXiv:2205.05198, table 2, with 18 + 4·ffn/h in place of 34 where the feed-forward is not 4·h wide.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from hybrid.planner.architecture import Architecture, Experts, LatentAttention
from hybrid.planner.blocks import add_block
from hybrid.planner.ends import add_embedding, add_head
from hybrid.planner.model_spec import ModelSpec, ParameterSpec, UnitKind, UnitSpec
from hybrid.planner.parameter_names import FAMILIES
from hybrid.planner.transformer_parameters import (
    before_blocks,
    block_parameters,
    embedding_parameters,
    head_parameters,
)
from hybrid.planner.unit_ledger import Ledger

__all__ = ["deepseek_spec", "gpt_spec", "llama_spec", "moe_spec", "transformer_spec"]


def gpt_spec(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int | None = None,
    vocab: int,
    seq: int,
    family: str = "megatron",
    dropout: bool = True,
    **changes: Any,
) -> ModelSpec:
    """A GPT: learned positions, layer norms, GELU, biases, dropout, the head tied to the token table.

    Args:
        name: of the model.
        layers, hidden, heads, vocab: dimensions; `ffn` is 4·hidden where it is not given.
        seq: rows of the position table, and tokens of a sample.
        family: names of the modules: `megatron`, `gpt2`, `gpt_neo`, `opt`.
        dropout: of hidden values and of attention.
        changes: any other field of `Architecture`.
    """
    given: dict[str, Any] = {
        "positions": "learned",
        "position_rows": seq + FAMILIES[family].extra_positions,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "embedding_dropout": dropout,
        "head_dim": hidden // heads,
        "kv_heads": heads,
        "max_seq": seq,
        "default_seq": seq,
        **changes,
    }
    return transformer_spec(
        Architecture(
            name=name, family=family, layers=layers, hidden=hidden, heads=heads, ffn=ffn or 4 * hidden, vocab=vocab,
            **given,
        )
    )  # fmt: skip


def llama_spec(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int | None = None,
    ffn: int,
    vocab: int,
    seq: int,
    family: str = "llama",
    head_dim: int | None = None,
    **changes: Any,
) -> ModelSpec:
    """A Llama: rotary positions, RMS norms, SwiGLU, fewer heads of keys and values, no biases, no dropout.

    Args:
        name: of the model.
        layers, hidden, heads, ffn, vocab: dimensions; `kv_heads` is `heads` and `head_dim` hidden / heads where they
            are not given.
        seq: tokens of a sample, and the longest.
        family: names of the modules: `llama`, `qwen3`, `phi3`, `mixtral`, `qwen3_moe`, `deepseek`.
        changes: any other field of `Architecture`, such as `qkv_bias=True`.
    """
    given: dict[str, Any] = {
        "is_gated": True,
        "activation": "silu",
        "norm": "rms",
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
        "positions": "rotary",
        "is_tied": False,
        "head_dim": head_dim or hidden // heads,
        "kv_heads": kv_heads or heads,
        "max_seq": seq,
        "default_seq": seq,
        **changes,
    }
    return transformer_spec(
        Architecture(name=name, family=family, layers=layers, hidden=hidden, heads=heads, ffn=ffn, vocab=vocab, **given)
    )


def moe_spec(name: str, *, num_experts: int, top_k: int, expert_ffn: int, **dimensions: Any) -> ModelSpec:
    """A Llama with a mixture of experts in every block (Mixtral, Qwen3-MoE).

    Args:
        name: of the model.
        num_experts, top_k, expert_ffn: experts, those of them that a token passes, inner width of one.
        dimensions: as `llama_spec` takes them.
    """
    experts = Experts(num=num_experts, top_k=top_k, ffn=expert_ffn)
    return llama_spec(name, **{"family": "mixtral", "ffn": expert_ffn, **dimensions, "experts": experts})


def deepseek_spec(
    name: str, *, latent: LatentAttention, experts: Experts | None = None, **dimensions: Any
) -> ModelSpec:
    """DeepSeek-V2 and -V3: latent attention, shared experts, the first blocks dense.

    Args:
        name: of the model.
        latent, experts: see there.
        dimensions: as `llama_spec` takes them.
    """
    head_dim = latent.nope_dim + latent.rope_dim
    given = {"family": "deepseek", "head_dim": head_dim, **dimensions}
    return llama_spec(name, **given, latent=latent, experts=experts)


@lru_cache(maxsize=256)
def transformer_spec(arch: Architecture, *, source: str = "dimensions", notes: tuple[str, ...] = ()) -> ModelSpec:
    """All units of a model: the embedding, each block, the head."""
    first = Ledger(element_bytes=arch.activation_bytes, hidden=arch.hidden)
    add_embedding(first, arch)
    last = Ledger(element_bytes=arch.activation_bytes, hidden=arch.hidden)
    add_head(last, arch)
    head = _unit(arch, "head", "head", head_parameters(arch), last)
    if arch.head not in {"none", "classes"}:
        head = replace(head, logits_per_token=arch.vocab)
    embedding = _unit(arch, "embedding", "embedding", embedding_parameters(arch), first)
    embedding = replace(embedding, adds_positions=FAMILIES[arch.family].adds_positions)
    units = [embedding, *_blocks(arch), head]
    return ModelSpec(
        name=arch.name,
        units=tuple(units),
        hidden=arch.hidden,
        num_heads=arch.heads,
        num_kv_heads=arch.kv_heads,
        ffn=arch.ffn,
        vocab=arch.vocab if arch.head != "classes" else 0,
        max_seq=arch.max_seq,
        made_for_seq=arch.made_for_seq,
        default_seq=arch.default_seq,
        num_experts=arch.experts.num if arch.experts is not None else 0,
        sequence_refusal=FAMILIES[arch.family].sequence_refusal,
        before_blocks=before_blocks(arch),
        source=source,
        notes=notes,
    )


def _blocks(arch: Architecture) -> list[UnitSpec]:
    made: dict[bool, UnitSpec] = {}
    found = []
    for layer in range(arch.layers):
        has_experts = arch.has_experts(layer)
        if has_experts not in made:
            is_gathered = bool(FAMILIES[arch.family].gathered)
            ledger = Ledger(element_bytes=arch.activation_bytes, hidden=arch.hidden, is_gathered=is_gathered)
            add_block(ledger, arch, has_experts=has_experts)
            made[has_experts] = _unit(arch, "", "block", block_parameters(arch, layer), ledger)
        found.append(replace(made[has_experts], name=FAMILIES[arch.family].blocks.format(layer)))
    return found


def _unit(
    arch: Architecture, name: str, kind: UnitKind, parameters: tuple[ParameterSpec, ...], ledger: Ledger
) -> UnitSpec:
    return UnitSpec(
        name=name,
        kind=kind,
        parameters=parameters,
        matmuls=tuple(ledger.matmuls),
        attentions=tuple(ledger.attentions),
        activations=ledger.activations(is_recomputed=kind == "block"),
        traffic_whole=ledger.traffic["whole"],
        traffic_cut=ledger.traffic["cut"],
        traffic_pairs=ledger.traffic["pairs"],
        num_kernels=ledger.num_kernels,
        input_bytes=0 if kind == "embedding" else arch.hidden * arch.activation_bytes,
        num_tp_reductions=ledger.num_tp_reductions,
        gathered_forward=tuple(ledger.gathered_forward),
        gathered_backward=tuple(ledger.gathered_backward),
        leaves_last_sum=not arch.hidden_dropout and arch.is_pre_norm and arch.norms_per_block == 2,
        expert_rows=ledger.expert_rows,
    )
