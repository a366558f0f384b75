"""Tiny models of `transformers` with random weights, built from a configuration: nothing is downloaded.

    tiny("llama", tie_word_embeddings=True)      # the model; settings are the configuration's own
    tiny("bert", layers=2)

Widths of 20, 24 and 30, a vocabulary of 37: uneven where that is allowed. Nothing drops out. `transformers` is imported
where a model is built: it takes seconds, and collecting tests should not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

__all__ = ["CLASSES", "LENGTH", "SIDE", "SOUND", "VOCABULARY", "tiny"]

VOCABULARY, LENGTH = 37, 16
"""Of text: tokens that there are, and the longest sequence."""
SIDE, CLASSES = 6, 5
"""Of pictures: pixels on a side of the three channels, and kinds of them."""
SOUND = (8, 20)
"""Of speech: channels and frames, the only number of frames that Whisper takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Names of the two classes, and the configuration; `depths` are the settings that say how many layers there are."""

    model: str
    config: str
    depths: tuple[str, ...] = ("num_hidden_layers",)
    settings: Mapping[str, Any] = field(default_factory=dict)


# Four query heads share two keys and values.
_GROUPED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 30,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
}
_ENCODER: dict[str, Any] = {
    "hidden_size": 20,
    "num_attention_heads": 2,
    "intermediate_size": 30,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_NO_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}

_KINDS: Mapping[str, _Kind] = {
    "llama": _Kind(model="LlamaForCausalLM", config="LlamaConfig", settings=_GROUPED),
    "qwen3": _Kind(model="Qwen3ForCausalLM", config="Qwen3Config", settings=_GROUPED | {"head_dim": 10}),
    "mixtral": _Kind(
        model="MixtralForCausalLM",
        config="MixtralConfig",
        # Four experts, of which each token takes two. Grouped products want rows of multiples of 16 bytes.
        settings=_GROUPED
        | {"hidden_size": 32, "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt2": _Kind(
        model="GPT2LMHeadModel",
        config="GPT2Config",
        depths=("n_layer",),
        settings={
            "vocab_size": VOCABULARY,
            "n_embd": 20,
            "n_head": 2,
            "n_positions": LENGTH,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            **_NO_TOKENS,
        },
    ),
    "bert": _Kind(
        model="BertForMaskedLM",
        config="BertConfig",
        settings=_ENCODER | {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH},
    ),
    "vit": _Kind(
        model="ViTForImageClassification",
        config="ViTConfig",
        settings=_ENCODER | {"image_size": SIDE, "patch_size": 2, "num_channels": 3, "num_labels": CLASSES},
    ),
    "t5": _Kind(
        model="T5ForConditionalGeneration",
        config="T5Config",
        depths=("num_layers",),
        settings={
            "vocab_size": VOCABULARY,
            "d_model": 20,
            "d_kv": 10,
            "d_ff": 30,
            "num_heads": 2,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "whisper": _Kind(
        model="WhisperForConditionalGeneration",
        config="WhisperConfig",
        depths=("encoder_layers", "decoder_layers"),
        settings={
            "vocab_size": VOCABULARY,
            "d_model": 20,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 30,
            "decoder_ffn_dim": 30,
            "num_mel_bins": SOUND[0],
            "max_source_positions": SOUND[1] // 2,
            "max_target_positions": LENGTH,
            "dropout": 0.0,
            "decoder_start_token_id": 0,
            **_NO_TOKENS,
        },
    ),
}


def tiny(name: str, *, layers: int = 4, **settings: Any) -> nn.Module:
    """A model; of an encoder and a decoder, `layers` is the number in each."""
    import transformers

    kind = _KINDS[name]
    config = getattr(transformers, kind.config)(**{**kind.settings, **dict.fromkeys(kind.depths, layers), **settings})
    model: nn.Module = getattr(transformers, kind.model)(config)
    return model
