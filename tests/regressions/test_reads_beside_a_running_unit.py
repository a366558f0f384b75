"""A parent that read a block's weight right after the block had run crashed the process at stage 3.

The block's parameters were ordinary ones as long as its bucket happened to be whole: until the next unit began, while
it was gathered ahead, or because a neighbour shares the bucket. So a read from outside was not noticed, the bucket was
freed, and backward read memory that was not there. Now a parameter is an ordinary one only while its own unit runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import variant
from tests.ranks import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.core(self.norm(x)))

    def steps(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self.norm(x)
        yield self.core(x)


class Reader(nn.Module):
    """Blocks, and a parent that uses their parameters in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 8)
        if way == "tied head":
            self.head.weight = self.blocks[1].core.weight  # type: ignore[union-attr, assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = x.new_zeros(())
        for block in self.blocks:
            assert isinstance(block, Block)
            x = block(x)
            if self.way == "regulariser":
                extra = extra + block.core.weight.pow(2).mean()
            elif self.way == "part of the block":
                x = x + block.core(x)
            elif self.way == "generator":
                x = x + sum(block.steps(x), start=x.new_zeros(()))
        if self.way == "last as head":
            last = self.blocks[-1]
            assert isinstance(last, Block)
            x = functional.linear(x, last.core.weight.t())
        if self.way == "first at the end":
            first = self.blocks[0]
            assert isinstance(first, Block)
            x = x * first.norm.weight
        return self.head(x) + extra


WAYS = ("regulariser", "part of the block", "generator", "tied head", "last as head", "first at the end")


def reads() -> None:
    for way in WAYS:
        torch.manual_seed(0)
        plain = Reader(way)
        start = {name: value.clone() for name, value in plain.state_dict().items()}
        x = torch.randn(4, 8)
        plain(x).pow(2).mean().backward()
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        for settings in ({}, {"bucket_bytes": 64}, {"prefetch": 0}):
            with variant(stage=3, **settings) as strategy:
                model = Reader(way)
                model.load_state_dict(start)
                distributed = hybrid.distributed_model(model, strategy)
                distributed(x).pow(2).mean().backward()
                for name, gradient in distributed.named_gradients():
                    torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-6, msg=f"{way}: {name}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_a_parent_reads_is_there_in_backward(world_size: int) -> None:
    """Protects stage 3 under regularisers, tied heads and calls of a block's parts, whatever buckets are merged."""
    run_ranks(reads, world_size)
