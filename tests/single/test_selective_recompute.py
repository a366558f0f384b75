"""Selective recompute of code that writes to what it keeps: refused by torch, never done twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybrid.collectives.group import Group
from hybrid.recompute import install_recompute
from hybrid.tensor.overlap import overlapped_linear

GROUP = Group(process_group=None, ranks=(0,), rank=0, axis="tp")


class Writing(nn.Module):
    """Doubles in place what its linear layer gives."""

    def __init__(self, *, bias: bool, is_cut: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.is_cut = nn.Linear(6, 6, bias=bias), is_cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        options = {"group": GROUP, "sequence_dim": None, "is_transposed": False}
        y = overlapped_linear(x, layer.weight, layer.bias, **options) if self.is_cut else layer(x)
        return torch.sin(y.mul_(2.0))


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_kept_may_not_be_written_to(bias: bool, is_cut: bool) -> None:
    """Protects gradients: the second forward would find the product written to already, and write to it again."""
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1))
    gradients = []
    for policy in (None, "full"):
        model = nn.Sequential(Writing(bias=bias, is_cut=is_cut))
        if policy == "full":
            install_recompute(model, ["0"], policy="full", preserve_rng=True)
        model(x.clone().requires_grad_()).sum().backward()
        gradients.append(model[0].layer.weight.grad)
    assert torch.equal(*gradients)
    model = nn.Sequential(Writing(bias=bias, is_cut=is_cut))
    install_recompute(model, ["0"], policy="selective", preserve_rng=True)
    with pytest.raises(RuntimeError, match="has been mutated"):
        model(x.clone().requires_grad_()).sum().backward()
