"""ZeRO stage 3 trains what plain torch trains, whatever shape the forward has and whatever happens between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.multi_rank.case_runs import assert_close, assert_weights, own_part, seeded, variant, weights_of, wrapped
from tests.ranks import run_ranks

WIDTH, SAMPLES = 6, 12
TOLERANCE = 1e-12  # fp64


class Block(nn.Module):
    """The repeated layer: a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.tanh(self.inner(inputs)) * self.scale


class Stack(nn.Module):
    """Blocks between a first and a last layer, which lie around them."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


Loop = Callable[[Any, Any, torch.Tensor, torch.Tensor], Any]


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build().double()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(9)
    shape = (SAMPLES, WIDTH)
    return torch.randn(shape, generator=generator).double(), torch.randn(shape, generator=generator).double()


def plain_steps(model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    for _ in range(3):
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def check(build: Callable[[], nn.Module], loop: Loop = plain_steps, **settings: Any) -> None:
    """Run `loop` in plain torch on the whole batch and under a strategy on the own part; weights must agree."""
    inputs, targets = batch()
    plain = built(build)
    wanted = loop(plain, sgd(plain.parameters()), inputs, targets)
    with variant(**{"stage": 3, "bucket_bytes": 200, "timeout_seconds": 6, **settings}) as strategy:
        model, optimizer = wrapped(built(build), sgd, strategy)
        got = loop(model, optimizer, own_part(inputs), own_part(targets))
        if isinstance(wanted, torch.Tensor):
            mean = got.detach().clone()
            dist.all_reduce(mean)
            assert_close(mean / dist.get_world_size(), wanted, TOLERANCE, "loss")
        assert_weights(model, weights_of(plain), TOLERANCE)


# ---- the shape of the forward ------------------------------------------------------------------------------------


class ReturnsParameter(nn.Module):
    """A unit whose output is its own parameter, which the parent multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self) -> torch.Tensor:
        return self.gate[:]


class Gated(Stack):
    def __init__(self) -> None:
        super().__init__(ReturnsParameter)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = torch.tanh(hidden * block())
        return self.last(hidden)


class Skipped(Block):
    """A unit that may leave its input as it is, the same tensor object (stochastic depth)."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        Skipped.count += 1
        self.skip = Skipped.count % 2 == 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs if self.skip else super().forward(inputs)


class Detached(nn.Module):
    """A unit that reads its weight once more without a gradient: needed after the gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(torch.tanh(functional.linear(inputs, self.weight.detach())), self.weight)


class ParentReads(Stack):
    """The parent reads parameters of its units, before and after they have run."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs) @ self.blocks[2].inner.weight
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden * self.blocks[0].scale)


class TiedUnits(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].inner.weight = self.blocks[0].inner.weight
        self.last.weight = self.blocks[1].inner.weight


class UsedTwice(Stack):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for index in (0, 1, 0, 2, 3, 1):
            hidden = self.blocks[index](hidden)
        return self.last(hidden)


def skipping() -> nn.Module:
    Skipped.count = 0
    return Stack(Skipped)


def detached() -> nn.Module:
    return Stack(Detached)


SHAPES = [Stack, Gated, skipping, detached, ParentReads, TiedUnits, UsedTwice]


def check_prefetches(build: Callable[[], nn.Module]) -> None:
    for prefetch in (1, 0, 3):
        check(build, prefetch=prefetch)
    check(build, reshard_after="run")


@pytest.mark.parametrize("build", SHAPES)
def test_shape_of_the_forward(build: Callable[[], nn.Module]) -> None:
    """Weights after three steps are those of plain torch, however far ahead units are gathered, and how long kept."""
    run_ranks(check_prefetches, 2, build, timeout_seconds=20)


# ---- the loop ------------------------------------------------------------------------------------------------------


def two_losses_two_backwards(model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    for _ in range(2):
        one = functional.mse_loss(model(inputs), targets)
        other = model(inputs * 2).square().mean()
        one.backward()
        other.backward()
        optimizer.step()
        optimizer.zero_grad()


def same_graph_twice(model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    loss = functional.mse_loss(model(inputs), targets)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def gradient_penalty(model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    for _ in range(2):
        leaf = inputs.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
        (slope.square().mean() + functional.mse_loss(model(inputs), targets)).backward()
        optimizer.step()
        optimizer.zero_grad()


def input_gradient(model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    leaf = inputs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(leaf).square().sum(), leaf)
    functional.mse_loss(model(inputs + 0.1 * slope.sign()), targets).backward()
    optimizer.step()


def unit_by_itself(model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    functional.mse_loss(model.blocks[1](inputs), targets).backward()
    optimizer.step()


def sum_of_two_forwards(model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    for _ in range(2):
        (functional.mse_loss(model(inputs), targets) + model(inputs * 2).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def check_both(build: Callable[[], nn.Module], loop: Loop) -> None:
    check(build, loop)
    check(build, loop, reshard_after="run")


LOOPS = [
    two_losses_two_backwards,
    same_graph_twice,
    gradient_penalty,
    input_gradient,
    unit_by_itself,
    sum_of_two_forwards,
]


@pytest.mark.parametrize("build", [Stack, ParentReads, TiedUnits])
@pytest.mark.parametrize("loop", LOOPS)
def test_loop(build: Callable[[], nn.Module], loop: Loop) -> None:
    """Several graphs alive at once, graphs used twice, gradients of gradients, of inputs, of one unit alone."""
    run_ranks(check_both, 2, build, loop, timeout_seconds=20)
