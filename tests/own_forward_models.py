"""Unmodified models that a pipeline cuts by their own forward, with their batches.

    demo ... unet    written by hand or of torch.nn: (inputs, labels) and a loss function
    llama ...        of `transformers` (tiny_transformers.py): a dict with labels, the model computes its loss

Models and batches are functions of their names and seeds alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hybrid.demo.gpt import GPT
from tests.tiny_transformers import CLASSES, SIDE, SOUND, VOCABULARY, tiny

__all__ = ["MODELS", "VOCABULARY", "OwnModel", "build"]

# A later step is longer, shorter, and has fewer samples: nothing of a stage may count on sizes.
LENGTHS, SIZES = (8, 8, 10, 4), (8, 8, 4, 8)
STEPS = len(LENGTHS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel:
    """A model with its batches; `loss_fn` None: the model finds its loss itself."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    steps: int = STEPS


def build(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return MODELS[name].make().train()


# ---- batches ---------------------------------------------------------------------------------------------------------


def _seeded(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(70 + step)


def _ids(step: int, *, length: int | None = None) -> torch.Tensor:
    size = (SIZES[step], length or LENGTHS[step])
    return torch.randint(2, VOCABULARY, size, generator=_seeded(step))


def _pairs(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = _ids(step)
    return ids, ids.roll(1, 1)


def _vectors(step: int) -> tuple[Any, torch.Tensor]:
    generator = _seeded(step)
    source = torch.randn(SIZES[step], LENGTHS[step], 16, generator=generator)
    return source, torch.randn(source.shape, generator=generator)


def _two_vectors(step: int) -> tuple[Any, torch.Tensor]:
    (source, labels), target = _vectors(step), torch.randn(SIZES[step], 5, 16, generator=_seeded(step + 50))
    return (source, target), labels[:, :5].contiguous() if labels.shape[1] >= 5 else target.flip(0)


def _pictures(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = _seeded(step)
    side = (8, 8, 12, 8)[step]
    return torch.randn(SIZES[step], 3, side, side, generator=generator), torch.randn(
        SIZES[step], 3, side, side, generator=generator
    )


def _classes(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _pictures(step)[0], torch.randint(5, (SIZES[step],), generator=_seeded(step))


def _text(step: int) -> dict[str, torch.Tensor]:
    """Sequences of unequal length; every sample has as many labels, so that a mean of means is the mean."""
    ids = _ids(step)
    mask = torch.ones_like(ids)
    mask[0, -1] = 0  # padding
    labels = ids.clone()
    labels[:, 1] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _no_mask(step: int) -> dict[str, torch.Tensor]:
    ids = _ids(step)
    return {"input_ids": ids, "labels": ids}


def _images(step: int) -> dict[str, torch.Tensor]:
    generator = _seeded(step)
    return {
        "pixel_values": torch.randn(SIZES[step], 3, SIDE, SIDE, generator=generator),
        "labels": torch.randint(CLASSES, (SIZES[step],), generator=generator),
    }


def _speech(step: int) -> dict[str, torch.Tensor]:
    return {
        "input_features": torch.randn(SIZES[step], *SOUND, generator=_seeded(step)),
        "labels": _ids(step, length=5),
    }


# ---- losses ----------------------------------------------------------------------------------------------------------


def token_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


# ---- models of torch -------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Skips over the middle; `mix` is called twice; activations in place; a scale of its own, read between units."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 6, 3, padding=1)
        self.downs = nn.ModuleList([_Conv(6, 10), _Conv(10, 12)])
        self.middle = _Conv(12, 12)
        self.mix = nn.Conv2d(12, 12, 1)
        self.ups = nn.ModuleList([_Conv(24, 10), _Conv(20, 6)])
        self.leave = nn.Conv2d(6, 3, 1)
        self.scale = nn.Parameter(torch.tensor([0.8]))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        x = self.act(self.enter(x))
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.mix(self.middle(x))
        x += self.mix(x.clone())
        for up in self.ups:
            x = functional.interpolate(x, scale_factor=2.0)
            x = up(torch.cat([x, skips.pop() * self.scale], 1))
        return self.leave(x)


class _Conv(nn.Sequential):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__(nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(2, out), nn.ReLU(inplace=True))


class ResNet(nn.Module):
    """BatchNorm everywhere, a stem with an activation in place, a shortcut that is a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(_Residual(6, 6), _Residual(6, 6))
        self.layer2 = nn.Sequential(_Residual(6, 10), _Residual(10, 10))
        self.fc = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(x.mean((2, 3)))


class _Residual(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(channels, out, 1) if channels != out else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.down is None else self.down(x)))


class NanoGPT(nn.Module):
    """Parameters used outside any module: positions, and the embedding as head by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.positions = nn.Parameter(torch.randn(16, 16) * 0.1)
        layer = functools.partial(nn.TransformerEncoderLayer, 16, 2, 24, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList(layer() for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(x, self.words.weight)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 5, nn.LayerNorm(16))


def _transformer() -> nn.Module:
    return nn.Transformer(16, 2, 3, 3, 24, dropout=0.0, batch_first=True)


def _square(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, labels)


MODELS: dict[str, OwnModel] = {
    "demo": OwnModel(make=lambda: GPT(width=20, num_layers=4, num_heads=2), batch=_pairs, loss_fn=token_loss),
    "nano": OwnModel(make=NanoGPT, batch=_pairs, loss_fn=token_loss),
    "encoder": OwnModel(make=_encoder, batch=_vectors, loss_fn=_square),
    "transformer": OwnModel(make=_transformer, batch=_two_vectors, loss_fn=_square),
    "unet": OwnModel(make=UNet, batch=_pictures, loss_fn=_square),
    "resnet": OwnModel(make=ResNet, batch=_classes, loss_fn=functional.cross_entropy),
    "llama": OwnModel(make=functools.partial(tiny, "llama"), batch=_text),
    "llama-tied": OwnModel(make=functools.partial(tiny, "llama", tie_word_embeddings=True), batch=_no_mask),
    "qwen3": OwnModel(make=functools.partial(tiny, "qwen3"), batch=_text),
    "gpt2": OwnModel(make=functools.partial(tiny, "gpt2"), batch=_text),
    "bert": OwnModel(make=functools.partial(tiny, "bert"), batch=_text),
    "vit": OwnModel(make=functools.partial(tiny, "vit"), batch=_images),
    "t5": OwnModel(make=functools.partial(tiny, "t5", layers=3), batch=_text),
    "mixtral": OwnModel(make=functools.partial(tiny, "mixtral"), batch=_no_mask),
    "whisper": OwnModel(make=functools.partial(tiny, "whisper", layers=3), batch=_speech),
}
