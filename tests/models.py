"""Tiny uneven models with their batches: what parity tests train.

    blocks    widths 15 and 17, five blocks, first and last layer tied, a frozen vector, an unused layer, a 0-d
              parameter, a weight whose memory is transposed
    sizes     parameters of 1, 7, 1000, 3 and 64 elements; a 0-d one
    conv      channels-last convolution, BatchNorm; statistics couple the samples of a micro-batch
    lm        token ids in a dict, embedding tied to the head, the loss inside the model's output
    experts   samples choose their expert: no rank, or only some ranks, use the second one in some steps

Every model and batch is a function of its name and its seed alone. A batch is the batch of the whole world.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["BATCH_SIZE", "MODELS", "LanguageModelOutput", "ModelCase", "build", "cut", "seeded"]

# Divisible by 1, 2, 3 and 4 ranks; a rank of four has three samples, fewer than some ways of accumulation cut.
BATCH_SIZE = 12

Batch = Any
Loss = Callable[[nn.Module, Batch], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """A model with its data. `batch(step)` is the global batch; `loss(model, batch)` a mean over its samples."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Loss
    call: str
    """How `train_batch` gets it: "loss_fn" for (inputs, labels), "dict", or "forward_step"."""
    couples_samples: bool = False
    """The loss of a sample depends on the others of its micro-batch (BatchNorm)."""
    loss_fn: Callable[..., torch.Tensor] = functional.mse_loss

    def keywords(self) -> dict[str, Any]:
        """What `train_batch` and `eval_batch` need besides the batch."""
        if self.call == "loss_fn":
            return {"loss_fn": self.loss_fn}
        return {} if self.call == "dict" else {"forward_step": self.loss}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """The model with its initial weights; the caller's random state is not touched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name].build().to(dtype)


def cut(batch: Batch, start: int, end: int, *, dtype: torch.dtype = torch.float32) -> Batch:
    """Samples `start` to `end`; floating point tensors in `dtype`."""
    if isinstance(batch, dict):
        return {key: cut(value, start, end, dtype=dtype) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(cut(value, start, end, dtype=dtype) for value in batch)
    piece = batch[start:end]
    return piece.to(dtype) if piece.is_floating_point() else piece


def _supervised(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, labels = batch
    return functional.mse_loss(model(inputs), labels)


def _regression(num_inputs: int, num_outputs: int) -> Callable[[int], Batch]:
    def batch(step: int) -> Batch:
        generator = seeded(1000 + step)
        inputs = torch.randn(BATCH_SIZE, num_inputs, generator=generator)
        return inputs, torch.randn(BATCH_SIZE, num_outputs, generator=generator)

    return batch


class Blocks(nn.Module):
    """Residual blocks 15 -> 17 -> 15 between two tied layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(15, 15)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(15, 17), nn.Tanh(), nn.Linear(17, 15)) for _ in range(5))
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.rand(15) + 0.5, requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.mixing = nn.Parameter((torch.randn(17, 15) * 0.2).t())
        self.widening = nn.Linear(15, 17)
        self.last = nn.Linear(15, 15)
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        hidden = hidden + functional.linear(torch.tanh(self.widening(hidden)), self.mixing)
        return self.last(hidden) * self.scale * self.frozen


class Sizes(nn.Module):
    """One parameter per awkward size, none of them in a layer of its own."""

    SIZES = (1, 7, 1000, 3, 64)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(size) for size in self.SIZES)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        pieces = inputs.split(list(self.SIZES), dim=1)
        sums = [torch.tanh(x * part).sum(dim=1) / len(part) ** 0.5 for x, part in zip(pieces, self.parts, strict=True)]
        return torch.stack(sums, dim=1) * self.temperature


class Conv(nn.Module):
    """The convolution has no bias: BatchNorm would make its gradient pure rounding noise, which Adam amplifies."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 5, 3, bias=False).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.head = nn.Linear(5 * 9, 7)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.features(images))).flatten(1))


def _images(step: int) -> Batch:
    generator = seeded(2000 + step)
    return torch.randn(BATCH_SIZE, 3, 5, 5, generator=generator), torch.randn(BATCH_SIZE, 7, generator=generator)


@dataclass(frozen=True)
class LanguageModelOutput:
    loss: torch.Tensor
    logits: torch.Tensor
    cache: None = None


class LanguageModel(nn.Module):
    """Tokens see the mean of what came before them; the head is the embedding."""

    VOCABULARY, WIDTH, LENGTH = 13, 15, 5

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(self.WIDTH)
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, *, tokens: torch.Tensor, labels: torch.Tensor) -> LanguageModelOutput:
        hidden = self.embedding(tokens)
        counts = torch.arange(1, tokens.shape[1] + 1, device=tokens.device).unsqueeze(1)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden.cumsum(dim=1) / counts))
        logits = self.head(self.norm(hidden))
        return LanguageModelOutput(loss=functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


def _token_batch(step: int) -> Batch:
    shape = (BATCH_SIZE, LanguageModel.LENGTH)
    generator = seeded(3000 + step)
    tokens = torch.randint(0, LanguageModel.VOCABULARY, shape, generator=generator)
    return {"tokens": tokens, "labels": torch.randint(0, LanguageModel.VOCABULARY, shape, generator=generator)}


class Experts(nn.Module):
    """Top-1 routing by the sign of the first feature; an expert without samples is not called at all."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, 5) for _ in range(2))
        self.gate = nn.Linear(7, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        chosen = inputs[:, 0] > 0
        outputs = inputs.new_zeros(len(inputs), 5)
        for index, expert in enumerate(self.experts):
            mine = chosen == bool(index)
            if mine.any():
                outputs = outputs.index_put((mine.nonzero()[:, 0],), expert(inputs[mine]))
        return outputs * torch.sigmoid(self.gate(inputs))


def _routed(step: int) -> Batch:
    """Step 0: nobody chooses the second expert. Step 1: only the first samples do. Then: mixed."""
    inputs, labels = _regression(7, 5)(step)
    if step == 0:
        inputs[:, 0] = -inputs[:, 0].abs()
    elif step == 1:
        inputs[:, 0] = torch.where(torch.arange(BATCH_SIZE) < 3, 1.0, -1.0) * inputs[:, 0].abs()
    return inputs, labels


MODELS = {
    "blocks": ModelCase(build=Blocks, batch=_regression(15, 15), loss=_supervised, call="loss_fn"),
    "sizes": ModelCase(build=Sizes, batch=_regression(sum(Sizes.SIZES), 5), loss=_supervised, call="loss_fn"),
    "conv": ModelCase(build=Conv, batch=_images, loss=_supervised, call="forward_step", couples_samples=True),
    "lm": ModelCase(build=LanguageModel, batch=_token_batch, loss=lambda m, b: m(**b).loss, call="dict"),
    "experts": ModelCase(build=Experts, batch=_routed, loss=_supervised, call="loss_fn"),
}
