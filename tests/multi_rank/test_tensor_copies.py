"""Whole parameters that act on what only one tp rank has, and blocks called out of order: caught, never trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from hybrid.errors import ModelError
from tests.ranks import run_ranks
from tests.tensor_case import tensor_variant

WIDTH, HEADS, LENGTH = 16, 4, 8
PLAN: dict[str, Any] = {
    "blocks.*.qkv": {"style": "colwise", "fused": 3, "heads": HEADS, "divide": ["heads"]},
    "blocks.*.out": "rowwise",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm(x))
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in qkv.chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q * scale, k, v)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Its blocks in this order; the scale of the queries belongs to the model, which no rule of a block can see."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2), *, scaled: bool = False) -> None:
        super().__init__()
        self.order = order
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=scaled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x, self.scale)
        return x


def check_scale() -> None:
    for stage in (0, 2, 3):
        for sequence_parallel in (False, True):
            torch.manual_seed(0)
            with tensor_variant(2, plan=PLAN, stage=stage, sequence_parallel=sequence_parallel) as strategy:
                model: Any = hybrid.distributed_model(Model(scaled=True), strategy)
                optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
                before = {name: value.clone() for name, value in model.full_state_dict().items()}
                model(torch.randn(2, LENGTH, WIDTH)).pow(2).mean().backward()
                with pytest.raises(ModelError, match=r"every tensor-parallel rank holds scale whole, .* differ"):
                    optimizer.step()
                assert all(torch.equal(value, before[name]) for name, value in model.full_state_dict().items())


def check_order(order: tuple[int, ...], words: str) -> None:
    with tensor_variant(2, plan=PLAN, sequence_parallel=True) as strategy:
        model: Any = hybrid.distributed_model(Model(order), strategy)
        x = torch.randn(2, LENGTH, WIDTH)
        with pytest.raises(ModelError, match=words):
            model(x)
        model.order = (0, 1, 2)
        assert model(x).shape == x.shape  # and it can go on
        model.order = (0, 2)  # a block in the middle may be left out
        assert model(x).shape == x.shape


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_gradient_that_is_a_part_of_a_sum_is_noticed(world_size: int) -> None:
    """Protects parameters that the outer model hands to its blocks: no rule sees them, and no shape tells."""
    run_ranks(check_scale, world_size)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((2, 1, 0), "'blocks.2' was called before the first block"),
        ((1, 2), "'blocks.1' was called before the first block"),
        ((0, 1), "the forward ended with its activations cut, after block 'blocks.1'"),
        ((0, 0, 1, 2), "'blocks.0', the first of its list, was called again"),
    ],
)
def test_blocks_out_of_order_are_refused_under_sequence_parallel(order: tuple[int, ...], words: str) -> None:
    """Protects models that drop or reorder layers: the sequence is cut at the first block and whole after the last."""
    run_ranks(check_order, 2, order, words)
