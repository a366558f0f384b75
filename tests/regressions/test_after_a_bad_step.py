"""A batch that gives NaN: its step is left out, its gradients are emptied, and the next step is an ordinary one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hybrid
from tests.multi_rank.case_runs import ONE_STEP, assert_close, assert_weights, own_part, seeded, variant, weights_of
from tests.ranks import run_ranks

MAX_NORM = 0.1
SETTINGS: tuple[dict[str, Any], ...] = (
    {"stage": 0},
    {"stage": 2},
    {"stage": 2, "partition": "parameter"},
    {"stage": 2, "offload": "optimizer"},
)

Optimizers = tuple[torch.optim.Optimizer, ...]


def by_hand(model: nn.Module, optimizers: Optimizers) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def by_two_optimizers(model: nn.Module, optimizers: Optimizers) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()


def to_zeros(model: nn.Module, optimizers: Optimizers) -> None:
    model.zero_grad(set_to_none=False)


def net() -> nn.Sequential:
    torch.manual_seed(71)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))  # sizes that leave padding in a bucket


def optimizers_of(model: nn.Module) -> Optimizers:
    return (torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.2))


def train(model: Any, optimizers: Optimizers, inputs: torch.Tensor, empty: Callable[..., None]) -> torch.Tensor:
    """Three steps, the second with NaN, which is left out; the last norm."""
    clip = getattr(model, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, list(model.parameters())))
    for step in range(3):
        loss = model(inputs * (step + 1)).square().mean()
        (loss * (torch.nan if step == 1 else 1.0)).backward()
        norm = clip(MAX_NORM)
        if step != 1:
            for optimizer in optimizers:
                optimizer.step()
        empty(model, optimizers)
    return norm


def check_emptied(empty: Callable[..., None]) -> None:
    inputs = torch.randn(8, 5, generator=seeded(72))
    plain = net()
    wanted = train(plain, optimizers_of(plain), inputs, empty)
    for settings in SETTINGS:
        with variant(**settings) as strategy:
            model: Any = hybrid.distributed_model(net(), strategy=strategy)
            optimizers = tuple(map(hybrid.distributed_optimizer, optimizers_of(model)))
            norm = train(model, optimizers, own_part(inputs), empty)
            assert_close(norm.float(), wanted, ONE_STEP, "norm of the step after")
            assert_weights(model, weights_of(plain), ONE_STEP)


@pytest.mark.parametrize("empty", [by_hand, by_two_optimizers, to_zeros], ids=lambda empty: empty.__name__)
def test_nothing_of_a_nan_is_left_in_emptied_gradients(empty: Callable[..., None]) -> None:
    """Clipping by a norm that is NaN makes a factor that is NaN, which waits beside the gradients.

    It stayed where they were emptied in parts or to zeros, also in the padding between parameters, which the norm
    reads: every norm after it, and every weight, was NaN.
    """
    run_ranks(check_emptied, 2, empty)
