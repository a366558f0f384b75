"""Models for the tests of the meta device, one for each way to initialise, and what these tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hybrid
from tests.multi_rank.case_runs import strategy_of

__all__ = ["MODELS", "SEED", "STAGES", "State", "Tied", "everything", "on_meta", "strategy"]

SEED = 11
STAGES = (0, 1, 2, 3)
State = dict[str, torch.Tensor]

# ---- models ------------------------------------------------------------------------------------------------------


class Zoo(nn.Module):
    """torch's own layers, with buffers, padding, frozen parts, and parameters that start as constants."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=2)
        self.bag = nn.EmbeddingBag(5, 3, padding_idx=1)
        self.conv, self.norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)
        self.up = nn.ConvTranspose1d(2, 3, 2)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.cross = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, bias=False)
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(3, affine=True)])
        self.prelu, self.bilinear = nn.PReLU(2), nn.Bilinear(2, 3, 4)
        self.recurrent, self.cell = nn.LSTM(3, 4, 2, bidirectional=True), nn.GRUCell(2, 3)
        self.frozen = nn.Linear(3, 5).requires_grad_(False)
        self.no_statistics = nn.BatchNorm1d(3, track_running_stats=False)
        self.empty = nn.Linear(0, 3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False))
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.last = nn.Linear(2, 2)  # draws after the head, whose own weight was thrown away

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(tokens)))


class Initials(nn.Module):
    """Everything from nn.init, and the ways to write a parameter."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("trunc", "orthogonal", "xavier_u", "xavier_n", "kaiming_n", "sparse", "eye", "data", "copied"):
            self.register_parameter(name, nn.Parameter(torch.empty(6, 5)))
        self.dirac = nn.Parameter(torch.empty(3, 2, 3))
        self.pieces, self.scalar = nn.Parameter(torch.empty(4, 3)), nn.Parameter(torch.empty(()))
        self.replaced = nn.Parameter(torch.empty(2, 3))
        self.moments = nn.Parameter(torch.empty(5))
        self.permuted = nn.Parameter(torch.empty(3, 4).t())
        self.register_buffer("positions", torch.empty(4, dtype=torch.int64))
        self.register_buffer("mask", torch.empty(3, 3, dtype=torch.bool), persistent=False)
        self.register_buffer("assigned", torch.empty(3), persistent=False)
        self.register_buffer("noise", torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.trunc, std=0.5, a=-0.5, b=0.5)
        nn.init.orthogonal_(self.orthogonal)
        nn.init.xavier_uniform_(self.xavier_u, gain=nn.init.calculate_gain("relu"))
        nn.init.xavier_normal_(self.xavier_n)
        nn.init.kaiming_normal_(self.kaiming_n, mode="fan_out")
        nn.init.sparse_(self.sparse, 0.4)
        nn.init.eye_(self.eye)
        nn.init.dirac_(self.dirac)
        self.data.data.normal_(0, 0.02)
        self.data.data[1].zero_()
        self.moments.data = torch.rand(5)
        with torch.no_grad():
            self.copied.copy_(torch.randn(6, 5))
            self.copied[0] = torch.randn(5)
            for row in self.pieces:
                row.uniform_()
            self.scalar.fill_(3.0).mul_(0.5)
            self.permuted.uniform_(-1, 1)
            self.permuted += 1
        self.replaced = nn.Parameter(torch.randn(2, 3))
        self.positions.copy_(torch.arange(4))
        self.mask.fill_(False)
        self.mask[0] = True
        self.assigned = torch.linspace(0, 1, 3)
        nn.init.normal_(self.noise)


class ByApply(nn.Module):
    """`_init_weights(module)` over all modules, as nanoGPT does; one module at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.again = self.first
        self.inner = Inner()
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=1.0, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)


class Inner(nn.Module):
    """Has an `_init_weights` of its own, without argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 2), nn.Parameter(torch.empty(3))
        self._init_weights()

    def _init_weights(self) -> None:
        nn.init.uniform_(self.scale, 2, 3)
        nn.init.constant_(self.linear.bias, 0.25)


class ByInitWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.init_weights()

    def init_weights(self, std: float = 0.5) -> None:
        nn.init.normal_(self.linear.weight, std=std)
        nn.init.ones_(self.gain)
        self.table = torch.arange(4.0)
        nn.init.normal_(self.out.weight, std=std)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(4, 4))


def transformer() -> nn.Module:
    return nn.Sequential(nn.Transformer(4, 2, 2, 2, 6, batch_first=True), nn.Linear(4, 4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "zoo": Zoo,
    "tied": Tied,
    "initials": Initials,
    "by apply": ByApply,
    "by init_weights": ByInitWeights,
    "encoder": encoder,
    "transformer": transformer,
}


def strategy(stage: int, *, o2: bool = False, **settings: Any) -> hybrid.DistributedStrategy:
    made = strategy_of(stage=stage, bucket_bytes=200, **settings)
    if o2:
        made.amp = True
        made.amp_configs = {"dtype": "bfloat16", "level": "O2"}
    return made


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def everything(model: Any) -> State:
    """The state, and buffers that are not in it."""
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else dict(model.state_dict())
    return state | {name: buffer for name, buffer in model.named_buffers() if name not in state}
