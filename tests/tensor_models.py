"""Tiny models that tensor parallelism cuts, each with its plan, its batches and its loss.

    gpt         written by hand, q, k and v in one weight: needs a plan; its loss is taken outside, on flat logits
    encoder ... stacks of torch.nn, both `batch_first`, with masks; bare attention with weights asked for
    llama ...   models of `transformers`, built from a configuration with random weights

The vocabulary (67), the sequence (8 tokens) and four heads: uneven where that is allowed, even where it must be.
Every model and batch is a function of its name and its seed alone. A batch is the batch of the whole world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.tensor_gpt import (
    GPT,
    GPT_PLAN,
    GROUPED_PLAN,
    HEADS,
    LENGTH,
    LORA_PLAN,
    SAMPLES,
    VOCABULARY,
    WIDTH,
    Batch,
    logits_loss,
    tokens,
)

__all__ = ["MODELS", "TensorModel", "build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorModel:
    """A model with its data. `loss(model, batch)` is a mean over the samples, or (sum, count)."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Batch], Any]
    plan: Mapping[str, Any] | None = None
    dtype: torch.dtype = torch.float32
    """In which it is compared: float64 shows errors of formulas; transformers computes its norms in float32."""


def build(name: str, *, dtype: torch.dtype | None = None, seed: int = 5) -> nn.Module:
    """The model with its initial weights, in training mode; the caller's random state is not touched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name].build().to(dtype or MODELS[name].dtype).train()


def _gpt(plan: Mapping[str, Any] = GPT_PLAN, **options: Any) -> TensorModel:
    return TensorModel(build=lambda: GPT(**options), batch=tokens, loss=logits_loss, plan=plan, dtype=torch.float64)


# ---- torch.nn ------------------------------------------------------------------------------------------------------


class TorchStack(nn.Module):
    """A module of torch.nn between an embedding and an output layer; the sequence may come first."""

    def __init__(self, kind: str, *, batch_first: bool, norm_first: bool = False) -> None:
        super().__init__()
        self.kind, self.batch_first = kind, batch_first
        options: dict[str, Any] = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": batch_first}
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        if kind == "encoder":
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, norm_first=norm_first, **options)
            self.body: nn.Module = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        elif kind == "decoder":
            self.body = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, **options), 2)
        elif kind == "transformer":
            self.body = nn.Transformer(WIDTH, HEADS, 2, 2, norm_first=norm_first, **options)
        else:
            self.body = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, other: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """Logits of (samples, sequence); `padding` marks what attention may not look at in `ids`."""
        x, memory = self.embedding(ids), self.embedding(other)
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        unseen = torch.zeros_like(padding, dtype=x.dtype).masked_fill(padding, float("-inf"))
        if not self.batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        if self.kind == "encoder":
            y = self.body(x, mask=causal, src_key_padding_mask=unseen)
        elif self.kind == "decoder":
            y = self.body(x, memory, tgt_mask=causal, memory_key_padding_mask=unseen)
        elif self.kind == "transformer":
            y = self.body(x, memory, src_key_padding_mask=unseen, tgt_mask=causal)
        else:
            average = self.kind == "average weights"
            y, weights = self.body(
                x,
                memory,
                memory,
                attn_mask=causal,
                need_weights=self.kind != "no weights",
                average_attn_weights=average,
            )
            if weights is not None:  # their gradient counts as well
                weights = weights.flatten(1, -2).pow(2).sum((1, 2)) if weights.dim() > 3 else weights.pow(2).sum((1, 2))
                y = y + weights.view(-1, 1, 1) if self.batch_first else y + weights.view(1, -1, 1)
        return self.output(y if self.batch_first else y.transpose(0, 1))


def two_sequences(step: int) -> Batch:
    generator = torch.Generator().manual_seed(200 + step)
    ids = torch.randint(0, VOCABULARY, (2, SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (SAMPLES, 1), generator=generator)
    return {
        "ids": ids[0],
        "other": ids[1],
        "padding": torch.arange(LENGTH) >= lengths,
        "labels": torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator),
    }


def stack_loss(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(batch["ids"], batch["other"], batch["padding"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _torch(kind: str, **options: Any) -> TensorModel:
    return TensorModel(
        build=lambda: TorchStack(kind, **options), batch=two_sequences, loss=stack_loss, dtype=torch.float64
    )


# ---- transformers --------------------------------------------------------------------------------------------------
# Imported on the ranks only. Decoders have no cache of keys and values: it is for generation.

_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}
_BERT = {name: _LLAMA[name] for name in _LLAMA if name not in {"num_key_value_heads", "use_cache"}} | {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": HEADS,
    "n_positions": LENGTH,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 6,  # the heads together are wider than the model
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": HEADS,
    "dropout_rate": 0.0,
    "use_cache": False,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_VIT = {name: value for name, value in _BERT.items() if name not in {"vocab_size", "max_position_embeddings"}} | {
    "image_size": 6,
    "patch_size": 2,
    "num_channels": 3,
    "num_labels": 5,
}


def _pretrained(
    model_class: str, config_class: str, options: Mapping[str, Any], **more: Any
) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, config_class)(**{**options, **more})
        return getattr(transformers, model_class)(config)

    return make


class LowRank(nn.Module):
    """What libraries for fine-tuning put in the place of a linear layer: itself, frozen, and a thin product beside."""

    def __init__(self, base_layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low: torch.Tensor = self.lora_A["default"](self.lora_dropout["default"](x))
        # A factor that is not one, and not so large that norms of later steps hang on the rounding of the first.
        out: torch.Tensor = self.base_layer(x) + 0.5 * self.lora_B["default"](low)
        return out


def _with_side_paths(make: Callable[[], nn.Module], *names: str) -> Callable[[], nn.Module]:
    """The model frozen, but for side paths of these layers."""

    def make_both() -> nn.Module:
        model = make().requires_grad_(False)
        for fqn, module in list(model.named_modules()):
            parent, _, name = fqn.rpartition(".")
            if name in names and isinstance(module, nn.Linear):
                setattr(model.get_submodule(parent), name, LowRank(module, rank=3))
        return model

    return make_both


def masked_tokens(step: int) -> Batch:
    """Sequences of unequal length, some of whose tokens count in the loss: how many differs from rank to rank."""
    generator = torch.Generator().manual_seed(300 + step)
    ids = torch.randint(2, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    real = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (SAMPLES, 1), generator=generator)
    counted = real & (torch.rand(ids.shape, generator=generator) < 0.8)
    return {
        "input_ids": ids.masked_fill(~real, 0),
        "attention_mask": real.long(),
        "labels": ids.masked_fill(~counted, -100),
    }


def images(step: int) -> Batch:
    generator = torch.Generator().manual_seed(400 + step)
    return {
        "pixel_values": torch.randn(SAMPLES, 3, 6, 6, generator=generator),
        "labels": torch.randint(5, (SAMPLES,), generator=generator),
    }


def _token_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def masked_loss(model: Any, batch: Batch) -> Any:
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return _token_loss(output.logits, batch["labels"])


def causal_loss(model: Any, batch: Batch) -> Any:
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return _token_loss(output.logits[:, :-1], batch["labels"][:, 1:])


def translation_loss(model: Any, batch: Batch) -> Any:
    return _token_loss(model(**batch).logits, batch["labels"])


def own_loss(model: Any, batch: Batch) -> Any:
    return model(**batch).loss


def plain_tokens(step: int) -> Batch:
    """Without padding, so that the mean that the model itself takes is the same on all ranks."""
    ids = torch.randint(2, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(500 + step))
    return {"input_ids": ids, "labels": ids}


def _decoder(model_class: str, config_class: str, **more: Any) -> TensorModel:
    return TensorModel(
        build=_pretrained(model_class, config_class, _LLAMA, **more), batch=masked_tokens, loss=causal_loss
    )


MODELS = {
    "gpt": _gpt(),
    "gpt-tied": _gpt(tied=True),
    "gpt-unused": _gpt(unused=True),
    "gpt-lora": _gpt(LORA_PLAN, rank=3),
    "gpt-frozen": _gpt(frozen=True),
    "gpt-grouped": _gpt(GROUPED_PLAN, grouped=True),
    "encoder": _torch("encoder", batch_first=True),
    "encoder-sequence-first": _torch("encoder", batch_first=False, norm_first=True),
    "decoder": _torch("decoder", batch_first=True),
    "decoder-sequence-first": _torch("decoder", batch_first=False),
    "transformer": _torch("transformer", batch_first=True, norm_first=True),
    "transformer-sequence-first": _torch("transformer", batch_first=False),
    "attention": _torch("no weights", batch_first=True),
    "attention-sequence-first": _torch("no weights", batch_first=False),
    "attention-average-weights": _torch("average weights", batch_first=False),
    "attention-weights": _torch("weights", batch_first=True),
    "llama": _decoder("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=False),
    "llama-tied": _decoder("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True),
    "llama-one-kv-head": _decoder("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=1, attention_bias=True),
    "llama-lora": TensorModel(
        build=_with_side_paths(
            _pretrained("LlamaForCausalLM", "LlamaConfig", _LLAMA), "q_proj", "v_proj", "o_proj", "up_proj", "down_proj"
        ),
        batch=masked_tokens,
        loss=causal_loss,
    ),
    "qwen3": _decoder("Qwen3ForCausalLM", "Qwen3Config", head_dim=6),
    "gpt2": TensorModel(build=_pretrained("GPT2LMHeadModel", "GPT2Config", _GPT2), batch=plain_tokens, loss=own_loss),
    "bert": TensorModel(
        build=_pretrained("BertForMaskedLM", "BertConfig", _BERT), batch=masked_tokens, loss=masked_loss
    ),
    "vit": TensorModel(build=_pretrained("ViTForImageClassification", "ViTConfig", _VIT), batch=images, loss=own_loss),
    "t5": TensorModel(
        build=_pretrained("T5ForConditionalGeneration", "T5Config", _T5), batch=masked_tokens, loss=translation_loss
    ),
    "t5-gated": TensorModel(
        build=_pretrained(
            "T5ForConditionalGeneration", "T5Config", _T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False
        ),
        batch=masked_tokens,
        loss=translation_loss,
    ),
}
