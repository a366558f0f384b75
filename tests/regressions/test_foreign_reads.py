"""Cut weights in the hands of code that is not their layer's."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import ONE_STEP, assert_close, assert_weights, seeded, weights_of
from tests.ranks import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.fc2(torch.relu(self.fc1(hidden)))
        return result


class Net(nn.Module):
    """Two blocks between an embedding and what `head` makes of the last values."""

    def __init__(self, head: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(91)
        self.embed_tokens, self.layers = nn.Embedding(11, 6), nn.ModuleList([Block(), Block()])
        self.head = head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self, hidden)


def tied(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(hidden, model.embed_tokens.weight).softmax(-1).square().mean()


def with_norm(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden.square().mean() + model.layers[0].fc1.weight.norm()


def with_squares(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    penalty: torch.Tensor = sum(parameter.square().sum() for parameter in model.parameters())  # type: ignore[assignment]
    return hidden.square().mean() + 0.1 * penalty


def plain_mean(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    weight = model.layers[0].fc1.weight
    model.seen = weight.detach().norm(), weight.dtype, weight.shape  # these give no gradient
    return hidden.square().mean()


class Marked(torch.Tensor):
    """A class of one's own, with torch's default answer to operations."""


def logging(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What is looked at with gradients on, and comes to no loss."""
    weight = model.layers[0].fc1.weight
    model.seen = [weight.norm().item(), weight.view(-1).shape, weight[0].tolist(), hidden.to(weight), copy.copy(weight)]
    model.average = {name: parameter.clone().detach() for name, parameter in model.named_parameters()}
    torch.zeros_like(weight, requires_grad=True)
    nn.Parameter(weight).square().sum().backward()  # another parameter, which nobody watches
    with torch.no_grad():
        torch.ones(1, 6).as_subclass(Marked) @ weight.T
    assert type(pickle.loads(pickle.dumps(weight))) is type(copy.deepcopy(weight)) is nn.Parameter
    return hidden.square().mean()


def with_sum_in_place(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(model.layers[0].fc1.weight)
    total[:] = model.layers[0].fc1.weight
    return hidden.square().mean() + total.square().sum().sqrt()


def with_a_class(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    seen = functional.linear(torch.ones(1, 6).as_subclass(Marked), model.layers[0].fc1.weight)
    return hidden.square().mean() + seen.as_subclass(torch.Tensor).square().mean().sqrt()


def train(model: Any, optimizer: torch.optim.Optimizer, penalty: Callable[[Any], Any]) -> torch.Tensor:
    ids = torch.randint(11, (4, 5), generator=seeded(92))
    for _ in range(2):
        loss: torch.Tensor = model(ids) + penalty(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def run(stage: int, head: Any, penalty: Any, plan: dict[str, str] | None) -> tuple[Any, torch.Tensor]:
    strategy = hybrid.DistributedStrategy(timeout_seconds=20, sharding=True, sharding_configs={"stage": stage})
    strategy.tensor_parallel = True
    strategy.tensor_parallel_configs = {"degree": 2, "plan": plan} if plan else {"degree": 2}
    model = hybrid.distributed_model(Net(head), strategy=strategy)
    optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return model, train(model, optimizer, penalty)


def nothing(model: Any) -> float:
    return 0.0


def norm(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.layers[0].fc1.weight.norm()
    return found


def check_refused() -> None:
    cases = [(head, nothing) for head in (tied, with_norm, with_squares, with_sum_in_place, with_a_class)]
    for stage in (0, 3):
        for head, penalty in (*cases, (plain_mean, norm)):
            plain = Net(head)
            wanted = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), penalty)
            if stage == 0 or penalty is nothing:
                words = r"code outside its layer computes with it \(.*test_foreign_reads.py:\d+; "
                with pytest.raises(hybrid.ModelError, match=words):
                    run(stage, head, penalty, None)
                hybrid.shutdown()
            if head is tied:  # what the message says
                model, loss = run(stage, head, penalty, {"embed_tokens": "replicated"})
                assert_close(loss, wanted, ONE_STEP, "loss")
                assert_weights(model, weights_of(plain), ONE_STEP)
                hybrid.shutdown()


def check_free_again() -> None:
    """Whatever comes to no loss may be done at any time; after the first step all is as it was."""
    plain = Net(plain_mean)
    wanted = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), nothing)
    for stage, head in ((0, plain_mean), (0, logging), (1, logging), (3, plain_mean), (3, logging)):
        model, loss = run(stage, head, nothing, None)
        assert_close(loss, wanted, ONE_STEP, "loss")
        assert_weights(model, weights_of(plain), ONE_STEP)
        with model.gather_parameters():
            copies = [copy.deepcopy(parameter) for parameter in model.parameters()]
        assert all(type(parameter) is nn.Parameter for parameter in copies)
        kept = list(model.parameters()) if stage == 0 else []
        del model
        gc.collect()
        assert all(type(parameter) is nn.Parameter for parameter in kept)
        hybrid.shutdown()


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return weight.square().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (weight,) = ctx.saved_tensors
        return 2 * weight * gradients[0]


def check_later() -> None:
    """After the first update, in evaluation before it, by functions that operations know nothing of."""
    words = r"'layers.0.fc1.weight' is cut over 2 .* computes with it \(.*test_foreign_reads.py:\d+; "
    for penalty in (torch.linalg.matrix_norm, Squares.apply, nn.utils.parameters_to_vector):
        model, _ = run(0, plain_mean, nothing, None)
        weight = model.layers[0].fc1.weight
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long))
        with pytest.raises(hybrid.ModelError, match=words):
            penalty([weight] if penalty is nn.utils.parameters_to_vector else weight).sum().backward()
        hybrid.shutdown()


def scores(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(hidden, model.embed_tokens.weight)


def by_vmap(model: Any, hidden: torch.Tensor) -> Any:
    return torch.func.vmap(model.layers[0])(hidden)


def by_jvp(model: Any, hidden: torch.Tensor) -> Any:
    return torch.func.jvp(model.layers[0], (hidden,), (torch.ones_like(hidden),))[1]


def by_grad(model: Any, hidden: torch.Tensor) -> Any:
    return torch.func.grad(lambda x: model.layers[0](x).sum())(hidden)


def check_at_once() -> None:
    """What torch, or a loss on scores of half the vocabulary, would end with before a backward comes."""
    transforms = "'layers.0.fc1' is cut over 2 .* inside torch.func .*; or leave the layer whole"
    for head, words in ((scores, "computes with it"), *((one, transforms) for one in (by_vmap, by_jvp, by_grad))):
        strategy = hybrid.DistributedStrategy(timeout_seconds=20, tensor_parallel=True)
        strategy.tensor_parallel_configs = {"degree": 2, "verify": False}
        model = hybrid.distributed_model(Net(head), strategy=strategy)
        ids = torch.zeros(2, 3, dtype=torch.long)
        with torch.set_grad_enabled(head is not scores), pytest.raises(hybrid.ModelError, match=words):
            model(ids)
        hybrid.shutdown()


def check_elsewhere(*, pipeline: bool, compiled: bool) -> None:
    strategy = hybrid.DistributedStrategy(timeout_seconds=4, tensor_parallel=True)
    strategy.tensor_parallel_configs = {"degree": 2, "plan": {"*.fc1": "colwise", "*.fc2": "rowwise"}}
    if pipeline:
        strategy.pipeline, strategy.pipeline_configs = True, {"degree": 2, "accumulate_steps": 2}
    if compiled:
        strategy.compile, strategy.compile_configs = True, {"backend": "eager"}
    torch.manual_seed(93)
    model: Any = hybrid.distributed_model(nn.Sequential(Block(), Block()), strategy=strategy)
    optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(4, 6, generator=seeded(94)), torch.randn(4, 6, generator=seeded(95))

    def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output, labels) + model[1].fc1.weight.norm()

    for _ in range(2):
        model.train_batch(batch, optimizer, loss_fn=functional.mse_loss)
    is_last = hybrid.get_mesh().coordinate("pp") == int(pipeline)
    with pytest.raises(hybrid.ModelError if is_last else hybrid.HybridError, match="'1.fc1.weight'" if is_last else ""):
        model.train_batch(batch, optimizer, loss_fn=loss_fn)


def test_computing_with_a_part_of_a_weight_is_refused() -> None:
    """A head by `F.linear` over the embedding's weight, or a penalty on weights, took this rank's part for the whole.

    Losses and gradients were those of another model, alike on no two ranks, and nothing was said.
    """
    run_ranks(check_refused, 2)


def test_other_reads_of_a_cut_weight_are_free() -> None:
    run_ranks(check_free_again, 2)


def test_products_and_transforms_are_refused_where_they_run() -> None:
    """A head by `F.linear` ended in an IndexError of the loss, or in evaluation in scores of a part of the vocabulary;
    torch.func in what torch says of autograd functions."""
    run_ranks(check_at_once, 2)


def test_it_is_refused_at_any_time() -> None:
    """Only the first step was watched, and operations only: a penalty from step 100 on was one on this rank's part."""
    run_ranks(check_later, 2)


@pytest.mark.parametrize(("pipeline", "compiled"), [(True, False), (False, True)])
def test_it_is_refused_beside(pipeline: bool, compiled: bool) -> None:
    """Pipelines and compiled units were not watched at all."""
    run_ranks(check_elsewhere, 4 if pipeline else 2, pipeline=pipeline, compiled=compiled)
