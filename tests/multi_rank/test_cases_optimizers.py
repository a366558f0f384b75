"""Reported faults of schedules, groups and closures: what counts as a step, and what is called how often."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

import hybrid
from tests.multi_rank.case_runs import (
    SEVERAL_STEPS,
    assert_close,
    assert_weights,
    own_part,
    seeded,
    variant,
    weights_of,
    wrapped,
)
from tests.ranks import run_ranks

# -- BC-54 ------------------------------------------------------------------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(11)
    return nn.Linear(3, 2)


def batch_of(step: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(700 + step)
    return torch.randn(size, 3, generator=generator), torch.randn(size, 2, generator=generator)


def tagged_sgd(parameters: Any) -> torch.optim.Optimizer:
    weight, bias = parameters
    return torch.optim.SGD([{"params": [weight], "tag": "body"}, {"params": [bias], "lr": 0.5, "tag": "edge"}], lr=1.0)


def check_schedule() -> None:
    world_size = dist.get_world_size()
    for stage in (0, 1, 2):
        with variant(stage=stage, accumulate_steps=4) as strategy:
            model, optimizer = wrapped(small(), tagged_sgd, strategy)
            scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.1)
            rates = []
            for step in range(3):
                inputs, labels = (own_part(tensor) for tensor in batch_of(step, 8 * world_size))
                if step == 1:
                    inputs, labels = inputs[:0], labels[:0]  # no sample anywhere: this step is skipped
                result = model.train_batch((inputs, labels), optimizer, scheduler, loss_fn=functional.mse_loss)
                assert result.skipped == (step == 1)
                rates.append([group["lr"] for group in optimizer.param_groups])
            # Two updates over 8 micro-batches: 0.01, on any number of ranks.
            for got, wanted in zip(rates, ([0.1, 0.05], [0.1, 0.05], [0.01, 0.005]), strict=True):
                assert_close(torch.tensor(got), torch.tensor(wanted), 1e-9, "rates")
            # Keys of the user and of the scheduler are in the exported groups, under the plain names.
            groups = optimizer.full_state_dict()["param_groups"]
            assert [group["tag"] for group in groups] == ["body", "edge"]
            assert [group["initial_lr"] for group in groups] == [1.0, 0.5]
            assert [group["params"] for group in groups] == [["weight"], ["bias"]]
            # And they come back, into an optimizer that knew none of them.
            saved = optimizer.full_state_dict()
            del optimizer
            fresh = hybrid.distributed_optimizer(
                torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=7.0)
            )
            fresh.load_state_dict(saved)
            resumed = lr_scheduler.ExponentialLR(fresh, gamma=0.1, last_epoch=1)
            assert [group["tag"] for group in fresh.param_groups] == ["body", "edge"]
            resumed.step()
            assert_close(fresh.param_groups[0]["lr"], 0.001, 1e-9, "the rate after the resume")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bc54_the_rate_falls_once_per_update_and_groups_keep_their_keys(world_size: int) -> None:
    """Fault: the schedule advanced per micro-batch, per process or on a skipped step; initial_lr was lost."""
    run_ranks(check_schedule, world_size)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 1 / (n + 1), lambda n: 0.9**n]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.3, 0.2], total_steps=8),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0),
}


def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
    weight, bias = parameters
    return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "weight_decay": 0.1}], lr=0.2, momentum=0.8)


def train_scheduled_plain(name: str) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    model = small()
    optimizer = momentum_sgd(model.parameters())
    scheduler = SCHEDULES[name](optimizer)
    rates = []
    for step in range(6):
        inputs, labels = batch_of(step)
        loss = functional.mse_loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(loss.item()) if name == "plateau" else scheduler.step()
        rates.append([value for group in optimizer.param_groups for value in (group["lr"], group["momentum"])])
    return rates, weights_of(model)


def check_schedules() -> None:
    for number, name in enumerate(SCHEDULES):
        rates, weights = train_scheduled_plain(name)
        for built in ("before", "after"):
            with variant(stage=number % 3) as strategy:
                model = small()
                optimizer = momentum_sgd(model.parameters())
                scheduler = SCHEDULES[name](optimizer) if built == "before" else None
                model = hybrid.distributed_model(model, strategy=strategy)
                optimizer = hybrid.distributed_optimizer(optimizer)
                scheduler = scheduler or SCHEDULES[name](optimizer)
                for step in range(6):
                    batch = tuple(own_part(tensor) for tensor in batch_of(step))
                    with warnings.catch_warnings():
                        # A schedule that misses the steps warns that it was called before the optimizer.
                        warnings.simplefilter("error")
                        if step % 2:
                            loss = functional.mse_loss(model(batch[0]), batch[1])
                            loss.backward()
                            optimizer.step()
                            optimizer.zero_grad()
                            dist.all_reduce(loss := loss.detach())
                            scheduler.step(loss.item() / 2) if name == "plateau" else scheduler.step()
                        else:
                            model.train_batch(batch, optimizer, scheduler, loss_fn=functional.mse_loss)
                    got = [value for group in optimizer.param_groups for value in (group["lr"], group["momentum"])]
                    assert_close(torch.tensor(got), torch.tensor(rates[step]), 1e-6, f"{name} in step {step}")
                assert_weights(model, weights, SEVERAL_STEPS)


def test_bc54_every_kind_of_schedule_works_built_before_or_after() -> None:
    """Fault of the same kind: a schedule held the optimizer from before the wrapping and steered nothing."""
    run_ranks(check_schedules, 2)


# -- BC-56 ------------------------------------------------------------------------------------------------------

CLOSURES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
}


class Squares(nn.Module):
    """Least squares with two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5))
        self.offset = nn.Parameter(torch.tensor([-1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.slope * x + self.offset


def points(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 2, 8) + step
    return x, 3 * x + 1


def accumulating(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor, calls: list[int]) -> Callable[[], Any]:
    """A closure over two micro-batches, the first without synchronisation."""

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        calls.append(1)
        optimizer.zero_grad()
        with model.no_sync():
            first = functional.mse_loss(model(x[:2]), y[:2]) / 2
            first.backward()
        second = functional.mse_loss(model(x[2:]), y[2:]) / 2
        second.backward()
        return (first + second).detach()

    return closure


def check_closures() -> None:
    for make in CLOSURES.values():
        for max_norm in (None, 0.7):
            plain = Squares()
            plain_optimizer = make(plain.parameters())
            losses = []
            for step in range(4):
                x, y = points(step)
                loss = functional.mse_loss(plain(x), y)
                loss.backward()
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
                plain_optimizer.step()
                plain_optimizer.zero_grad()
                losses.append(loss.item())
            for stage in (0, 1, 2):
                with variant(stage=stage, gradient_clipping=max_norm) as strategy:
                    model, optimizer = wrapped(Squares(), make, strategy)
                    calls: list[int] = []
                    for step in range(4):
                        x, y = (own_part(tensor) for tensor in points(step))

                        closure = accumulating(model, optimizer, x, y, calls)
                        with torch.no_grad():
                            loss = optimizer.step(closure)
                        total = loss.clone()
                        dist.all_reduce(total)
                        assert_close(total / 2, losses[step], SEVERAL_STEPS, f"closure's loss in step {step}")
                    assert len(calls) == 4
                    assert_weights(model, weights_of(plain), SEVERAL_STEPS)


def test_bc56_a_closure_is_called_once_and_its_gradients_are_used() -> None:
    """Fault: the closure was ignored under sharding, or one backward too many was made."""
    run_ranks(check_closures, 2)
