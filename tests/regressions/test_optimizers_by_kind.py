"""Which optimizer is which, and which of them GradScaler means."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import hybrid
from tests.multi_rank.case_runs import ONE_STEP, assert_weights, own_part, seeded, variant, weights_of, wrapped
from tests.ranks import run_ranks


def net() -> nn.Sequential:
    torch.manual_seed(51)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


class DistributedRatio(torch.optim.SGD):
    """Not element-wise, whatever its name says: it scales each gradient by the norm of its parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad / parameter.grad.norm() * parameter.norm(), alpha=-0.1)
        return None


def check_named_distributed() -> None:
    plain = net()
    inputs = torch.randn(8, 4, generator=seeded(1800))
    plain(inputs).square().mean().backward()
    DistributedRatio(plain.parameters(), lr=0.1).step()
    for stage in (0, 1, 2):
        with variant(stage=stage) as strategy:
            model, optimizer = wrapped(net(), lambda p: DistributedRatio(p, lr=0.1), strategy)
            model(own_part(inputs)).square().mean().backward()
            optimizer.step()
            assert_weights(model, weights_of(plain), ONE_STEP)


def test_a_name_does_not_make_an_optimizer_element_wise() -> None:
    """A class called Distributed... that derives from a known optimizer stepped on slices, with their norms."""
    run_ranks(check_named_distributed, 2)


def check_abandoned() -> None:
    inputs = torch.randn(8, 4, generator=seeded(1801))
    plain = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    pair = [torch.optim.SGD(plain[place].parameters(), lr=0.1) for place in (0, 2)]
    scaler.scale(plain(inputs).square().mean()).backward()
    for optimizer in pair:
        scaler.step(optimizer)
    scaler.update()
    for stage in (0, 2):
        with variant(stage=stage) as strategy:
            model, first = wrapped(net(), lambda p: torch.optim.AdamW(p, lr=0.0, weight_decay=0.0), strategy)
            model(own_part(inputs)).square().mean().backward()
            first.step()
            first.zero_grad()
            del first
            gc.collect()
            assert model.memory_bytes()["optimizer_state"] == 0
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            own = [hybrid.distributed_optimizer(torch.optim.SGD(model[place].parameters(), lr=0.1)) for place in (0, 2)]
            scaler.scale(model(own_part(inputs)).square().mean()).backward()
            for optimizer in own:
                scaler.step(optimizer)
            scaler.update()
            assert_weights(model, weights_of(plain), ONE_STEP)


def test_an_abandoned_optimizer_is_forgotten() -> None:
    """It stayed alive with its state, and GradScaler unscaled its parameters, which were others' too, twice."""
    run_ranks(check_abandoned, 2)


def check_embedding(more: dict[str, Any], words: str) -> None:
    with variant(stage=2) as strategy, pytest.raises(hybrid.ModelError, match=words):
        wrapped(nn.Sequential(nn.Embedding(5, 4, **more)), lambda p: torch.optim.SGD(p, lr=0.1), strategy)


def test_an_embedding_that_edits_itself_is_refused() -> None:
    """`max_norm` rescales the rows of this rank's own indices: copies of one weight drifted apart."""
    run_ranks(check_embedding, 2, {"max_norm": 1.0}, "max_norm")


def test_an_embedding_that_counts_its_batch_is_refused() -> None:
    """`scale_grad_by_freq` divides by how often an index is in the batch, and each rank counted its own part."""
    run_ranks(check_embedding, 2, {"scale_grad_by_freq": True}, "scale_grad_by_freq")
