"""What a model may be made of, at stages 0 to 3: one process and two ranks give the same losses and weights.

Several models train in one world; each stage starts from the same weights. The rules are in docs/models.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from hybrid.collectives.deferred import deferred_backend
from tests.multi_rank.case_runs import (
    SEVERAL_STEPS,
    assert_close,
    assert_weights,
    own_part,
    variant,
    weights_of,
    wrapped,
)
from tests.ranks import run_ranks

WIDTH, STEPS = 6, 3

Part = Callable[[torch.Tensor], torch.Tensor]
Loop = Callable[[Any, Any, Part], list[float]]


def rows(seed: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(seed))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def steps(model: Any, optimizer: Any, part: Part, *, count: int = STEPS) -> list[float]:
    """The loop of most models; losses are this rank's."""
    losses = []
    for step in range(count):
        loss = model(part(rows(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_as_plain(build: Callable[[], nn.Module], loop: Loop, *, stages: tuple[int, ...], deferred: bool) -> None:
    """On each rank: plain torch on the whole batch, then each stage on this rank's rows."""

    def built() -> nn.Module:
        torch.manual_seed(3)
        return build()

    plain = built()
    wanted = loop(plain, sgd(plain.parameters()), lambda tensor: tensor)
    for stage in stages:
        with deferred_backend() if deferred else nullcontext(), variant(stage=stage, bucket_bytes=200) as strategy:
            model, optimizer = wrapped(built(), sgd, strategy)
            losses = torch.tensor(loop(model, optimizer, own_part), dtype=torch.float64)
            dist.all_reduce(losses)
            assert_close(
                losses / dist.get_world_size(), torch.tensor(wanted, dtype=torch.float64), SEVERAL_STEPS, "loss"
            )
            assert_weights(model, weights_of(plain), SEVERAL_STEPS)


# -- sizes, layouts, containers ----------------------------------------------------------------------------------


class Sizes(nn.Module):
    """Parameters without an element, of no dim, of fewer elements than ranks, in a bucket of nothing else too."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(3, 0))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Gain() for _ in range(2))
        self.empty = nn.ModuleList(Nothing() for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs * self.scale + self.one + self.nothing.sum()
        for block in (*self.blocks, *self.empty):
            hidden = block(hidden)
        return hidden


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(inputs) * self.gain


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.nothing.sum()


class Layouts(nn.Module):
    """Channels last, transposed, permuted, and every second column of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(2, 2, (1, 2)).to(memory_format=torch.channels_last) for _ in range(2))
        self.transposed = nn.Parameter(torch.randn(5, 2).t())
        self.permuted = nn.Parameter(torch.randn(2, 5, 3).permute(2, 0, 1))
        self.strided = nn.Parameter(torch.randn(4, 8)[:, ::2])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.view(-1, 2, 1, 3)
        for conv in self.convs:
            hidden = torch.tanh(conv(hidden))
        mixed = hidden.flatten(1) @ self.transposed
        return mixed * self.permuted.square().mean() + self.strided.sin().mean()


class Lists(nn.Module):
    """ParameterList and ParameterDict, in the model and in its blocks; a block called by keyword only."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(WIDTH)), "shift": nn.Parameter(torch.zeros(1))})
        self.blocks = nn.ModuleList(ListBlock() for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = (inputs + sum(self.vectors)) * self.named["scale"] + self.named["shift"]
        for block in self.blocks:
            hidden = block(hidden=hidden)["hidden"]
        return hidden


class ListBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(2))

    def forward(self, *, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        for matrix in self.matrices:
            hidden = torch.tanh(hidden @ matrix)
        return {"hidden": hidden}


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).t()

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu()


def parametrized() -> nn.Module:
    """Weight norm, spectral norm (its vectors are buffers), and a parametrization of one's own."""
    kinds = (parametrizations.weight_norm, parametrizations.spectral_norm)
    layers = [kinds[index % 2](nn.Linear(WIDTH, WIDTH)) for index in range(4)]
    parametrize.register_parametrization(layers[0], "bias", nn.Tanh(), unsafe=True)
    last = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(last, "weight", Symmetric())
    return nn.Sequential(*layers, last)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList(nn.LSTM(3, 3, batch_first=True) for _ in range(2))
        self.gru = nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.bag = nn.EmbeddingBag(9, 3, sparse=True, mode="sum")
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.view(-1, 2, 3)
        for layer in self.stack:
            hidden = layer(hidden)[0]
        hidden = hidden + self.bag((inputs.abs() * 3).long().clamp(max=8))[:, None]
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        return self.gru(hidden)[0]


class Waves(nn.Module):
    """Complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.spectrum = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        waves = self.first(inputs) * self.spectrum
        return (waves + waves @ self.matrix).abs()


# -- loops --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.tanh(self.linear(self.norm(inputs)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def decode(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.last(hidden)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(inputs))


def graphs(model: Any, optimizer: Any, part: Part) -> list[float]:
    """A retained graph; a penalty on the gradient of the input; gradients of parameters by autograd.grad, and of a
    sum with them; backward to some parameters only; methods other than forward."""
    losses = []
    for step in range(2):
        inputs = part(rows(step)).requires_grad_()
        output = model(inputs)
        first, second = output.square().mean(), output.sin().mean()
        first.backward(retain_graph=True)
        second.backward()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        slope.square().sum(1).mean().backward()
        third = model.decode(model.encode(part(rows(9)))).square().mean()
        found = torch.autograd.grad(third, [model.last.weight, model.blocks[0].linear.weight], create_graph=True)
        (third + sum(gradient.sum() for gradient in found)).backward()
        model(part(rows(8))).square().mean().backward(inputs=[model.first.bias, model.blocks[1].norm.weight])
        optimizer.step()
        optimizer.zero_grad()
        losses += [first.item() + second.item(), third.item()]
    return losses


def hooks(model: Any, optimizer: Any, part: Part) -> list[float]:
    """Of the user: on a parameter's gradient, on modules before and after forward and backward, reading a weight."""
    seen: list[float] = []
    model.last.weight.register_hook(lambda gradient: gradient * 0.5)
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))
    model.blocks[1].register_forward_hook(lambda module, args, output: output * 1.1)
    model.blocks[1].register_forward_hook(lambda module, *_: seen.append(module.norm.weight.detach().sum().item()))
    model.blocks[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    model.last.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))
    losses = steps(model, optimizer, part)
    assert len(seen) == STEPS
    return losses + seen


def freezing(model: Any, optimizer: Any, part: Part) -> list[float]:
    """Parts are frozen and trained again while training goes on; momentum stands still meanwhile."""
    losses = []
    model.blocks[1].requires_grad_(False)
    for step in range(6):
        if step == 2:
            model.blocks[1].requires_grad_(True)
            model.first.weight.requires_grad_(False)
            model.blocks[0].requires_grad_(False)
        if step == 4:
            model.requires_grad_(True)
        losses += steps(model, optimizer, part, count=1)
    return losses


def transforms(model: Any, optimizer: Any, part: Part) -> list[float]:
    """torch.func over the model; at stage 3 inside gather_parameters."""
    losses = []
    for step in range(2):
        inputs = part(rows(step))
        with model.gather_parameters() if hasattr(model, "gather_parameters") else nullcontext():
            halved = {name: value.detach() / 2 for name, value in model.named_parameters()}

            def loss(values: dict[str, torch.Tensor], inputs: torch.Tensor = inputs) -> torch.Tensor:
                return torch.func.functional_call(model, values, (inputs,)).square().mean()

            losses.append(sum(g.sum().item() for g in torch.func.grad(loss)(halved).values()))
            slopes = torch.vmap(torch.func.jacrev(lambda row: model(row[None])[0]))(inputs)
            losses.append(slopes.mean().item())
        losses += steps(model, optimizer, part, count=1)
    return losses


CASES: dict[str, list[tuple[Callable[[], nn.Module], Loop]]] = {
    "sizes and layouts": [(Sizes, steps), (Layouts, steps), (Lists, steps), (Waves, steps)],
    "modules": [(parametrized, steps), (Recurrent, steps)],
    "loops": [(Stack, graphs), (Stack, hooks), (Stack, freezing), (Stack, transforms)],
}


def run_all(group: str, deferred: bool) -> None:
    for build, loop in CASES[group]:
        try:
            train_as_plain(build, loop, stages=(0, 1, 2, 3), deferred=deferred)
        except BaseException as error:
            error.add_note(f"{build.__name__}, {loop.__name__}")
            raise


@pytest.mark.parametrize("group", CASES)
def test_what_a_model_may_be_made_of(group: str) -> None:
    """BC-41, BC-44, BC-47, BC-50 and their kinds: right at every stage, without a registration call."""
    run_ranks(run_all, 2, group, group == "loops", timeout_seconds=60)
