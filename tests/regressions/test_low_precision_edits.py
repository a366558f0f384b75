"""fp32 masters of bf16 parameters must follow what the user writes into the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.multi_rank.case_runs import own_part, variant, wrapped
from tests.ranks import run_ranks


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.25)


def check_edit(edit: str) -> None:
    for stage in (0, 1, 2):
        with variant(stage=stage) as strategy:
            torch.manual_seed(37)
            model, optimizer = wrapped(nn.Sequential(nn.Linear(8, 8)).to(torch.bfloat16), sgd, strategy)
            half = {name: torch.full_like(value, 0.5) for name, value in model[0].state_dict().items()}
            if edit == "in place":
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(0.5)
            elif edit == "data":
                for parameter in model.parameters():
                    parameter.data.fill_(0.5)
            else:
                model[0].load_state_dict(half)
            ones = own_part(torch.ones(2, 8, dtype=torch.bfloat16))
            # The gradient of each element of the bias is 1: 0.5 - 0.25.
            model.train_batch(ones, optimizer, forward_step=lambda model, batch: model(batch).sum())
            assert model[0].bias.tolist() == [0.25] * 8
            assert model[0].weight.tolist() == [[0.25] * 8] * 8


@pytest.mark.parametrize("edit", ["in place", "data", "load of a layer"])
def test_an_edit_of_low_precision_weights_survives_the_next_step(edit: str) -> None:
    """The step updated the fp32 master, which nobody had told of the edit, and copied it over the weights.

    `p.fill_()` under no_grad, or `load_state_dict` of one layer, was undone by the next step; only
    `load_state_dict` of the whole model reached the masters.
    """
    run_ranks(check_edit, 2, edit)
