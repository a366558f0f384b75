"""Under a pipeline a loss function runs where the last layers are, and may look for the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import SEVERAL_STEPS, assert_close, assert_weights, seeded, weights_of
from tests.ranks import RankFailure, run_ranks

WIDTH = 6


class Stack(nn.Module):
    """No chain: cut by its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def chain() -> nn.Module:
    return nn.Sequential(*Stack().layers)


def everything(model: Any, before: list[nn.Parameter]) -> Any:
    return sum(parameter.square().sum() for parameter in model.parameters())


def all_from_before(model: Any, before: list[nn.Parameter]) -> Any:
    return sum(parameter.square().sum() for parameter in before)


def all_layers(model: Any, before: list[nn.Parameter]) -> Any:
    layers = model if isinstance(model, nn.Sequential) else model.layers
    return sum(module.weight.norm() for module in layers.modules() if isinstance(module, nn.Linear))


def the_last(model: Any, before: list[nn.Parameter]) -> Any:
    return (model if isinstance(model, nn.Sequential) else model.layers)[-1].weight.norm()


def the_first(model: Any, before: list[nn.Parameter]) -> Any:
    return (model if isinstance(model, nn.Sequential) else model.layers)[0].weight.norm()


def count(model: Any, before: list[nn.Parameter]) -> Any:
    return torch.tensor(sum(parameter.numel() for parameter in model.parameters()))


def on_its_device(model: Any, before: list[nn.Parameter]) -> Any:
    first = next(model.parameters())
    return torch.ones((), device=first.device, dtype=first.dtype)


Penalty = Callable[[Any, list[nn.Parameter]], Any]


def train(build: Callable[[], nn.Module], penalty: Penalty, *, pipeline: bool) -> Any:
    torch.manual_seed(1)
    model: Any = build()
    before = list(model.parameters())
    optimizer: Any = torch.optim.SGD(before, lr=0.1)
    batch = torch.randn(4, WIDTH, generator=seeded(2)), torch.randn(4, WIDTH, generator=seeded(3))

    def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = functional.mse_loss(output, labels) + 0.1 * penalty(model, before)
        return loss

    if pipeline:
        strategy = hybrid.DistributedStrategy(timeout_seconds=20, pipeline=True)
        strategy.pipeline_configs = {"degree": 2, "accumulate_steps": 2}
        sample = batch[0][:2] if build is Stack else None
        model = hybrid.distributed_model(model, strategy=strategy, sample=sample)
        optimizer = hybrid.distributed_optimizer(optimizer)
    losses = []
    for _ in range(2):
        if pipeline:
            losses.append(model.train_batch(batch, optimizer, loss_fn=loss_fn).loss.item())
            continue
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def check_allowed() -> None:
    for build, penalty in itertools.product((chain, Stack), (the_last, on_its_device)):
        plain, wanted = train(build, penalty, pipeline=False)
        model, losses = train(build, penalty, pipeline=True)
        assert_close(losses, wanted, SEVERAL_STEPS, "losses")
        assert_weights(model, weights_of(plain), SEVERAL_STEPS)
        hybrid.shutdown()


@pytest.mark.parametrize("build", [chain, Stack])
@pytest.mark.parametrize(
    ("penalty", "words"),
    [
        (everything, r"the first of model.parameters\(\) is on another stage of the pipeline, and has no values"),
        (count, "goes through the modules or parameters of the model .* is on another stage of the pipeline"),
        (all_layers, "goes through the modules or parameters of the model .* is on another stage of the pipeline"),
        (all_from_before, r"parameter '(layers\.)?0.weight' is on pipeline stage 0, and has no values on this rank"),
    ],
)
def test_a_loss_over_all_parameters_is_refused(build: Any, penalty: Penalty, words: str) -> None:
    """It was one over the parameters of the last stage, without a word."""
    with pytest.raises(RankFailure, match=words):
        run_ranks(train, 2, build, penalty, pipeline=True)


def test_a_loss_that_reads_another_stage_is_told_where_that_is() -> None:
    with pytest.raises(RankFailure, match="'weight' is no attribute here: layer '0' is on pipeline stage 0"):
        run_ranks(train, 2, chain, the_first, pipeline=True)


def test_a_loss_may_read_the_last_layers_and_ask_for_a_device() -> None:
    run_ranks(check_allowed, 2)
