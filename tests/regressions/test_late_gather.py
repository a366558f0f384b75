"""`overlap_param_gather`: parameters whose new values are on their way after `train_batch`."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import SEVERAL_STEPS, assert_weights, own_part, seeded, variant, weights_of, wrapped
from tests.ranks import run_ranks


def mlp() -> nn.Sequential:
    torch.manual_seed(35)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(1300)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)


def check_copied_layer() -> None:
    inputs, labels = samples()
    for stage in (1, 2):
        with variant(stage=stage, overlap_param_gather=True) as strategy:
            model, optimizer = wrapped(mlp(), sgd, strategy)
            model.train_batch((own_part(inputs), own_part(labels)), optimizer, loss_fn=functional.mse_loss)
            layer, weight = copy.deepcopy(model[0]), copy.deepcopy(model[2].weight)
            assert torch.equal(layer(inputs), model[0](inputs))
            assert torch.equal(weight, model[2].weight)
            assert type(weight) is type(layer.weight) is nn.Parameter


def test_a_copy_of_a_layer_taken_after_a_step_is_an_ordinary_layer() -> None:
    """A copy kept the class of a parameter that waits, with nothing to wait for.

    `copy.deepcopy` of a layer (for a moving average) right after `train_batch` gave parameters whose every use
    ended in a RecursionError.
    """
    run_ranks(check_copied_layer, 2)


class WithScript(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(36)
        self.body = torch.jit.script(nn.Linear(4, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(inputs)))


def train_with_script() -> None:
    inputs, labels = samples()
    warnings.simplefilter("ignore")
    plain = WithScript()
    plain_optimizer = sgd(plain.parameters())
    for _ in range(3):
        functional.mse_loss(plain(inputs), labels).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    for late in (False, True):
        with variant(stage=2, overlap_param_gather=late) as strategy:
            try:
                model, optimizer = wrapped(WithScript(), sgd, strategy)
            except hybrid.ModelError:
                assert late, "refused without overlap_param_gather, too"
                continue
            for _ in range(3):
                model.train_batch((own_part(inputs), own_part(labels)), optimizer, loss_fn=functional.mse_loss)
            assert_weights(model, weights_of(plain), SEVERAL_STEPS)


def test_a_scripted_layer_computes_with_new_weights_or_is_refused() -> None:
    """TorchScript reads a parameter's memory without asking its class, so it did not wait.

    A model with a scripted layer trained on weights of which the other ranks' parts were one step old.
    """
    run_ranks(train_with_script, 2)
