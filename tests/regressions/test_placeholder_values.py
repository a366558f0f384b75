"""Ways around the gradient's placeholder: what cannot raise must not look like a gradient either."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hybrid.errors import GradientAccessError
from hybrid.sharding.gradient_handle import GradientHandle


def handle_of(parameter: nn.Parameter, fqn: str) -> GradientHandle:
    return GradientHandle.of(parameter, fqn=fqn, held_dtype=parameter.dtype, unscaler=lambda *_: None)


def copied(gradient: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.tensor(gradient)


def as_grad_output(gradient: torch.Tensor) -> torch.Tensor:
    weight = nn.Parameter(torch.ones(3, 4))
    return torch.autograd.grad([weight * 1], [weight], [gradient])[0]


LEAKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch.tensor": copied,
    "vmap": torch.vmap(lambda row: row * 2),
    "grad_outputs": as_grad_output,
}


@pytest.mark.parametrize("name", LEAKS)
def test_what_slips_past_the_placeholder_is_not_a_number(name: str) -> None:
    """Some calls reach a tensor's memory without asking its class, and found zeros there.

    `torch.tensor(p.grad)`, `torch.vmap` and `grad_outputs` gave a gradient of zeros, without a word, as if the
    parameter had not been used. They should raise, or carry NaN.
    """
    parameter = nn.Parameter(torch.ones(3, 4))
    handle = handle_of(parameter, "weight")
    try:
        value = LEAKS[name](handle)
    except GradientAccessError:
        return
    assert bool(value.isnan().all()), value


def test_a_placeholder_can_be_formatted() -> None:
    """`print(p.grad)` told where the gradient is, and `f"{p.grad}"` raised."""
    parameter = nn.Parameter(torch.ones(3, 4))
    handle = handle_of(parameter, "layer.weight")
    assert "layer.weight" in f"{handle}"
