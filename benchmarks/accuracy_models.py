"""Models of the published runs, from the dimensions in the data files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from hybrid.planner.architecture import Experts, LatentAttention
from hybrid.planner.model_spec import ModelSpec
from hybrid.planner.transformer import deepseek_spec, gpt_spec, llama_spec, moe_spec

__all__ = ["model_of"]

# Dimensions that the data files have no column for: config.json of deepseek-ai/DeepSeek-V2 and -V3. Of the four layers
# that ran, one is dense: with the published memory no other number is possible.
_LATENT = LatentAttention(query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
_EXPERTS = {
    "deepseekv2": Experts(num=160, top_k=6, ffn=1536, shared_ffn=3072, first_dense=1),
    "deepseekv3": Experts(num=256, top_k=8, ffn=2048, shared_ffn=2048, first_dense=1),
    "deepseek-v3": Experts(num=256, top_k=8, ffn=2048, shared_ffn=2048, first_dense=3),
}
_LLAMAS = {
    "llama3", "internevo", "simumax", "nanotron", "nanotron_pp", "nemo_fp8", "bridge", "bridge_moe", "bridge_moe_a2a",
    "torchtitan", "nemo_2412", "nemo_long", "nemo_gb200", "automodel", "fms_a100", "fms_h100", "titan_a100",
}  # fmt: skip
# `--make-vocab-size-divisible-by`, times the tensor-parallel ranks.
_VOCAB_MULTIPLE = 128


def model_of(row: Mapping[str, str], dataset: str) -> ModelSpec:
    """Of one row of a data file."""
    layers, hidden, heads, ffn, vocab, seq = (
        int(row[name]) for name in ("layers", "hidden", "heads", "ffn", "vocab", "seq")
    )
    name = row["model"]
    if dataset.startswith("mosaic"):
        # mosaicml/llm-foundry: no_bias, learned positions, pdrop 0, loss_fn fused_crossentropy.
        bare = {"dropout": False, "qkv_bias": False, "out_bias": False, "mlp_bias": False, "logit_bytes": 2}
        return _gpt(name, layers, hidden, heads, vocab, seq, **bare)
    if dataset not in _LLAMAS or name.startswith("gpt3"):
        tp = int(row["tp"])
        if dataset == "vtrain_single":
            # src/model/gpt_modeling.py there: rows that tp does not divide are left out; the times show it.
            vocab = vocab // tp * tp
        else:
            vocab = -(-vocab // (_VOCAB_MULTIPLE * tp)) * _VOCAB_MULTIPLE * tp
        # GPT-Neo and OPT are trained without dropout: eth-easl/sailor third_party/Megatron-DeepSpeed, gpt_neo_model.py.
        return _gpt(name, layers, hidden, heads, vocab, seq, dropout=dataset != "sailor")
    # InternEvo too has one kernel each for norms and rotary positions: internlm/model/utils.py takes Apex's
    # MixedFusedRMSNorm (its installation asks for Apex), embedding.py flash-attention's rotary kernel.
    changes: dict[str, Any] = {}
    if name.startswith("nanotron"):  # gates and cross entropy as PyTorch runs them
        changes = {"kernels": "eager", "logit_bytes": 6, "is_tied": hidden < 4096}
    elif dataset == "torchtitan":
        changes = {"kernels": "eager" if name.endswith("-eager") else "fused", "logit_bytes": 6}
    elif dataset in {"fms_a100", "fms_h100", "titan_a100"}:  # not compiled, nothing fused but attention
        changes = {"kernels": "eager", "logit_bytes": 6}
    elif name.startswith("nemotron"):  # squared ReLU, arXiv:2402.16819 section 2.2
        changes = {"is_gated": False, "activation": "relu", "norm": "layer"}
    return _llama(name, layers, hidden, heads, int(row["kv_heads"]), ffn, vocab, seq, **changes)


@cache
def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int, seq: int, **changes: Any) -> ModelSpec:
    return gpt_spec(name, layers=layers, hidden=hidden, heads=heads, vocab=vocab, seq=seq, **changes)


@cache
def _llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq: int, **changes: Any
) -> ModelSpec:
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "seq": seq, **changes}
    experts = _EXPERTS.get(name.rpartition("-25")[0] or name)
    if experts is not None:
        return deepseek_spec(name, latent=_LATENT, experts=experts, ffn=ffn, **shape)
    if name.startswith("qwen3"):
        family = {"family": "qwen3_moe", "head_dim": 128, "has_qk_norm": True}
        return moe_spec(name, num_experts=128, top_k=8, expert_ffn=ffn, kv_heads=kv_heads, **family, **shape)
    if name.startswith("mixtral"):
        return moe_spec(name, num_experts=8, top_k=2, expert_ffn=ffn, kv_heads=kv_heads, **shape)
    return llama_spec(name, kv_heads=kv_heads, ffn=ffn, **shape)
