"""Real models of `transformers`, as their users train them: what one process gives, at stages 0 to 3.

They are those of tiny_transformers.py, on ranks with other numbers of samples and of tokens that count.
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
from tests.tiny_transformers import CLASSES, SIDE, SOUND, VOCABULARY, tiny

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")

STEPS, SAMPLES, LENGTH = 2, 5, 7  # 2 and 3 samples on two ranks
CLIP = 0.5
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A model, its batch for a step, and the loss of a part of a batch: a mean over samples, or (sum, count)."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Batch], Any]


# ---- models ------------------------------------------------------------------------------------------------------


def two_layers(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return functools.partial(tiny, name, layers=2, **settings)


def decoder(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """Without a cache of keys and values: it is for generation."""
    return two_layers(name, use_cache=False, **settings)


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
        "pixel_values": torch.randn(SAMPLES, 3, SIDE, SIDE, generator=generator),
        "labels": torch.randint(CLASSES, (SAMPLES,), generator=generator),
    }


def sounds(step: int) -> Batch:
    labels = tokens(step)["labels"]
    return {"input_features": torch.randn(SAMPLES, *SOUND, generator=seeded(90 + step)), "labels": labels}


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
    "bert-tied": Kind(build=two_layers("bert"), batch=tokens, loss=masked_loss),
    "gpt2-tied": Kind(build=decoder("gpt2"), batch=tokens, loss=causal_loss),
    "llama": Kind(build=decoder("llama"), batch=tokens, loss=causal_loss),
    "llama-tied": Kind(build=decoder("llama", tie_word_embeddings=True), batch=tokens, loss=causal_loss),
    "qwen3": Kind(build=decoder("qwen3"), batch=tokens, loss=causal_loss),
    "mixtral": Kind(build=decoder("mixtral"), batch=tokens, loss=causal_loss),
    "vit": Kind(build=two_layers("vit"), batch=images, loss=image_loss),
    "t5-tied": Kind(build=decoder("t5"), batch=tokens, loss=translation_loss),
    "whisper-tied": Kind(build=decoder("whisper"), batch=sounds, loss=translation_loss),
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
