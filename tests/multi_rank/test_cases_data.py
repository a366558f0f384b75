"""Reported faults of data loading: ranks with fewer batches, tails that are lost, samples counted twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hybrid
from tests.multi_rank.case_runs import (
    ONE_STEP,
    SEVERAL_STEPS,
    assert_close,
    assert_weights,
    seeded,
    strategy_of,
    variant,
    weights_of,
    wrapped,
)
from tests.ranks import run_ranks


def small() -> nn.Module:
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def samples(count: int) -> TensorDataset:
    generator = seeded(800)
    return TensorDataset(torch.randn(count, 3, generator=generator), torch.randn(count, 2, generator=generator))


# -- BC-66 ------------------------------------------------------------------------------------------------------


def train_epochs_plain(count: int, global_batch_size: int, drop_last: bool) -> tuple[int, dict[str, torch.Tensor]]:
    model = small()
    optimizer = adamw(model.parameters())
    sampler = hybrid.DistributedBatchSampler(
        count, global_batch_size, num_replicas=1, rank=0, shuffle=True, seed=3, drop_last=drop_last, tail="empty"
    )
    dataset, num_steps = samples(count), 0
    for _ in range(2):
        for indices in sampler:
            inputs, labels = dataset[indices]
            functional.mse_loss(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            num_steps += 1
    return num_steps, weights_of(model)


def check_epochs(drop_last: bool) -> None:
    world_size = dist.get_world_size()
    for count, stage, accumulate_steps in ((23, 2, 3), (9, 1, 2), (8, 0, 1), (23, 0, 2)):
        num_steps, weights = train_epochs_plain(count, 2 * world_size, drop_last)
        with variant(stage=stage, accumulate_steps=accumulate_steps) as strategy:
            model, optimizer = wrapped(small(), adamw, strategy)
            dataset = samples(count)
            sampler = hybrid.DistributedBatchSampler(
                dataset, 2, shuffle=True, seed=3, drop_last=drop_last, tail="empty"
            )
            assert (sampler.num_replicas, sampler.rank) == (world_size, dist.get_rank())
            loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=sampler.collate_fn())
            steps, seen = 0, 0
            for _ in range(2):
                for batch in loader:
                    result = model.train_batch(tuple(batch), optimizer, loss_fn=functional.mse_loss)
                    steps, seen = steps + 1, seen + result.samples
            assert steps == num_steps
            assert drop_last or seen == 2 * count
            assert_weights(model, weights, SEVERAL_STEPS)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_bc66_epochs_that_do_not_divide_end_together_and_equal_one_process(world_size: int, drop_last: bool) -> None:
    """Fault: ranks with a batch less left the others hanging at the end of the epoch."""
    run_ranks(check_epochs, world_size, drop_last)


def check_uneven_loaders() -> None:
    """Rank 0 has five batches and rank 1 four: rank 1 gives an empty one, which weighs nothing."""
    rank = dist.get_rank()
    inputs, labels = samples(18).tensors
    shares = [range(0, 10), range(10, 18)]
    plain = small()
    plain_optimizer = adamw(plain.parameters())
    losses = []
    for step in range(5):
        rows = [row for share in shares for row in share[2 * step : 2 * step + 2]]
        loss = functional.mse_loss(plain(inputs[rows]), labels[rows])
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        whole = functional.mse_loss(plain(inputs), labels).item()
    for stage in (0, 1, 2):
        with variant(stage=stage) as strategy:
            model, optimizer = wrapped(small(), adamw, strategy)
            for step in range(5):
                rows = list(shares[rank][2 * step : 2 * step + 2])
                result = model.train_batch((inputs[rows], labels[rows]), optimizer, loss_fn=functional.mse_loss)
                assert_close(result.loss, losses[step], SEVERAL_STEPS, f"loss of step {step}")
                assert result.samples == (4 if step < 4 else 2)
            assert_weights(model, weights_of(plain), SEVERAL_STEPS)
            total = count = 0.0
            for step in range(5):
                rows = list(shares[rank][2 * step : 2 * step + 2])
                result = model.eval_batch((inputs[rows], labels[rows]), functional.mse_loss)
                total, count = total + (result.loss * result.count).item(), count + result.count.item()
            assert count == 18
            assert_close(total / count, whole, SEVERAL_STEPS, "loss of the validation")


def test_bc66_an_empty_batch_weighs_nothing_in_training_and_validation() -> None:
    """Fault: a rank that ran out of batches stopped by itself, and validation hung."""
    run_ranks(check_uneven_loaders, 2)


def check_too_few_samples() -> None:
    hybrid.init(strategy=strategy_of(stage=2))
    with pytest.raises(hybrid.BatchError, match=r"3 samples are fewer than one global batch of 4 .* 2 replicas = 8"):
        hybrid.DistributedBatchSampler(samples(3), 4, drop_last=True)
    # Without dropping the tail there is one step, over all three.
    sampler = hybrid.DistributedBatchSampler(samples(3), 4)
    assert len(sampler) == len(list(sampler)) == 1


def test_bc66_an_epoch_without_a_batch_is_refused_before_training() -> None:
    """Fault: the tail was dropped, nothing was left, and the run ended with success after zero steps."""
    run_ranks(check_too_few_samples, 2)


# -- BC-67 ------------------------------------------------------------------------------------------------------


class Metric(nn.Module):
    """The loss of a batch is the mean of its values; the parameter does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Parameter(torch.ones(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        assert not self.training
        return (values * self.unit).mean()


def check_metric(tail: Any) -> None:
    dataset = TensorDataset(torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0]))
    for batch_size in (1, 2, 5):
        for loss_kind in ("mean", "sum and count"):
            with variant(stage=2) as strategy:
                model = hybrid.distributed_model(Metric(), strategy=strategy)
                sampler = hybrid.DistributedBatchSampler(dataset, batch_size, tail=tail)
                loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=sampler.collate_fn())

                def step(model: Any, batch: Any, loss_kind: str = loss_kind) -> Any:
                    mean = model(batch[0])
                    return mean if loss_kind == "mean" else (mean * len(batch[0]), len(batch[0]))

                total = count = 0.0
                for batch in loader:
                    result = model.eval_batch(batch, forward_step=step)
                    total, count = total + (result.loss * result.count).item(), count + result.count.item()
                assert count == 5
                assert_close(total / count, 4.0, ONE_STEP, "the mean")
                assert model.training


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("tail", ["fold", "empty"])
def test_bc67_evaluation_counts_every_sample_once(world_size: int, tail: str) -> None:
    """Fault: padded duplicates were counted, or values were averaged per rank first (3.5 or 5.0 instead of 4.0)."""
    run_ranks(check_metric, world_size, tail)
