"""Models: what lay in a parameter's memory beside it, and stage 3 whose parameters are on the host alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hybrid
from tests.multi_rank.case_runs import assert_weights, strategy_of, weights_of
from tests.ranks import run_plain


class Aliased(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(91)
        self.linear = nn.Linear(4, 4)
        value = self.linear.weight.detach()
        if how == "buffer":
            self.register_buffer("other", value[:2], persistent=False)
        elif how == "attribute":
            self.other = value.t()
        elif how == "list":
            self.other = [torch.zeros(1), value]
        elif how == "copy":
            self.register_buffer("other", value.clone())
        elif how == "frozen":  # its memory stays, and nobody changes it
            self.linear.weight.requires_grad_(False)
            self.register_buffer("other", value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x[:, :1] * self.other[0].sum()


def check_aliases() -> None:
    for how in ("buffer", "attribute", "list", "copy", "frozen"):
        model: Any = Aliased(how)
        if how in ("copy", "frozen"):
            hybrid.distributed_model(model, strategy=strategy_of(stage=2))
            hybrid.shutdown()
            continue
        with pytest.raises(hybrid.ModelError, match=r"'other' is another view of the memory of parameter 'linear\."):
            hybrid.distributed_model(model, strategy=strategy_of(stage=2))
        assert not hybrid.is_initialized()
    # What torch itself leaves there until the first forward, and what it finds again.
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.LSTM(4, 4))
    hybrid.distributed_model(model, strategy=strategy_of(stage=3, offload="parameters"))
    hybrid.shutdown()


def test_other_views_of_a_parameter_are_refused() -> None:
    """A buffer or attribute over a weight's memory kept the weight's first values while the weight was trained."""
    run_plain(check_aliases)


class Named(nn.Parameter):
    pass


def check_on_the_host() -> None:
    named = nn.Linear(4, 4)
    named.weight = Named(named.weight.detach())
    scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 1))
    for model, words in ((named, "'weight' is of class Named"), (scripted, "module '0' is TorchScript")):
        with pytest.raises(hybrid.ModelError, match=words):
            hybrid.distributed_model(model, strategy=strategy_of(stage=3, offload="parameters"))
        assert not hybrid.is_initialized()
    plain = nn.Linear(4, 4)
    model = hybrid.distributed_model(nn.Linear(4, 4), strategy=strategy_of(stage=3, offload="parameters"))
    model.load_state_dict(plain.state_dict())
    assert_weights(model, weights_of(plain), 0.0)
    hybrid.shutdown()


def test_parameters_on_the_host_alone_are_absent_too() -> None:
    """With `offload` "parameters" and one rank, whose parameters are freed like cut ones, TorchScript ended in a crash
    and a Parameter's own class was lost; both are refused at stage 3 by name.
    """
    run_plain(check_on_the_host)
