"""A parameter that no rank uses, and the buckets behind it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.multi_rank.case_runs import own_part, variant, wrapped
from tests.ranks import run_ranks


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(15, 15) for _ in range(6))
        self.unused = nn.Linear(15, 15)  # registered last, so its bucket is the first in launch order

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs.square().mean()


def largest_backlog() -> list[int]:
    """Most buckets with local gradients at a time, in each of three steps."""
    with variant(stage=2, bucket_bytes=1000) as strategy:
        model, optimizer = wrapped(WithUnused(), lambda p: torch.optim.SGD(p, lr=0.1), strategy)
        buckets: Any = model.hybrid_runtime.engine.buckets
        seen = []
        for _ in range(3):
            most = 0

            def look(_: torch.Tensor) -> None:
                nonlocal most
                most = max(most, sum(bucket.local is not None for bucket in buckets))

            hooks = [p.register_post_accumulate_grad_hook(look) for p in model.parameters()]
            model(own_part(torch.ones(4, 15))).backward()
            for hook in hooks:
                hook.remove()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(most)
        return seen


def test_an_unused_parameter_does_not_keep_whole_gradients_alive() -> None:
    """The bucket of a layer that nobody uses never filled, and every bucket behind it waited for the end.

    From the second step on it is known, on all ranks alike, that nobody uses it: stage 2 keeps its promise.
    """
    for seen in run_ranks(largest_backlog, 2):
        assert max(seen[1:]) <= 2, seen
