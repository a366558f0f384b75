"""`train_batch(step=False)` leaves sums behind, with a weight: nothing may read them as means, or lose the weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import (
    ONE_STEP,
    assert_close,
    assert_weights,
    own_part,
    seeded,
    variant,
    weights_of,
    wrapped,
)
from tests.ranks import run_ranks


def mlp() -> nn.Sequential:
    torch.manual_seed(32)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(1100)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)


def accumulate(model: Any, optimizer: Any, piece: int) -> None:
    inputs, labels = (own_part(tensor).chunk(2)[piece] for tensor in samples())
    model.train_batch((inputs, labels), optimizer, loss_fn=functional.mse_loss, step=False)


def step_by_hand(model: Any, optimizer: Any, norm: float) -> None:
    accumulate(model, optimizer, 0)
    accumulate(model, optimizer, 1)
    optimizer.step()


def clip_by_hand(model: Any, optimizer: Any, norm: float) -> None:
    accumulate(model, optimizer, 0)
    accumulate(model, optimizer, 1)
    assert_close(model.clip_grad_norm_(1e9), norm, ONE_STEP, "norm")
    optimizer.step()


def look_in_between(model: Any, optimizer: Any, norm: float) -> None:
    accumulate(model, optimizer, 0)
    dict(model.named_gradients())
    inputs, labels = (own_part(tensor).chunk(2)[1] for tensor in samples())
    model.train_batch((inputs, labels), optimizer, loss_fn=functional.mse_loss)


def check_mixture(mixture: Callable[..., None]) -> None:
    plain = mlp()
    inputs, labels = samples()
    functional.mse_loss(plain(inputs), labels).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
    sgd(plain.parameters()).step()
    for stage in (0, 2):
        with variant(stage=stage) as strategy:
            model, optimizer = wrapped(mlp(), sgd, strategy)
            refusal = ""
            try:
                mixture(model, optimizer, norm)
            except hybrid.HybridError as error:
                refusal = str(error)
            if refusal:
                assert "train_batch" in refusal
            else:
                assert_weights(model, weights_of(plain), ONE_STEP)


@pytest.mark.parametrize("mixture", [step_by_hand, clip_by_hand, look_in_between], ids=lambda m: m.__name__)
def test_accumulated_sums_are_divided_by_their_weight_or_refused(mixture: Callable[..., None]) -> None:
    """Sums over samples were settled as if each rank had run backward on a mean.

    `train_batch(step=False)` and then the model's or optimizer's own calls (clip, step, a look at the gradients)
    gave gradients too large by the number of samples of a rank, without a word.
    """
    run_ranks(check_mixture, 2, mixture)


def check_emptied(emptied: str) -> None:
    plain = mlp()
    inputs, labels = samples()
    functional.mse_loss(plain(inputs), labels).backward()
    sgd(plain.parameters()).step()
    for stage in (0, 2):
        with variant(stage=stage) as strategy:
            model, optimizer = wrapped(mlp(), sgd, strategy)
            accumulate(model, optimizer, 0)
            if emptied == "model":
                model.zero_grad(set_to_none=False)
            elif emptied == "optimizer":
                optimizer.zero_grad(set_to_none=False)
            else:
                for parameter in model.parameters():
                    parameter.grad = None
            batch = (own_part(inputs), own_part(labels))
            model.train_batch(batch, optimizer, loss_fn=functional.mse_loss)
            assert_weights(model, weights_of(plain), ONE_STEP)


@pytest.mark.parametrize("emptied", ["model", "optimizer", "by hand"])
def test_emptied_gradients_take_their_weight_with_them(emptied: str) -> None:
    """Gradients set to zero (not to None) left the number of their samples behind.

    The next step was divided by its own samples and the thrown-away ones: an update too small, without a word.
    """
    run_ranks(check_emptied, 2, emptied)


def check_saving(folder: str) -> None:
    for stage in (0, 2, 3):
        with variant(stage=stage) as strategy:
            model, optimizer = wrapped(mlp(), sgd, strategy)
            accumulate(model, optimizer, 0)
            model.zero_grad()
            hybrid.save_checkpoint(folder, model, optimizer, step=stage)
            accumulate(model, optimizer, 0)
            with pytest.raises(hybrid.CheckpointError, match=r"zero_grad\(\) first"):
                hybrid.save_checkpoint(folder, model, optimizer, step=stage + 10)


def test_a_save_after_gradients_were_emptied(tmp_path: Path) -> None:
    """At stages 2 and 3 it was refused, with the advice to call zero_grad() first."""
    run_ranks(check_saving, 2, str(tmp_path))
