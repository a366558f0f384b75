"""Steps of a pipeline that go wrong: what all ranks are told, and what is left for the next step."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from hybrid.collectives.point_to_point import Stream
from tests.multi_rank.test_collectives import shard_group
from tests.pipeline_models import pipeline_variant
from tests.ranks import RankFailure, run_ranks

WIDTH = 64


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


class Failing(nn.Linear):
    """Raises in one of its calls."""

    calls_left = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise ZeroDivisionError("this sample is broken")
        return super().forward(x)


def failing_chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Failing(WIDTH, WIDTH), Failing(WIDTH, WIDTH))


def plain_losses(seeds: list[int]) -> list[float]:
    model = failing_chain()
    optimizer, losses = sgd(model), []
    for inputs, labels in map(batch, seeds):
        loss = functional.mse_loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def goes_on_after_an_exception() -> None:
    """The first rank fails later than the second: what it has sent meanwhile nobody has taken."""
    wanted = plain_losses([0, 2, 3])
    for settings, calls in (
        ({"schedule": "gpipe"}, (3, 1)),
        ({"schedule": "1f1b"}, (2, 1)),
        ({"schedule": "1f1b"}, (4, 3)),
        ({"schedule": "gpipe", "stage": 3}, (4, 2)),
    ):
        with pipeline_variant(2, **settings) as strategy:
            model: Any = hybrid.distributed_model(failing_chain(), strategy=strategy)
            optimizer = hybrid.distributed_optimizer(sgd(model))

            def train(seed: int, model: Any = model, optimizer: Any = optimizer) -> float:
                return float(model.train_batch(batch(seed), optimizer, loss_fn=functional.mse_loss).loss)

            def fail(seed: int, *, call: int, model: Any = model, train: Any = train) -> None:
                model[dist.get_rank()].calls_left = call
                with pytest.raises(ZeroDivisionError):
                    train(seed)

            got = [train(0)]
            fail(1, call=calls[dist.get_rank()])
            got.append(train(2))
            evaluated = model.eval_batch(batch(3), loss_fn=functional.mse_loss).loss.item()
            assert abs(evaluated - wanted[2]) < 1e-5, (evaluated, wanted)
            fail(1, call=calls[dist.get_rank()])
            evaluated = model.eval_batch(batch(3), loss_fn=functional.mse_loss).loss.item()
            assert abs(evaluated - wanted[2]) < 1e-5, (evaluated, wanted)
            got.append(train(3))
            assert all(abs(one - other) < 1e-5 for one, other in zip(got, wanted, strict=True)), (got, wanted)


def losses_without_a_graph() -> None:
    with pipeline_variant(2) as strategy:
        model: Any = hybrid.distributed_model(failing_chain(), strategy=strategy)
        optimizer = hybrid.distributed_optimizer(sgd(model))

        def detached(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return functional.mse_loss(output.detach(), labels)

        with pytest.raises(hybrid.ModelError, match=r"4 micro-batches .* does not depend on anything"):
            model.train_batch(batch(0), optimizer, loss_fn=detached)
        with torch.no_grad(), pytest.raises(hybrid.ModelError, match=r"inside torch\.no_grad"):
            model.train_batch(batch(0), optimizer, loss_fn=functional.mse_loss)
        got = model.train_batch(batch(0), optimizer, loss_fn=functional.mse_loss).loss.item()
        assert abs(got - plain_losses([0])[0]) < 1e-5, got


def numbers_differ() -> None:
    inputs, labels = batch(0)
    for number in (float(dist.get_rank()), dist.get_rank() == 0, "text" if dist.get_rank() else None):
        with pipeline_variant(2) as strategy:
            model: Any = hybrid.distributed_model(failing_chain(), strategy=strategy)
            with pytest.raises(hybrid.BatchError, match=r"rank 1 got another one than rank 0 \(batch\[1\]\[1\]: "):
                model.eval_batch((inputs, (labels, number)), loss_fn=lambda output, both: output.mean())


def test_a_step_after_one_that_raised() -> None:
    """Messages of the step that raised were taken for those of the next one: its first losses, in silence."""
    run_ranks(goes_on_after_an_exception, 2)


def test_what_all_ranks_are_told() -> None:
    """Only the last stage sees the loss: without a graph it trained nothing, in silence; numbers of the batch that
    differ between ranks were not seen."""
    for check in (losses_without_a_graph, numbers_differ):
        run_ranks(check, 2)


def peer_leaves() -> None:
    group = shard_group()
    stream = Stream(group, headers=group, peer=1 - group.rank, device=torch.device("cpu"))
    stream.send(0, None, [torch.ones(1000)], window=9)
    stream.receive(0)
    if group.rank == 1:
        stream.receive(1)  # the other rank has what was sent to it
        raise ZeroDivisionError("gone")
    for number in range(1, 500):  # sooner or later gloo knows that nobody is there, and refuses to start
        stream.send(number, None, [torch.ones(1000)], window=1 << 30)
        time.sleep(0.01)


def test_a_message_to_a_rank_that_is_gone() -> None:
    """gloo's own error came through, without a rank in it."""
    with pytest.raises(RankFailure) as failure:
        run_ranks(peer_leaves, 2)
    assert failure.value.error_of(0).startswith("CollectiveError: rank 0: send to rank 1"), failure.value
