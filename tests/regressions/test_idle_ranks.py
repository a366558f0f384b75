"""A rank that has less to do than the others must still meet them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.multi_rank.case_runs import ONE_STEP, assert_weights, own_part, seeded, variant, weights_of, wrapped
from tests.ranks import run_ranks


def mlp() -> nn.Sequential:
    torch.manual_seed(33)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def samples() -> torch.Tensor:
    return torch.randn(8, 4, generator=seeded(1200))


def check_call_without_backward(call: str) -> None:
    plain = mlp()
    (functional.mse_loss(plain(samples()[:4]), samples()[4:]) / 2).backward()
    sgd(plain.parameters()).step()
    for stage in (0, 2):
        with variant(stage=stage, timeout_seconds=4) as strategy:
            model, optimizer = wrapped(mlp(), sgd, strategy)
            if dist.get_rank() == 0:
                functional.mse_loss(model(samples()[:4]), samples()[4:]).backward()
            if call == "norm":
                model.clip_grad_norm_(1e9)
            elif call == "value":
                model.clip_grad_value_(1e9)
            else:
                dict(model.named_gradients())
            optimizer.step()
            assert_weights(model, weights_of(plain), ONE_STEP)


@pytest.mark.parametrize("call", ["norm", "value", "gradients"])
def test_a_rank_without_a_backward_meets_the_others_in_every_call(call: str) -> None:
    """A rank decided by its own gradients whether there was anything to reduce.

    A rank that skipped its backward (no tokens) met the others at `optimizer.step()`, but `clip_grad_norm_`
    before it ended in a CollectiveError: the idle rank went on to the norm while the others reduced.
    """
    run_ranks(check_call_without_backward, 2, call)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(34)
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, use_middle: bool) -> torch.Tensor:
        hidden = self.first(inputs)
        return self.last(self.middle(hidden) if use_middle else hidden)


def check_two_models_in_one_backward() -> None:
    encoder, branch = mlp(), Branch()
    for place, part in enumerate(samples().chunk(2)):
        (branch(encoder(part), place == 0).square().mean() / 2).backward()
    sgd([*encoder.parameters(), *branch.parameters()]).step()
    for stage in (0, 2):
        with variant(stage=stage, timeout_seconds=4, bucket_bytes=64) as strategy:
            first, first_optimizer = wrapped(mlp(), sgd, strategy)
            second, second_optimizer = wrapped(Branch(), sgd, strategy)
            second(first(own_part(samples())), dist.get_rank() == 0).square().mean().backward()
            first_optimizer.step()
            second_optimizer.step()
            assert_weights(first, weights_of(encoder), ONE_STEP)
            assert_weights(second, weights_of(branch), ONE_STEP)


def test_two_models_in_one_backward_with_a_part_that_one_rank_does_not_use() -> None:
    """Each model launched in its own fixed order, but nothing ordered the two models against each other.

    Where one rank does not use a part of the second model, its buckets are complete only at the end of the
    backward, after those of the first model; on the other rank they come before. The ranks met in the wrong
    collectives and ended in a CollectiveError.
    """
    run_ranks(check_two_models_in_one_backward, 2)
