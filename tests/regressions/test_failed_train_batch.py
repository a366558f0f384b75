"""`train_batch` that raises half-way, and what is left of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import ONE_STEP, assert_weights, own_part, seeded, variant, weights_of, wrapped
from tests.ranks import run_ranks


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def net() -> nn.Sequential:
    torch.manual_seed(50)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(1700)
    return torch.randn(12, 4, generator=generator), torch.randn(12, 3, generator=generator)


class FailsOnce:
    """A loss that raises in the call with this number."""

    def __init__(self, call: int) -> None:
        self.call = call

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.call -= 1
        if self.call == 0:
            raise ZeroDivisionError("this batch is broken")
        return functional.mse_loss(output, labels)


def check_retry() -> None:
    plain = net()
    inputs, labels = samples()
    functional.mse_loss(plain(inputs), labels).backward()
    sgd(plain.parameters()).step()
    for stage in (0, 1, 2, 3):
        for failing in (2, 3):
            with variant(stage=stage, accumulate_steps=3) as strategy:
                model, optimizer = wrapped(net(), sgd, strategy)
                batch, loss_fn = (own_part(inputs), own_part(labels)), FailsOnce(failing)
                with pytest.raises(ZeroDivisionError):
                    model.train_batch(batch, optimizer, loss_fn=loss_fn)
                model.train_batch(batch, optimizer, loss_fn=loss_fn)
                assert_weights(model, weights_of(plain), ONE_STEP)


def test_a_failed_call_leaves_nothing_behind() -> None:
    """The sums of the micro-batches before the failure stayed, and the next call added them without their weight."""
    run_ranks(check_retry, 2)


def check_mixed() -> None:
    inputs, labels = samples()
    with variant(stage=2) as strategy:
        model, optimizer = wrapped(net(), sgd, strategy)
        batch = (own_part(inputs), own_part(labels))
        model.train_batch(batch, optimizer, loss_fn=functional.mse_loss, step=False)
        with pytest.raises(ZeroDivisionError):
            model.train_batch(batch, optimizer, loss_fn=FailsOnce(1))
        for go_on in (optimizer.step, lambda: model.train_batch(batch, optimizer, loss_fn=functional.mse_loss)):
            with pytest.raises(hybrid.ModelError, match="zero_grad"):
                go_on()
        model.zero_grad()
        model.train_batch(batch, optimizer, loss_fn=functional.mse_loss)


def test_a_failed_call_on_top_of_others_is_not_dropped_in_silence() -> None:
    """What it left cannot be told apart from the gradients of the calls before it: refused until they are emptied."""
    run_ranks(check_mixed, 2)


def check_pairs() -> None:
    inputs, labels = samples()
    with variant(stage=1) as strategy:
        model, optimizer = wrapped(net(), sgd, strategy)
        for second in ({"accuracy": 1}, 0.83, -3, torch.tensor(-1)):

            def loss_fn(output: torch.Tensor, labels: torch.Tensor, second: Any = second) -> Any:
                return functional.mse_loss(output, labels), second

            with pytest.raises(hybrid.BatchError, match="cannot be one"):
                model.train_batch((own_part(inputs), own_part(labels)), optimizer, loss_fn=loss_fn)


def test_the_second_of_a_pair_is_a_count() -> None:
    """(loss, accuracy) was taken as (sum, count): gradients were divided by the accuracy."""
    run_ranks(check_pairs, 2)
