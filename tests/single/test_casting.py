"""Which parameters and buffers compute in low precision, and in which type the others stay."""

from __future__ import annotations

import torch
from torch import nn

from hybrid.precision.casting import check_buffers_to_cast, compute_dtypes, install_casts


def with_a_norm_in_two_places() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(norm, nn.Linear(4, 4), norm, nn.Linear(4, 4))


def test_a_norm_in_two_places_keeps_float32_in_both() -> None:
    """It is one module with two names: the second was taken for a tie outside of the norms, and refused."""
    model = with_a_norm_in_two_places()
    low = compute_dtypes(model, dtype=torch.bfloat16, custom_fp32=())
    assert set(low) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert set(compute_dtypes(model, dtype=torch.bfloat16, custom_fp32=("1",))) == {"3.weight", "3.bias"}
    model.register_buffer("table", torch.ones(3))
    check_buffers_to_cast(model, dtype=torch.bfloat16, custom_fp32=())
    install_casts(model, custom_fp32=("2",), norms=True)
    value = torch.randn(6, 4)
    wanted = nn.BatchNorm1d(4)(value.bfloat16().float()).bfloat16()
    assert torch.equal(model[2](value.bfloat16()), wanted)
