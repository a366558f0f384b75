"""On the meta device: what has its values keeps them, and what cannot be initialised is refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hybrid
from tests.multi_rank.meta_models import SEED, STAGES, Tied, everything, on_meta, strategy
from tests.ranks import run_ranks

# ---- partly on meta ----------------------------------------------------------------------------------------------


class Partly(nn.Module):
    """A backbone with trained values, and a new head; one module has some of each."""

    def __init__(self, on: str) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        with torch.no_grad():
            self.backbone[0].weight.fill_(5.0)
            self.backbone[1].running_mean.fill_(6.0)
        with torch.device(on):
            self.head = nn.Linear(4, 3)
            self.norm = nn.BatchNorm1d(3)
            self.mixed = nn.Linear(4, 2)
        self.mixed.weight = nn.Parameter(torch.full((2, 4), 7.0))
        self.norm.running_var = torch.full((3,), 8.0)

    def _init_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.uniform_(parameter, 1, 2)


def partly() -> None:
    for stage in STAGES:
        for order in ("replay", "by_name"):
            for o2 in (False, True):
                torch.manual_seed(SEED)
                model = Partly("meta")
                backbone = {name: value.clone() for name, value in model.backbone.state_dict().items()}
                model = hybrid.distributed_model(model, strategy=strategy(stage, o2=o2), init=order)
                got = everything(model)
                what = f"stage {stage}, {order}, O2 {o2}"
                for name, value in backbone.items():
                    assert torch.equal(got[f"backbone.{name}"], value), (what, name, got[f"backbone.{name}"])
                assert bool((got["mixed.weight"] == 7.0).all()), (what, got["mixed.weight"])
                assert got["norm.running_var"].tolist() == [8.0] * 3, what
                assert got["norm.running_mean"].tolist() == [0.0] * 3, what
                for name in ("head.weight", "head.bias", "mixed.bias", "norm.weight"):
                    assert bool(((got[name] >= 1) & (got[name] < 2)).all()), (what, name, got[name])
                hybrid.shutdown()


def test_what_has_its_values_keeps_them() -> None:
    run_ranks(partly, 2)


# ---- refusals ----------------------------------------------------------------------------------------------------


class Drawn(nn.Module):
    """What its constructor does by hand: three things that nothing can repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.token, self.scale = nn.Parameter(torch.randn(3)), nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.angles = [torch.arange(4.0)]


class OneWeight(nn.Module):
    """`reset_parameters` is given from outside."""

    reset: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.empty(4, 3)), nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            type(self).reset(self)


def half(module: Any) -> None:
    module.weight[:2].normal_()
    module.other.zero_()


def two_passes(module: Any) -> None:
    module.weight.normal_()
    module.other.zero_()
    module.weight.mul_(2)


def two_passes_by_data(module: Any) -> None:
    data = module.weight.data
    data.normal_()
    module.other.zero_()
    data.mul_(2)


def from_another(module: Any) -> None:
    module.other.fill_(2.0)
    module.weight.copy_(module.other.sum().expand(4, 3))
    module.other.add_(module.weight.sum())


def replaces(module: Any) -> None:
    module.weight = nn.Parameter(torch.zeros(2, 2))
    module.other.zero_()


def raises(module: Any) -> None:
    module.other.zero_()
    raise RuntimeError("no luck today")


REFUSED: dict[str, tuple[Any, str]] = {
    "half": (half, r"'weight' left 6 of 12 elements without a value"),
    "two passes": (two_passes, r"'weight' left 12 of 12|'weight' left \d+ of 12|parameter 'weight'"),
    "two passes, by .data": (two_passes_by_data, r"'weight' went on after other parameters were used"),
    "from another": (from_another, r"'(weight|other)' left \d+ of \d+ elements without a value"),
    "replaces": (replaces, r"put other parameters in the place of \['weight'\]"),
    "raises": (raises, r"no luck today"),
}


def refused() -> None:
    for stage in (0, 3):
        for order in ("replay", "by_name"):
            wanted = r"parameter 'token' of Drawn, parameter 'scale' of Drawn, buffer 'table' of Drawn, buffer 'mask'"
            with pytest.raises(hybrid.ModelError, match=wanted):
                hybrid.distributed_model(on_meta(Drawn), strategy=strategy(stage), init=order)
            hybrid.shutdown()
            with pytest.raises(hybrid.ModelError, match=r"'angles'.*neither parameter nor buffer"):
                hybrid.distributed_model(on_meta(Attribute), strategy=strategy(stage), init=order)
            hybrid.shutdown()
            for name, (reset, message) in REFUSED.items():
                OneWeight.reset = reset
                model = on_meta(OneWeight)
                caught = None
                try:
                    hybrid.distributed_model(model, strategy=strategy(stage), init=order)
                except (hybrid.ModelError, RuntimeError) as error:
                    caught = str(error)
                assert re.search(message, caught or "not refused"), (name, order, stage, caught)
                dist.barrier()  # all ranks came here
                hybrid.shutdown()
    for order in ("replay", "by_name"):
        with pytest.raises(hybrid.ModelError, match=rf"init = '{order}' is for models built on the meta device"):
            hybrid.distributed_model(nn.Linear(2, 2), strategy=strategy(0), init=order)
        hybrid.shutdown()
    with pytest.raises(hybrid.ModelError, match=r"init = 'magic': must be 'replay' or 'by_name'"):
        hybrid.distributed_model(on_meta(Tied), strategy=strategy(0), init="magic")
    hybrid.shutdown()


def test_what_cannot_be_repeated_is_refused_by_name() -> None:
    run_ranks(refused, 3, timeout_seconds=40)


def fails_on_one(module: Any) -> None:
    module.weight.normal_()
    module.other.zero_()
    if dist.get_rank() == 1:
        raise RuntimeError("only here")


def failing_alone() -> None:
    OneWeight.reset = fails_on_one
    kind = RuntimeError if dist.get_rank() == 1 else hybrid.ModelError
    with pytest.raises(kind, match=r"^only here$" if dist.get_rank() == 1 else r"rank 1 could not.*only here"):
        hybrid.distributed_model(on_meta(OneWeight), strategy=strategy(3))


def test_an_initialisation_that_fails_on_one_rank_fails_on_all() -> None:
    run_ranks(failing_alone, 3)
