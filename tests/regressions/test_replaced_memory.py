"""`p.data = ...` at stage 3, where a parameter's memory is another one at every gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import hybrid
from tests.multi_rank.case_runs import own_part, seeded, variant, wrapped
from tests.ranks import run_ranks

REPLACED = r"memory of parameter '\d\.linear\.(weight|bias)' was replaced"


class Unit(nn.Module):
    """A layer that gives its weight rows of length 1 at every call, if it is asked to."""

    def __init__(self, normalises: bool) -> None:
        super().__init__()
        self.linear, self.normalises = nn.Linear(4, 4), normalises

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.normalises:
            self.linear.weight.data = nn.functional.normalize(self.linear.weight.data)
        result: torch.Tensor = self.linear(inputs)
        return result


def net(normalises: bool = False) -> nn.Sequential:
    torch.manual_seed(81)
    return nn.Sequential(Unit(normalises), Unit(normalises))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def check_replaced() -> None:
    inputs = torch.randn(8, 4, generator=seeded(82))
    for offload in (None, "parameters"):
        with variant(stage=3, offload=offload) as strategy:
            model, optimizer = wrapped(net(), sgd, strategy)
            with pytest.raises(hybrid.ModelError, match=REPLACED), torch.no_grad(), model.gather_parameters():
                vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())
        with variant(stage=3, offload=offload) as strategy:
            frozen = net()
            frozen[0].requires_grad_(False)
            model, optimizer = wrapped(frozen, sgd, strategy)
            with pytest.raises(hybrid.ModelError, match=REPLACED), model.gather_parameters():
                model[0].linear.weight.data = torch.ones(4, 4)
        with variant(stage=3, offload=offload) as strategy:
            model, optimizer = wrapped(net(normalises=True), sgd, strategy)
            model(own_part(inputs)).square().mean().backward()
            with pytest.raises(hybrid.ModelError, match=REPLACED):
                optimizer.step()


def test_memory_replaced_at_stage_3_is_refused() -> None:
    """The values in the new memory were computed with from then on, and the updates went into the old one.

    The model stood still without a word, and a checkpoint held other weights than it ran with; at stages 0 to 2 it
    was refused.
    """
    run_ranks(check_replaced, 2)
