"""Stage 3: where a block leaves its values must not decide whether its parameters are there in backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.multi_rank.case_runs import SEVERAL_STEPS, assert_weights, own_part, seeded, variant, weights_of, wrapped
from tests.ranks import run_ranks

WIDTH = 4
_elsewhere: list[torch.Tensor] = []


class Slot:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Called:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __call__(self) -> torch.Tensor:
        return self.value


def leave_elsewhere(value: torch.Tensor) -> str:
    _elsewhere.append(value)
    return "done"


Place = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
PLACES: dict[str, Place] = {
    "deque": (lambda t: deque([t]), lambda v: v[0]),
    "slot": (Slot, lambda v: v.value),
    "key": (lambda t: {t: "note"}, lambda v: next(iter(v))),
    "view of a dict": (lambda t: {"a": t}.values(), lambda v: next(iter(v))),
    "callable": (Called, lambda v: v()),
    "closure": (lambda t: lambda: t, lambda v: v()),
    "generator": (lambda t: (each for each in [t]), next),
    "map": (lambda t: map(torch.neg, [t]), next),
    "elsewhere": (leave_elsewhere, lambda _: _elsewhere.pop()),
}


class Block(nn.Module):
    """Its backward reads both parameters, one of them element by element: if it is absent, that is a crash."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, inputs: torch.Tensor, place: str, losses: list[torch.Tensor]) -> Any:
        output = torch.tanh(self.linear(inputs)) * torch.sin(self.scale)
        if place == "argument":
            losses.append((output * self.scale).square().mean())  # after the output: its backward comes first
            return output
        return PLACES[place][0](output)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in (*PLACES, "argument"))

    def forward(self, inputs: torch.Tensor, *, losses: list[torch.Tensor]) -> None:
        """The loss, in parts, is put into the caller's list."""
        for place, block in zip((*PLACES, "argument"), self.blocks, strict=True):
            output = block(inputs, place, losses)
            inputs = inputs + (output if place == "argument" else PLACES[place][1](output))
        losses.append((inputs * torch.sin(self.scale)).square().mean())


def train(model: Any, optimizer: torch.optim.Optimizer, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for step in range(2):
        losses: list[torch.Tensor] = []
        model(part(torch.randn(4, WIDTH, generator=seeded(step))), losses=losses)
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def built() -> Model:
    torch.manual_seed(8)
    return Model()


def check_places() -> None:
    plain = built()
    train(plain, sgd(plain.parameters()), lambda whole: whole)
    with variant(stage=3, bucket_bytes=64) as strategy:
        model, optimizer = wrapped(built(), sgd, strategy)
        train(model, optimizer, own_part)
        assert_weights(model, weights_of(plain), SEVERAL_STEPS)


def test_values_in_places_of_any_kind() -> None:
    """A block that returned an object with slots, a deque, a closure, or put a loss into a list that it was given.

    Nothing announced its backward, which read parameters that had been freed: a segmentation fault where it reads them
    element by element, torch's "setStorage ... storage of size 0" where it multiplies matrices.
    """
    run_ranks(check_places, 2)
