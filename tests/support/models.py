"""Models of every kind that the checks tell apart, named as the page names them; each with a sample where one helps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hybrid

__all__ = ["BLOCK", "MODELS", "made"]

BLOCK = "TransformerEncoderLayer"
WIDTH = 16
Made = tuple[nn.Module, Any]


def _block(heads: int = 2) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, heads, 24, dropout=0.0, batch_first=True)


def _chain(*more: nn.Module, layers: int = 8, heads: int = 2) -> nn.Sequential:
    return nn.Sequential(*more, *(_block(heads) for _ in range(layers)))


def _vectors() -> torch.Tensor:
    return torch.zeros(2, 4, WIDTH)


def _stack() -> nn.Module:
    return nn.TransformerEncoder(_block(), 8, enable_nested_tensor=False)


class Deciding(nn.Module):
    """Its forward goes on by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _chain()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = block(value)
            if value.sum() > 0:
                value = value + 1
        return value


class Different(nn.Module):
    """No two modules alike."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.filters = nn.Conv1d(WIDTH, WIDTH, 1)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.filters(self.norm(value).transpose(1, 2)).transpose(1, 2)
        return self.leave(self.attention(value, value, value)[0])


class Gate(nn.Module):
    """Linear layers under names that no family has."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.left(value) * self.right(value)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = _block()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.block(self.cell(value)[0])


class Scale(nn.Parameter):
    """A class of its own."""


def _subclass() -> Made:
    model = _chain()
    model[1].norm1.weight = Scale(torch.ones(WIDTH))
    return model, None


def _on_meta() -> Made:
    with torch.device("meta"):
        return _stack(), _vectors()


def _hooked() -> Made:
    model = _chain()
    model.register_full_backward_hook(lambda *_: None)
    return model, None


def _with_own_parameter() -> Made:
    model = _chain()
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return model, None


def _shared_statistics() -> Made:
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(norm, *(_block() for _ in range(6)), norm), None


def _tied() -> Made:
    model = _chain(nn.LayerNorm(WIDTH), layers=7)
    model[-1].linear2.weight, model[-1].linear1.weight = model[1].linear2.weight, model[1].linear1.weight
    model[-1].norm2.weight = model[0].weight
    return model, None


MODELS: dict[str, Callable[[], Made]] = {
    "layers in an nn.Sequential": lambda: (_chain(), None),
    "a PipelineLayer": lambda: (
        hybrid.PipelineLayer([hybrid.LayerDesc(_block) for _ in range(8)], seg_method="auto", seed=1),
        None,
    ),
    "any other model, with a sample": lambda: (_stack(), _vectors()),
    "any other model, without a sample": lambda: (_stack(), None),
    "a model on the meta device": _on_meta,
    "layers tied to layers of other stages": _tied,
    "parameters in bfloat16": lambda: (_chain().to(torch.bfloat16), None),
    "no two modules alike": lambda: (Different(), _vectors()),
    "linear layers that no rule for tensor parallel knows": lambda: (nn.Sequential(*(Gate() for _ in range(8))), None),
    "3 attention heads": lambda: (
        nn.Sequential(*(nn.TransformerEncoderLayer(18, 3, 24, batch_first=True) for _ in range(8))),
        None,
    ),
    "3 layers": lambda: (_chain(layers=3), None),
    "a forward that goes on by values": lambda: (Deciding(), _vectors()),
    "a hook on the backward of the whole model": _hooked,
    "a parameter of the nn.Sequential itself": _with_own_parameter,
    "one BatchNorm in two layers": _shared_statistics,
    "an nn.Embedding with max_norm": lambda: (_chain(nn.Embedding(9, WIDTH, max_norm=1.0), layers=7), None),
    "a recurrent layer": lambda: (nn.Sequential(*(Recurrent() for _ in range(8))), None),
    "a TorchScript part": lambda: (_chain(torch.jit.script(nn.Linear(WIDTH, WIDTH)), layers=7), None),
    "a parameter of a class of its own": _subclass,
}


def made(name: str) -> Made:
    """The model; the same one again, but for a PipelineLayer, which is built when it is looked at."""
    return MODELS[name]() if name == "a PipelineLayer" else _kept(name)


@functools.cache
def _kept(name: str) -> Made:
    return MODELS[name]()
