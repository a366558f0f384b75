"""A stage sends its input's gradient before it computes what only its weights need, and nothing else changes by it.

Where that would cost memory, or somebody looks at the backward from inside, the products are computed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hybrid
from hybrid.later_products import LaterProducts
from hybrid.pipeline.transport import Transport
from hybrid.sharding import gradient_sink
from tests.pipeline_models import own, pipeline_variant
from tests.ranks import run_ranks

WIDTH, SAMPLES, LAYERS, MICRO_BATCHES, STEPS = 8, 24, 4, 3, 2


class Layer(nn.Module):
    """One matrix, used `uses` times."""

    def __init__(self, *, uses: int = 1) -> None:
        super().__init__()
        self.linear, self.uses = nn.Linear(WIDTH, WIDTH), uses

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for _ in range(self.uses):
            value = torch.tanh(self.linear(value))
        return value


class Recomputed(Layer):
    """Its activations are computed again in backward, whatever the strategy says."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value if value.requires_grad else value.detach().requires_grad_()
        result: torch.Tensor = checkpoint(super().forward, value, use_reentrant=self.uses > 1)
        return result


class Penalised(Layer):
    """A backward inside its forward, which the one that counts goes through as well."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value if value.requires_grad else value.detach().requires_grad_()
        output = super().forward(value)
        (slope,) = torch.autograd.grad(output.square().sum(), [value], create_graph=True)
        return output + slope


class Asking(Layer):
    """The matrix also meets a view of a parameter, which at stage 3 is gone when its unit has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(value) + self.linear(self.queries.unsqueeze(0)).mean(1))


def chain(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(LAYERS)))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, WIDTH, generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Events:
    """What this rank does, in order: "send" of a gradient, "now" and "later" for a product."""

    def __enter__(self) -> list[str]:
        seen: list[str] = []
        self._usual = Transport.send_gradients, gradient_sink._add, gradient_sink._LEAST_ELEMENTS
        running = False

        def send(*args: Any) -> None:
            seen.append("send")
            self._usual[0](*args)

        def add(*args: Any) -> None:
            seen.append("later" if running else "now")
            self._usual[1](*args)

        def run(later: LaterProducts) -> None:
            nonlocal running
            running = True
            self._run(later)
            running = False

        self._run = LaterProducts.run
        Transport.send_gradients, gradient_sink._add = send, add  # type: ignore[assignment, method-assign]
        LaterProducts.run, gradient_sink._LEAST_ELEMENTS = run, 1  # type: ignore[method-assign]
        return seen

    def __exit__(self, *error: object) -> None:
        Transport.send_gradients, gradient_sink._add, gradient_sink._LEAST_ELEMENTS = self._usual  # type: ignore[method-assign]
        LaterProducts.run = self._run  # type: ignore[method-assign]


def trained(kind: Callable[[], nn.Module], prepare: Callable[[nn.Module], None], **settings: Any) -> list[str]:
    """Train as one process would; returns what this rank did in one step."""
    plain = chain(kind)
    prepare(plain)
    optimizer = sgd(plain)
    for step in range(STEPS):
        inputs, labels = batch(step)
        functional.mse_loss(plain(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    with Events() as seen, pipeline_variant(2, mb=MICRO_BATCHES, **settings) as strategy:
        model: Any = chain(kind)
        prepare(model)
        model = hybrid.distributed_model(model, strategy=strategy)
        staged: Any = hybrid.distributed_optimizer(sgd(model))
        for step in range(STEPS):
            seen.clear()
            model.train_batch(own(batch(step)), staged, loss_fn=functional.mse_loss)
        weights = model.full_state_dict()
    for fqn, value in plain.state_dict().items():
        torch.testing.assert_close(weights[fqn], value, msg=lambda text, fqn=fqn: f"{fqn}: {text}")
    return seen


def watch(model: nn.Module) -> None:
    """The last layer's weight is looked at, on whatever rank it is."""
    last: Any = list(model)[-1]  # type: ignore[call-overload]
    last.linear.weight.register_hook(lambda gradient: gradient * 2)


def ordinary() -> None:
    """The last stage has two layers; the first has nobody to send to."""
    rank = torch.distributed.get_rank()
    each = ["send", "later", "later"] if rank == 1 else ["now", "now"]
    assert trained(Layer, lambda model: None) == each * MICRO_BATCHES
    each = ["send", "later", "later", "later", "later"] if rank == 1 else ["now"] * 4
    assert trained(lambda: Layer(uses=2), lambda model: None) == each * MICRO_BATCHES
    if rank == 1:
        assert trained(Layer, watch) == ["send", "later"] * MICRO_BATCHES
        return
    trained(Layer, watch)


def at_once() -> None:
    """Where memory would grow, and where a backward is differentiated."""
    rank = torch.distributed.get_rank()
    each = ["now", "now", "send"] if rank == 1 else ["now", "now"]
    assert trained(Recomputed, lambda model: None) == each * MICRO_BATCHES
    assert trained(Layer, lambda model: None, recompute="full") == each * MICRO_BATCHES
    twice = ["now"] * 4 + ["send"] if rank == 1 else ["now"] * 4
    assert trained(lambda: Recomputed(uses=2), lambda model: None) == twice * MICRO_BATCHES
    trained(Penalised, lambda model: None)


def reduced_as_they_come() -> None:
    """Two data-parallel ranks: whole gradients of one layer at a time, where none are there before."""
    is_last = hybrid_stage() == 1
    each = ["now", "now", "send"] if is_last else ["now", "now"]
    for stage in (2, 3):
        seen = trained(Layer, lambda model: None, stage=stage, bucket_bytes=300, grad_reduce="every_micro_batch")
        assert seen == each * MICRO_BATCHES, seen
    for stage in (0, 1, 2, 3):
        seen = trained(Layer, lambda model: None, stage=stage, bucket_bytes=300, grad_reduce="last_micro_batch")
        assert seen == (["send", "later", "later"] if is_last else each) * MICRO_BATCHES, seen
    for schedule in ("1f1b", "zb-h1"):
        trained(
            Asking,
            lambda model: None,
            stage=3,
            bucket_bytes=300,
            grad_reduce="last_micro_batch",
            schedule=schedule,
        )


def hybrid_stage() -> int:
    return torch.distributed.get_rank() // 2


def test_the_gradient_of_the_input_leaves_first() -> None:
    run_ranks(ordinary, 2)


def test_products_are_computed_at_once_where_they_must() -> None:
    run_ranks(at_once, 2)


def test_gradients_that_are_reduced_as_they_come() -> None:
    run_ranks(reduced_as_they_come, 4)
