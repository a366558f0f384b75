"""Real models of `transformers`, as their users train them: what one process gives, at stages 0 to 3.

Tiny and with random weights, built from a configuration: nothing is downloaded.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import own_part, seeded, strategy_of, weights_of
from tests.parity import TOLERANCES, compare_tensors
from tests.ranks import run_ranks

# `transformers` is imported on the ranks only: it takes a second, and collecting tests should not.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")

STEPS, SAMPLES, LENGTH, VOCABULARY = 2, 5, 7, 37  # 2 and 3 samples on two ranks
CLIP = 0.5
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A model, its batch for a step, and the loss of a part of a batch: a mean over samples, or (sum, count)."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Batch], Any]


# ---- models ------------------------------------------------------------------------------------------------------


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=30,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=20,
            n_layer=2,
            n_head=2,
            n_positions=LENGTH,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )


# Four query heads share two keys and values. No decoder here has a cache of keys and values: it is for generation, and
# recompute would run the layer that appends to it twice.
GROUPED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}


def llama(tie_word_embeddings: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=tie_word_embeddings))


def tied_llama() -> nn.Module:
    return llama(tie_word_embeddings=True)


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=10))


def mixtral() -> nn.Module:
    """Four experts, of which each token takes two; idle ones differ from rank to rank."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = GROUPED | {"intermediate_size": 32}  # rows of 16 bytes, for the grouped matrix product
    return MixtralForCausalLM(MixtralConfig(**sizes, head_dim=6, num_local_experts=4, num_experts_per_tok=2))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=6,
            patch_size=2,
            num_channels=3,
            hidden_size=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=30,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=5,
        )
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=20,
            d_kv=10,
            d_ff=30,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=4,
            d_model=20,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=30,
            decoder_ffn_dim=30,
            max_source_positions=6,
            max_target_positions=LENGTH,
            dropout=0.0,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        )
    )


# ---- batches and losses --------------------------------------------------------------------------------------------


def tokens(step: int) -> Batch:
    """Sequences of unequal length, some of whose tokens count in the loss: how many differs from rank to rank."""
    generator = seeded(30 + step)
    ids = torch.randint(2, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    real = torch.arange(LENGTH) < torch.tensor([7, 3, 5, 7, 2])[:, None]
    counted = real & (torch.rand(ids.shape, generator=generator) < 0.8)
    return {
        "input_ids": ids.masked_fill(~real, 0),
        "attention_mask": real.long(),
        "labels": ids.masked_fill(~counted, -100),
    }


def images(step: int) -> Batch:
    generator = seeded(60 + step)
    return {
        "pixel_values": torch.randn(SAMPLES, 3, 6, 6, generator=generator),
        "labels": torch.randint(5, (SAMPLES,), generator=generator),
    }


def sounds(step: int) -> Batch:
    labels = tokens(step)["labels"]
    return {"input_features": torch.randn(SAMPLES, 4, 12, generator=seeded(90 + step)), "labels": labels}


def token_loss(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def masked_loss(model: Any, batch: Batch) -> Any:
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return token_loss(output.logits, batch["labels"])


def causal_loss(model: Any, batch: Batch) -> Any:
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return token_loss(output.logits[:, :-1], batch["labels"][:, 1:])


def translation_loss(model: Any, batch: Batch) -> Any:
    return token_loss(model(**batch).logits, batch["labels"])


def image_loss(model: Any, batch: Batch) -> Any:
    return model(**batch).loss


KINDS = {
    "bert-tied": Kind(build=bert, batch=tokens, loss=masked_loss),
    "gpt2-tied": Kind(build=gpt2, batch=tokens, loss=causal_loss),
    "llama": Kind(build=llama, batch=tokens, loss=causal_loss),
    "llama-tied": Kind(build=tied_llama, batch=tokens, loss=causal_loss),
    "qwen3": Kind(build=qwen3, batch=tokens, loss=causal_loss),
    "mixtral": Kind(build=mixtral, batch=tokens, loss=causal_loss),
    "vit": Kind(build=vit, batch=images, loss=image_loss),
    "t5-tied": Kind(build=t5, batch=tokens, loss=translation_loss),
    "whisper-tied": Kind(build=whisper, batch=sounds, loss=translation_loss),
}


# ---- parity --------------------------------------------------------------------------------------------------------


def built(kind: Kind) -> nn.Module:
    torch.manual_seed(11)
    return kind.build().train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With a large eps: the key biases of BERT have gradient 0, of which rounding makes 1e-10 of either sign."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


def plain_run(kind: Kind) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """(loss, norm) of each step, and the weights, of plain torch on the whole batch."""
    model = built(kind)
    optimizer, history = adamw(model), []
    for step in range(STEPS):
        loss = kind.loss(model, kind.batch(step))
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        loss.backward()
        history.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()))
        optimizer.step()
        optimizer.zero_grad()
    return history, weights_of(model)


def check(name: str) -> None:
    kind = KINDS[name]
    wanted, wanted_weights = plain_run(kind)
    problems: list[str] = []
    for stage in (0, 1, 2, 3):
        strategy = strategy_of(
            stage=stage, bucket_bytes=3000, gradient_clipping=CLIP, accumulate_steps=2 if stage == 3 else 1
        )
        strategy.recompute = stage == 3
        model = hybrid.distributed_model(built(kind), strategy=strategy)
        optimizer: Any = hybrid.distributed_optimizer(adamw(model))
        found: list[str] = []
        compare = functools.partial(compare_tensors, found, TOLERANCES[torch.float32])
        for step, (loss, norm) in enumerate(wanted):
            batch = {key: own_part(value) for key, value in kind.batch(step).items()}
            result = model.train_batch(batch, optimizer, forward_step=kind.loss)
            compare("loss", f"loss at step {step}", result.loss, loss)
            compare("norm", f"norm at step {step}", result.grad_norm, norm)
        weights = model.full_state_dict()
        assert list(weights) == list(wanted_weights)
        for fqn, value in wanted_weights.items():
            compare("weight", f"weight {fqn}", weights[fqn], value)
        problems += [f"stage {stage}: {problem}" for problem in found]
        hybrid.shutdown()
    assert not problems, "\n".join(problems)


def check_all(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            check(name)
        except BaseException as error:
            error.add_note(name)
            raise


# Together in a world, as each imports `transformers`.
GROUPS = {
    "decoders": ("gpt2-tied", "llama", "llama-tied", "qwen3", "mixtral"),
    "encoders": ("bert-tied", "vit"),
    "with both": ("t5-tied", "whisper-tied"),
}


@pytest.mark.parametrize("group", GROUPS)
def test_models(group: str) -> None:
    """Losses, gradient norm and every weight, on ranks with unequal samples and tokens; recompute at stage 3."""
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(KINDS)
    run_ranks(check_all, 2, GROUPS[group], timeout_seconds=120)
