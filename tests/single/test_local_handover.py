"""Two chunks of a pipeline on one rank: what one hands to the other is what would have arrived from another rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hybrid.collectives.group import Group
from hybrid.contracts.schedule import make_schedule
from hybrid.errors import ModelError
from hybrid.pipeline.runner import PipelineRunner
from hybrid.pipeline.transport import Lane, Transport
from hybrid.weight_gradients import take_over_gradients

INPUTS = [torch.randn(3, 6, generator=torch.Generator().manual_seed(number)) for number in range(3)]


def run_on_one_rank(chunks: Sequence[Callable[[Any], Any]], *, backward: bool = True) -> list[float]:
    """One step of `zbv` with both chunks here; the losses."""
    group = Group(process_group=None, ranks=(0,), rank=0, axis="pp")
    lane = Lane(data=group, headers=group)
    transport = Transport((lane, lane), (lane, lane), ranks=(0, 0), device=torch.device("cpu"))
    runner = PipelineRunner(transport, num_chunks=2, forward=lambda chunk, _, value: chunks[chunk](value))
    actions = make_schedule("zbv", num_stages=1, num_micro_batches=len(INPUTS)).actions[0]
    losses: dict[int, float] = {}

    def loss(number: int, output: torch.Tensor) -> torch.Tensor:
        value = output.square().sum()
        losses[number] = value.item()
        return value

    runner.begin()
    nothing = {name: lambda action: None for name in ("before", "before_backward", "after_backward")}
    if backward:
        runner.run(actions, inputs=INPUTS.__getitem__, loss=loss, **nothing)
    else:
        runner.evaluate(actions, inputs=INPUTS.__getitem__, loss=loss)
    return [losses[number] for number in range(len(INPUTS))]


class First(nn.Module):
    """Returns what its own backward needs, what it keeps and changes with the next micro-batch, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.kept: torch.Tensor | None = None

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.kept is not None:
            with torch.no_grad():
                self.kept.zero_()
        product = self.linear(value)
        self.kept = product.detach()
        return torch.tanh(product * 2), product, value > 0


class Second(nn.Module):
    """Writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        value, product, mask = given
        value.mul_(mask.to(value.dtype)).add_(product)
        mask.zero_()
        return self.linear(value)


def test_neither_chunk_sees_what_the_other_writes() -> None:
    """The first one's backward needs its output as it was, and the second one runs when the first has gone on."""
    torch.manual_seed(0)
    first, second = First(), Second()
    both = nn.ModuleList([first, second])
    wanted = []
    for value in INPUTS:
        product = first.linear(value)
        wanted.append(second.linear(torch.tanh(product * 2) * (value > 0) + product).square().sum())
    sum(wanted).backward()
    gradients = {fqn: parameter.grad for fqn, parameter in both.named_parameters()}
    both.zero_grad()
    take_over_gradients(both)
    losses = run_on_one_rank([first, second])
    torch.testing.assert_close(losses, [loss.item() for loss in wanted])
    for fqn, parameter in both.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[fqn])
    with torch.no_grad():
        first.kept = None
        torch.testing.assert_close(run_on_one_rank([first, second], backward=False), losses)


class Box:
    """No tuple, list, dict or dataclass."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def test_a_gradient_inside_an_object_is_refused_as_between_ranks() -> None:
    """It would go from one graph into the other behind the schedule's back."""
    linear = nn.Linear(6, 6)
    with pytest.raises(ModelError, match=r"goes on to another chunk .* has a gradient"):
        run_on_one_rank([lambda value: Box(linear(value)), lambda box: box.value])
