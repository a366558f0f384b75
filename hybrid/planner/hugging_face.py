"""From a model's `config.json` to its architecture: the fields that Transformers' own classes read, by model type.

Where a field is absent, the default is that of the class in Transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybrid.errors import PlanError
from hybrid.planner.architecture import Architecture, Experts, LatentAttention
from hybrid.planner.config_fields import Fields
from hybrid.planner.nearest import nearest

__all__ = ["MODEL_TYPES", "architecture_of", "read_config"]

_LONGEST_DEFAULT = 8192  # tokens of a sample where the user names none, for models that can take many more


def architecture_of(config: Mapping[str, Any], *, name: str, **changes: Any) -> Architecture:
    """The architecture that a configuration describes.

    Args:
        config: as `to_dict()` or `config.json` has it.
        name: of the model.
        changes: fields of `Architecture` that are not in a configuration, such as `kernels` or `activation_bytes`.

    Raises:
        PlanError: another model type, or a field that is missing or no positive number; all of them at once.
    """
    return read_config(config, name=name, **changes)[0]


def read_config(config: Mapping[str, Any], *, name: str, **changes: Any) -> tuple[Architecture, tuple[str, ...]]:
    """As `architecture_of`, with what a reader should know: sizes that were not given, fields that do not count."""
    model_type = config.get("model_type")
    read = _READERS.get(str(model_type))
    if read is None and model_type is None:
        raise PlanError(
            f"{name}: the configuration has no model_type, which says what kind of model its other fields are of: add "
            f"it ({', '.join(_READERS)}), or give the config.json that save_pretrained of Transformers writes"
        )
    if read is None:
        raise PlanError(
            f"{name}: model_type {model_type!r} is not among those with closed forms "
            f"({', '.join(_READERS)}). Any other model is measured: give package.module:factory, or from Python the "
            "module itself with an example batch, hybrid.plan(model, cluster, sample=batch, ...)"
            f"{nearest(str(model_type), _READERS)}"
        )
    fields = Fields(config, name)
    given: dict[str, Any] = {"name": name, **read(fields)}
    fields.raise_all()
    return Architecture(**{**given, **changes}), tuple(fields.notes())


def _heads(fields: Fields, *names: str, hidden: int) -> dict[str, Any]:
    heads = fields.number(*names)
    if hidden % heads and not fields.config.get("head_dim"):
        fields.problems.append(
            f"{fields.name}: {heads} heads do not divide the width {hidden}, and there is no head_dim"
        )
    return {"heads": heads, "kv_heads": heads, "head_dim": max(1, hidden // heads), "hidden": hidden}


def _activation(name: str) -> str:
    if name in {"gelu_new", "gelu_fast", "gelu_python", "quick_gelu"}:
        return "gelu_new"
    return name if name in {"relu", "silu"} else "gelu"


def _learned(rows: int, *, extra: int = 0) -> dict[str, Any]:
    return {"position_rows": rows + extra, "max_seq": rows, "default_seq": min(rows, _LONGEST_DEFAULT)}


def _gpt2(fields: Fields) -> dict[str, Any]:
    hidden = fields.number("n_embd", "hidden_size", default=768)
    return {
        "family": "gpt2",
        "layers": fields.number("n_layer", "num_hidden_layers", default=12),
        **_heads(fields, "n_head", "num_attention_heads", hidden=hidden),
        "ffn": fields.number("n_inner", default=4 * hidden),
        "vocab": fields.number("vocab_size", default=50257),
        **_learned(fields.number("n_positions", "max_position_embeddings", default=1024)),
        "activation": _activation(fields.word("activation_function", default="gelu_new")),
        "is_tied": fields.flag("tie_word_embeddings", default=True),
        "hidden_dropout": fields.share("resid_pdrop", default=0.1),
        "attention_dropout": fields.share("attn_pdrop", default=0.1),
        "embedding_dropout": fields.share("embd_pdrop", default=0.1),
    }


def _gpt_neo(fields: Fields) -> dict[str, Any]:
    hidden = fields.number("hidden_size", default=2048)
    return {
        "family": "gpt_neo",
        "layers": fields.number("num_layers", default=24),
        **_heads(fields, "num_heads", hidden=hidden),
        "ffn": fields.number("intermediate_size", default=4 * hidden),
        "vocab": fields.number("vocab_size", default=50257),
        **_learned(fields.number("max_position_embeddings", default=2048)),
        "activation": _activation(fields.word("activation_function", default="gelu_new")),
        "qkv_bias": False,
        "is_tied": fields.flag("tie_word_embeddings", default=True),
        "hidden_dropout": fields.share("resid_dropout"),
        "embedding_dropout": fields.share("embed_dropout"),
        "attention_dropout": fields.share("attention_dropout"),
    }


def _gpt_neox(fields: Fields) -> dict[str, Any]:
    hidden = fields.number("hidden_size", default=6144)
    has_bias = fields.flag("attention_bias", default=True)
    longest = fields.number("max_position_embeddings", default=2048)
    return {
        "family": "gpt_neox",
        "layers": fields.number("num_hidden_layers", default=44),
        **_heads(fields, "num_attention_heads", hidden=hidden),
        "ffn": fields.number("intermediate_size", default=24576),
        "vocab": fields.number("vocab_size", default=50432),
        "default_seq": min(longest, _LONGEST_DEFAULT),
        "made_for_seq": longest,
        "activation": _activation(fields.word("hidden_act", default="gelu")),
        "qkv_bias": has_bias,
        "out_bias": has_bias,
        "positions": "rotary",
        "is_parallel": fields.flag("use_parallel_residual", default=True),
        "is_tied": fields.flag("tie_word_embeddings", default=False),
        "hidden_dropout": fields.share("hidden_dropout"),
        "attention_dropout": fields.share("attention_dropout"),
    }


def _opt(fields: Fields) -> dict[str, Any]:
    hidden = fields.number("hidden_size", default=768)
    width = fields.number("word_embed_proj_dim", default=hidden)
    has_bias = fields.flag("enable_bias", default=True)
    is_pre_norm = fields.flag("do_layer_norm_before", default=True)
    return {
        "family": "opt",
        "layers": fields.number("num_hidden_layers", default=12),
        **_heads(fields, "num_attention_heads", hidden=hidden),
        "ffn": fields.number("ffn_dim", default=3072),
        "vocab": fields.number("vocab_size", default=50272),
        **_learned(fields.number("max_position_embeddings", default=2048), extra=2),
        "activation": _activation(fields.word("activation_function", default="relu")),
        "qkv_bias": has_bias,
        "out_bias": has_bias,
        "mlp_bias": has_bias,
        "is_pre_norm": is_pre_norm,
        "has_final_norm": is_pre_norm and not fields.flag("_remove_final_layer_norm", default=False),
        "embedding_width": width if width != hidden else 0,
        "is_tied": fields.flag("tie_word_embeddings", default=True),
        "hidden_dropout": fields.share("dropout", default=0.1),
        "attention_dropout": fields.share("attention_dropout"),
    }


def _bert(fields: Fields) -> dict[str, Any]:
    architectures = [str(one) for one in fields.config.get("architectures") or ()]
    head = "pretraining" if any(one.endswith("ForPreTraining") for one in architectures) else "mlm"
    return {
        "family": "bert",
        "layers": fields.number("num_hidden_layers", default=12),
        **_heads(fields, "num_attention_heads", hidden=fields.number("hidden_size", default=768)),
        "ffn": fields.number("intermediate_size", default=3072),
        "vocab": fields.number("vocab_size", default=30522),
        **_learned(fields.number("max_position_embeddings", default=512)),
        "num_segments": fields.number("type_vocab_size", default=2),
        "activation": _activation(fields.word("hidden_act", default="gelu")),
        "embedding_norm": True,
        "is_pre_norm": False,
        "has_final_norm": False,
        "is_causal": False,
        "head": head,
        "hidden_dropout": fields.share("hidden_dropout_prob", default=0.1),
        "embedding_dropout": fields.share("hidden_dropout_prob", default=0.1),
        "attention_dropout": fields.share("attention_probs_dropout_prob", default=0.1),
    }


def _vit(fields: Fields) -> dict[str, Any]:
    image, patch = fields.number("image_size", default=224), fields.number("patch_size", default=16)
    labels = fields.config.get("id2label")
    has_bias = fields.flag("qkv_bias", default=True)
    rows = (image // patch) ** 2 + 1
    return {
        "family": "vit",
        "layers": fields.number("num_hidden_layers", default=12),
        **_heads(fields, "num_attention_heads", hidden=fields.number("hidden_size", default=768)),
        "ffn": fields.number("intermediate_size", default=3072),
        "vocab": len(labels) if isinstance(labels, Mapping) else fields.number("num_labels", default=2),
        **_learned(rows),
        "image": image,
        "patch": patch,
        "activation": _activation(fields.word("hidden_act", default="gelu")),
        "qkv_bias": has_bias,
        "is_tied": False,
        "is_causal": False,
        "head": "classes",
        "head_bias": True,
        "hidden_dropout": fields.share("hidden_dropout_prob"),
        "embedding_dropout": fields.share("hidden_dropout_prob"),
        "attention_dropout": fields.share("attention_probs_dropout_prob"),
    }


def _llama(fields: Fields) -> dict[str, Any]:
    hidden = fields.number("hidden_size", default=4096)
    heads = _heads(fields, "num_attention_heads", hidden=hidden)
    kv_heads = fields.number("num_key_value_heads", default=heads["heads"])
    if heads["heads"] % kv_heads:
        fields.problems.append(f"{fields.name}: {kv_heads} key/value heads do not divide {heads['heads']} heads")
    has_bias = fields.flag("attention_bias", default=False)
    longest = fields.number("max_position_embeddings", default=2048)
    return {
        "family": "llama",
        "layers": fields.number("num_hidden_layers", default=32),
        **heads,
        "kv_heads": kv_heads,
        "head_dim": fields.number("head_dim", default=heads["head_dim"]),
        "ffn": fields.number("intermediate_size", default=11008),
        "vocab": fields.number("vocab_size", default=32000),
        "default_seq": min(longest, _LONGEST_DEFAULT),
        "made_for_seq": longest,
        "is_gated": True,
        "activation": "silu",
        "norm": "rms",
        "qkv_bias": has_bias,
        "out_bias": has_bias,
        "mlp_bias": fields.flag("mlp_bias", default=False),
        "positions": "rotary",
        "is_tied": fields.flag("tie_word_embeddings", default=False),
        "attention_dropout": fields.share("attention_dropout"),
    }


def _qwen2(fields: Fields) -> dict[str, Any]:
    return {**_llama(fields), "qkv_bias": True, "out_bias": False, "mlp_bias": False}


def _qwen3(fields: Fields) -> dict[str, Any]:
    head_dim = fields.number("head_dim", default=128)
    return {**_llama(fields), "family": "qwen3", "head_dim": head_dim, "has_qk_norm": True, "mlp_bias": False}


def _mistral(fields: Fields) -> dict[str, Any]:
    given = _llama(fields)
    kv_heads = fields.number("num_key_value_heads", default=8)
    return {**given, "kv_heads": kv_heads, "qkv_bias": False, "out_bias": False, "mlp_bias": False}


def _phi3(fields: Fields) -> dict[str, Any]:
    given = {**_llama(fields), "family": "phi3", "qkv_bias": False, "out_bias": False, "mlp_bias": False}
    return {**given, "hidden_dropout": fields.share("resid_pdrop")}


def _gemma(fields: Fields) -> dict[str, Any]:
    head_dim = fields.number("head_dim", default=256)
    tied = fields.flag("tie_word_embeddings", default=True)
    changes = {"activation": "gelu", "head_dim": head_dim, "is_tied": tied, "mlp_bias": False, "is_norm_fp32": True}
    return {**_llama(fields), **changes, "is_table_cut": False}


def _gemma2(fields: Fields) -> dict[str, Any]:
    return {**_gemma(fields), "family": "gemma2", "norms_per_block": 4}


def _mixtral(fields: Fields) -> dict[str, Any]:
    given = _mistral(fields)
    experts = Experts(
        num=fields.number("num_local_experts", "num_experts", default=8),
        top_k=fields.number("num_experts_per_tok", default=2),
        ffn=given["ffn"],
    )
    return {**given, "family": "mixtral", "experts": experts}


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    if fields.config.get("mlp_only_layers") or fields.number("decoder_sparse_step", default=1) != 1:
        fields.problems.append(
            f"{fields.name}: dense blocks among those with experts (mlp_only_layers, ...): measure it"
        )
    given = _llama(fields)
    experts = Experts(
        num=fields.number("num_experts", "num_local_experts", default=128),
        top_k=fields.number("num_experts_per_tok", default=8),
        ffn=fields.number("moe_intermediate_size", default=768),
    )
    return {**given, "family": "qwen3_moe", "has_qk_norm": True, "experts": experts}


def _deepseek(fields: Fields) -> dict[str, Any]:
    query_rank = fields.config.get("q_lora_rank")
    latent = LatentAttention(
        query_rank=0 if query_rank is None else fields.number("q_lora_rank"),
        kv_rank=fields.number("kv_lora_rank", default=512),
        nope_dim=fields.number("qk_nope_head_dim", default=128),
        rope_dim=fields.number("qk_rope_head_dim", default=64),
        value_dim=fields.number("v_head_dim", default=128),
    )
    ffn = fields.number("moe_intermediate_size")
    experts = Experts(
        num=fields.number("n_routed_experts", "num_local_experts"),
        top_k=fields.number("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * fields.number("n_shared_experts", default=0, least=0),
        first_dense=fields.number("first_k_dense_replace", default=0, least=0),
    )
    head_dim = latent.nope_dim + latent.rope_dim
    given = {**_llama(fields), "family": "deepseek", "latent": latent, "experts": experts, "head_dim": head_dim}
    return {**given, "kv_heads": given["heads"]}  # each head has keys and values of its own, made of the shared ones


def _megatron(fields: Fields) -> dict[str, Any]:
    """Not a type of Transformers: Megatron-LM's GPT, for the presets."""
    hidden = fields.number("hidden_size")
    return {
        "family": "megatron",
        "layers": fields.number("num_layers"),
        **_heads(fields, "num_attention_heads", hidden=hidden),
        "ffn": fields.number("ffn_hidden_size", default=4 * hidden),
        "vocab": fields.number("padded_vocab_size"),
        **_learned(fields.number("seq_length")),
        "is_tied": fields.flag("tie_word_embeddings", default=True),
        "hidden_dropout": fields.share("hidden_dropout", default=0.1),
        "embedding_dropout": fields.share("hidden_dropout", default=0.1),
        "attention_dropout": fields.share("attention_dropout", default=0.1),
    }


_READERS: Mapping[str, Callable[[Fields], dict[str, Any]]] = {
    "bert": _bert,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "megatron_gpt": _megatron,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "opt": _opt,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "vit": _vit,
}

MODEL_TYPES = tuple(_READERS)
"""Those with closed forms."""
