"""What the tests of loading weights share: a model, other values for one, and a comparison to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.multi_rank.case_runs import seeded

__all__ = ["Small", "State", "assert_state", "values_for"]

State = dict[str, torch.Tensor]


def values_for(model: nn.Module, seed: int = 3) -> State:
    """Other values for a plain model's state dict; what is tied stays so."""
    found: dict[int, torch.Tensor] = {}
    for value in model.state_dict(keep_vars=True).values():
        new = torch.randn(value.shape, generator=seeded(seed)).to(value.dtype)
        found.setdefault(id(value), new)
    return {name: found[id(value)] for name, value in model.state_dict(keep_vars=True).items()}


def assert_state(got: Mapping[str, Any], wanted: Mapping[str, Any], what: str = "") -> None:
    assert set(got) == set(wanted), (what, set(got) ^ set(wanted))
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype, (what, name)
        assert torch.equal(got[name], value), (what, name)


class Small(nn.Module):
    """Odd widths, a frozen weight, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(value)))) * self.scale
