"""Models of the published runs, from the dimensions in the data files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from hybrid.planner.architecture import Experts, LatentAttention
from hybrid.planner.model_spec import ModelSpec
from hybrid.planner.transformer import deepseek_spec, gpt_spec, llama_spec

__all__ = ["model_of"]

# Dimensions that the data files have no column for: config.json of deepseek-ai/DeepSeek-V2 and -V3. Of the four layers
# that ran, one is dense: with the published memory no other number is possible.
_LATENT = LatentAttention(query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
_EXPERTS = {
    "deepseekv2": Experts(num=160, top_k=6, ffn=1536, shared_ffn=3072, first_dense=1),
    "deepseekv3": Experts(num=256, top_k=8, ffn=2048, shared_ffn=2048, first_dense=1),
}
_LLAMAS = {"llama3", "internevo", "simumax"}
# `--make-vocab-size-divisible-by`, times the tensor-parallel ranks.
_VOCAB_MULTIPLE = 128


def model_of(row: Mapping[str, str], dataset: str) -> ModelSpec:
    """Of one row of a data file."""
    layers, hidden, heads, ffn, vocab, seq = (
        int(row[name]) for name in ("layers", "hidden", "heads", "ffn", "vocab", "seq")
    )
    if dataset not in _LLAMAS:
        tp = int(row["tp"])
        if dataset == "vtrain_single":
            # src/model/gpt_modeling.py there: rows that tp does not divide are left out; the times show it.
            vocab = vocab // tp * tp
        else:
            vocab = -(-vocab // (_VOCAB_MULTIPLE * tp)) * _VOCAB_MULTIPLE * tp
        # GPT-Neo and OPT are trained without dropout: eth-easl/sailor third_party/Megatron-DeepSpeed, gpt_neo_model.py.
        return _gpt(row["model"], layers, hidden, heads, vocab, seq, dataset != "sailor")
    # InternEvo too has one kernel each for norms and rotary positions: internlm/model/utils.py takes Apex's
    # MixedFusedRMSNorm (its installation asks for Apex), embedding.py flash-attention's rotary kernel.
    return _llama(row["model"], layers, hidden, heads, int(row["kv_heads"]), ffn, vocab, seq)


@cache
def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int, seq: int, dropout: bool) -> ModelSpec:
    return gpt_spec(name, layers=layers, hidden=hidden, heads=heads, vocab=vocab, seq=seq, dropout=dropout)


@cache
def _llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq: int) -> ModelSpec:
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "vocab": vocab, "seq": seq}
    if name in _EXPERTS:
        return deepseek_spec(name, latent=_LATENT, experts=_EXPERTS[name], **shape)
    return llama_spec(name, kv_heads=kv_heads, **shape)
