"""Random numbers that decide which units a forward calls are seen however they are drawn, and only those."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hybrid.errors import ModelError
from tests.single.test_own_forward_flow import Blocks, X, plan

SPELLINGS: dict[str, Callable[[], bool]] = {
    "compared": lambda: bool(torch.rand([]) < 0.3),
    "item": lambda: torch.rand(1).item() < 0.3,
    "bernoulli": lambda: bool(torch.bernoulli(torch.tensor(0.3))),
    "whole": lambda: int(torch.randint(0, 3, ())) == 0,
    "random": lambda: random.random() < 0.3,
    "numpy": lambda: bool(np.random.random() < 0.3),
}


class Dropping(Blocks):
    def __init__(self, drops: Callable[[], bool]) -> None:
        super().__init__()
        self.drops = drops

    def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
        return x if self.training and self.drops() else block(x)


class Noisy(Blocks):
    """Draws as a layer that is dropped does, and calls every block."""

    def __init__(self, drops: Callable[[], bool]) -> None:
        super().__init__()
        self.drops = drops

    def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
        return block(x.flip(0) if self.drops() else x)


def states() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_layer_drop_is_refused_in_every_spelling(spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: only a comparison of tensors was seen; else what one draw left out was planned as if it always would be.

    The generators go on as before, those of GPUs too.
    """

    def seeded(seed: int) -> None:
        raise AssertionError(f"a GPU's generator is set to {seed}")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded)
    model, before = Dropping(SPELLINGS[spelling]), states()
    with pytest.raises(ModelError, match=r"random numbers decide which units.*layerdrop = 0"):
        plan(model, X)
    assert states() == before


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_draws_that_decide_nothing_are_no_layer_drop(spelling: str) -> None:
    model, before = Noisy(SPELLINGS[spelling]), states()
    assert len(plan(model, X).flow.calls) == 4
    assert states() == before


def test_every_rank_decides_alike() -> None:
    """A chance that is seldom taken must not be refused on the one rank whose generators stand there."""
    model, refused = Dropping(lambda: torch.rand(1).item() < 0.02), []
    for seed in range(12):
        torch.manual_seed(seed)
        try:
            plan(model, X)
            refused.append(False)
        except ModelError:
            refused.append(True)
    assert len(set(refused)) == 1
