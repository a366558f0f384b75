"""Models that plain torch trains and that were refused by a crash, or measured wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import hybrid
from tests.multi_rank.case_runs import ONE_STEP, assert_close, own_part, seeded, strategy_of, variant, wrapped
from tests.ranks import run_ranks


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.tensor([3 + 4j, 1j, 2.0]))
        self.bias = nn.Parameter(torch.ones(2))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return (self.spectrum.abs().square().sum() + self.bias.sum()) * samples.mean()


def check_complex_norm() -> None:
    plain = Complex()
    plain(torch.ones(2)).backward()
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    for stage in (0, 2):
        with variant(stage=stage) as strategy:
            try:
                model, _ = wrapped(Complex(), adamw, strategy)
            except hybrid.ModelError:
                continue
            model(torch.ones(2)).backward()
            assert_close(model.clip_grad_norm_(1e9), wanted, ONE_STEP, f"norm at stage {stage}")


def test_complex_parameters_are_in_the_norm_with_both_parts_or_refused() -> None:
    """The norm of a complex gradient was that of its real part: 7.35 instead of 11.05, with torch's warning only."""
    run_ranks(check_complex_norm, 2)


def check_odd_norm(norm_type: float) -> None:
    plain = nn.Linear(40, 3)
    inputs = torch.randn(8, 40, generator=seeded(1400))
    plain(inputs).square().mean().backward()
    for stage in (0, 2):
        with variant(stage=stage) as strategy:
            model, _ = wrapped(nn.Linear(40, 3), adamw, strategy)
            model.load_state_dict(plain.state_dict())
            model(own_part(inputs)).square().mean().backward()
            try:
                norm = model.clip_grad_norm_(1e9, norm_type)
            except (hybrid.HybridError, ValueError):
                continue
            wanted = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None], norm_type)
            assert_close(norm, wanted, ONE_STEP, f"norm of order {norm_type} at stage {stage}")


@pytest.mark.parametrize("norm_type", [-math.inf, -1.0, 0.0])
def test_norms_of_unusual_order_are_right_or_refused(norm_type: float) -> None:
    """Order -inf gave the largest value instead of the smallest, -1 gave 0 (padding), and 0 a ZeroDivisionError."""
    run_ranks(check_odd_norm, 2, norm_type)


class WithBuffer(nn.Linear):
    def __init__(self, kind: str) -> None:
        super().__init__(3, 3)
        if kind == "expanded buffer":
            self.register_buffer("shift", torch.ones(1).expand(3))
        elif kind == "sparse buffer":
            self.register_buffer("shift", torch.eye(3).to_sparse())
        else:
            self.shift = nn.Parameter(torch.ones(1).expand(3), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) @ self.shift.to_dense().expand(3, 3)


def check_buffer(kind: str) -> None:
    with variant(stage=2) as strategy:
        try:
            model, optimizer = wrapped(WithBuffer(kind), lambda p: adamw([q for q in p if q.requires_grad]), strategy)
        except hybrid.ModelError as error:
            refusal = str(error)
        else:
            model.train_batch(own_part(torch.ones(4, 3)), optimizer, forward_step=lambda m, x: m(x).mean())
            return
        assert "shift" in refusal


@pytest.mark.parametrize("kind", ["expanded buffer", "sparse buffer", "expanded frozen parameter"])
def test_buffers_that_are_not_dense_work_or_are_refused_by_name(kind: str) -> None:
    """Giving all ranks the first one's buffers wrote into each as if it were dense: torch raised, without a name."""
    run_ranks(check_buffer, 2, kind)


def check_lazy() -> None:
    with pytest.raises(hybrid.ModelError, match=r"0\.weight"):
        hybrid.distributed_model(nn.Sequential(nn.LazyLinear(3)), strategy=strategy_of(stage=2))


def test_lazy_parameters_are_refused_by_name() -> None:
    """A parameter without a shape yet ended in torch's RuntimeError about load_state_dict."""
    run_ranks(check_lazy, 2)
