"""Gradients that a layer's backward writes where they are to lie: the numbers of autograd, nothing counted twice.

A backward that is asked for something else, or that somebody watches, must leave the buckets alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hybrid
from hybrid.sharding import gradient_sink
from tests.cpu_products import small_products_by_onednn
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

WIDTH, VOCABULARY, STEPS = 8, 12, 3


class Model(nn.Module):
    """A padded table that is the head's weight too, a transposed weight, a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.blocks[1][0].weight = nn.Parameter(self.blocks[1][0].weight.detach().t().contiguous().t())
        self.no_bias = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.no_bias(self.no_bias(hidden)))


def tokens(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (8, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    return model(ids).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def built() -> Model:
    torch.manual_seed(5)
    return Model()


class Counted:
    """Counts what sinks take, and gives every matrix one."""

    def __enter__(self) -> Counted:
        self.taken = 0
        self._open, self._least = gradient_sink.BucketSink._open_view, gradient_sink._LEAST_ELEMENTS
        gradient_sink._LEAST_ELEMENTS = 1

        def counted(sink: Any) -> Any:
            self.taken += 1
            return self._open(sink)

        gradient_sink.BucketSink._open_view = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        gradient_sink.BucketSink._open_view = self._open  # type: ignore[method-assign]
        gradient_sink._LEAST_ELEMENTS = self._least


def trains_as_plain(by_onednn: bool) -> None:
    with small_products_by_onednn(by_onednn):
        _train_as_plain()


def _train_as_plain() -> None:
    plain = built()
    optimizer = sgd(plain.parameters())
    for step in range(STEPS):
        for part in tokens(step).chunk(2):
            (loss_of(plain, part) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in (0, 1, 2, 3):
        with Counted() as counted, variant(stage=stage, bucket_bytes=600) as strategy:
            model, optimizer = wrapped(built(), sgd, strategy)
            for step in range(STEPS):
                first, second = own_part(tokens(step)).chunk(2)
                with model.no_sync():
                    (loss_of(model, first) / 2).backward()
                (loss_of(model, second) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
            # Table, head, two blocks, and a layer twice: each of 2 backwards per step.
            assert counted.taken == STEPS * 2 * 6, counted.taken
            assert_weights(model, weights_of(plain), SEVERAL_STEPS)


@pytest.mark.parametrize("by_onednn", [False, True])
def test_it_trains_as_one_process(by_onednn: bool) -> None:
    run_ranks(trains_as_plain, 2, by_onednn)


def penalised(model: Model, inputs: torch.Tensor) -> torch.Tensor:
    """A loss with a penalty on the gradient of the input: the weight's second derivatives."""
    inputs = inputs.clone().requires_grad_()
    output = model.blocks[0][1](model.no_bias(model.blocks[0][0](inputs)))
    (slope,) = torch.autograd.grad(output.square().sum(), [inputs], create_graph=True)
    return output.square().mean() + slope.square().mean()


def other_backwards(stage: int) -> None:
    """What is asked for beside the backward that counts, and what is watched."""
    plain, rows = built(), torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    calls = {"plain": 0, "hybrid": 0}

    def watch(model: Any, name: str) -> None:
        model.blocks[0][0].weight.register_hook(lambda gradient: calls.update({name: calls[name] + 1}))

    watch(plain, "plain")
    penalised(plain, rows).backward()
    with Counted() as counted, variant(stage=stage) as strategy:
        model, _ = wrapped(built(), sgd, strategy)
        watch(model, "hybrid")
        inputs = own_part(rows).requires_grad_()
        product = model.no_bias(inputs).square().sum()
        torch.autograd.grad(product, [inputs], retain_graph=True)
        torch.autograd.grad(product, [model.no_bias.weight], retain_graph=True)
        product.backward(inputs=[inputs])
        assert counted.taken == 0, "a backward for something else came to the buckets"
        penalised(model, own_part(rows)).backward()
        assert calls["hybrid"] == calls["plain"] > 0, calls
        wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
        for name, gradient in model.named_gradients():
            if wanted[name] is not None:
                assert_close(gradient, wanted[name], SEVERAL_STEPS, name)
        copied = copy.deepcopy(model.no_bias)
        copied(torch.randn(2, WIDTH)).sum().backward()
        assert type(copied.weight.grad) is torch.Tensor, "the copy writes its gradient into the original's bucket"


@pytest.mark.parametrize("stage", [1, 2])
def test_a_backward_for_something_else_leaves_the_buckets_alone(stage: int) -> None:
    run_ranks(other_backwards, 2, stage)


def flops_under_recompute() -> None:
    counts = []
    for least in (2**30, 1):
        with Counted(), variant(stage=2) as strategy:
            gradient_sink._LEAST_ELEMENTS = least
            strategy.recompute = True
            model, _ = wrapped(nn.Sequential(*(Block() for _ in range(3))), sgd, strategy)
            with FlopCounterMode(display=False) as counter:
                model(torch.ones(4, 3, WIDTH)).sum().backward()
            counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0, counts


class Block(nn.Module):
    """Its last operation is a product, which a recompute need not repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs)))


def test_recompute_computes_no_more_than_without() -> None:
    run_ranks(flops_under_recompute, 2)


def edits_between() -> None:
    with Counted(), variant(stage=1) as strategy:
        model, _ = wrapped(built(), sgd, strategy)
        loss = loss_of(model, own_part(tokens(0)))
        with torch.no_grad():
            model.no_bias.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        hybrid.shutdown()


def test_a_weight_written_between_forward_and_backward_is_refused_as_in_plain_torch() -> None:
    run_ranks(edits_between, 1)
