"""`p.grad` changed by the user's own hand between backward and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
    torch.manual_seed(30)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(1000)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)


def set_to_none(model: Any, read: Callable[[torch.Tensor], Any]) -> None:
    model[0].weight.grad = None


def empty_a_layer(model: Any, read: Callable[[torch.Tensor], Any]) -> None:
    model[0].zero_grad()


def halve(model: Any, read: Callable[[torch.Tensor], Any]) -> None:
    model[0].weight.grad = read(model[0].weight) * 0.5


def check_edit(edit: Callable[..., None]) -> None:
    plain = mlp()
    inputs, labels = samples()
    functional.mse_loss(plain(inputs), labels).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    edit(plain, lambda parameter: parameter.grad)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    there = {name: parameter.grad is not None for name, parameter in plain.named_parameters()}
    sgd(plain.parameters()).step()
    for stage in (0, 1, 2):
        with variant(stage=stage) as strategy:
            model, optimizer = wrapped(mlp(), sgd, strategy)
            functional.mse_loss(model(own_part(inputs)), own_part(labels)).backward()
            model.clip_grad_norm_(1e9)
            edit(model, hybrid.full_gradient)
            refusal = ""
            try:
                assert {name: gradient is not None for name, gradient in model.named_gradients()} == there
                assert_close(model.clip_grad_norm_(1e9), norm, ONE_STEP, "norm after the edit")
                optimizer.step()
            except hybrid.ModelError as error:
                refusal = str(error)
            if refusal:
                assert "0.weight" in refusal
            else:
                assert_weights(model, weights_of(plain), ONE_STEP)


@pytest.mark.parametrize("edit", [set_to_none, empty_a_layer, halve], ids=lambda edit: edit.__name__)
def test_an_edit_of_a_gradient_after_the_norm_was_taken_counts_or_is_refused(edit: Callable[..., None]) -> None:
    """After `model.clip_grad_norm_` the gradients are settled, and the step did not look at `p.grad` again.

    So a parameter whose gradient had been set to None was updated all the same, and a gradient set by hand was
    ignored. Before the norm was taken, both were noticed. Nor did the next norm, or look at the gradients.
    """
    run_ranks(check_edit, 2, edit)


class Branch(nn.Module):
    """`middle` is used by some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(31)
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, use_middle: bool) -> torch.Tensor:
        hidden = self.first(inputs)
        return self.last(self.middle(hidden) if use_middle else hidden)


def check_emptied_by_hand() -> None:
    """Rank 0 uses the middle, rank 1 does not; then every rank sets all gradients to None and starts again."""
    plain = Branch()
    inputs, _ = samples()
    for part in inputs.chunk(2):
        (plain(part, True).square().mean() / 2).backward()
    sgd(plain.parameters()).step()
    for stage in (0, 1, 2):
        with variant(stage=stage) as strategy:
            model, optimizer = wrapped(Branch(), sgd, strategy)
            model(own_part(inputs), dist.get_rank() == 0).square().mean().backward()
            for parameter in model.parameters():
                parameter.grad = None
            model(own_part(inputs), True).square().mean().backward()
            optimizer.step()
            assert_weights(model, weights_of(plain), ONE_STEP)


def test_gradients_emptied_by_hand_are_gone_on_every_rank() -> None:
    """A rank dropped what had been reduced only if it had made a gradient for that parameter itself.

    Where a parameter was used on one rank only, another rank kept the reduced sum of its shard, and the next
    backward was added to it.
    """
    run_ranks(check_emptied_by_hand, 2)


def check_norm_without_dropped() -> None:
    plain = Branch()
    inputs, _ = samples()
    for place, part in enumerate(inputs.chunk(2)):
        (plain(part, place == 0).square().mean() / 2).backward()
    plain.middle.zero_grad()
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    for stage in (0, 1, 2):
        with variant(stage=stage) as strategy:
            model, _ = wrapped(Branch(), sgd, strategy)
            model(own_part(inputs), dist.get_rank() == 0).square().mean().backward()
            model.middle.zero_grad()
            assert_close(model.clip_grad_norm_(1e9), wanted, ONE_STEP, f"norm at stage {stage}")


def test_a_dropped_gradient_is_not_in_the_norm() -> None:
    """The same cause: the norm still counted the shard of a gradient that all ranks had dropped."""
    run_ranks(check_norm_without_dropped, 2)
