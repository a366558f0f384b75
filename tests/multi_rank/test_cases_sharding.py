"""Reported faults of sharding itself: stages that disagree, buckets that change the result, odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.multi_rank.case_runs import (
    ONE_STEP,
    SEVERAL_STEPS,
    assert_close,
    assert_same_on_all_ranks,
    assert_weights,
    own_part,
    seeded,
    variant,
    weights_of,
    wrapped,
)
from tests.ranks import run_ranks

# -- BC-01 ------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Four linears, the first and the last share one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 6)])
        self.layers[3].weight = self.layers[0].weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            inputs = torch.relu(layer(inputs))
        return self.layers[-1](inputs)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def tied_batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(step)
    return torch.randn(size, 6, generator=generator), 4 * torch.randn(size, 6, generator=generator)


def train_tied_plain(num_samples: int, num_steps: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = Tied()
    optimizer = adamw(model.parameters())
    losses, norms = [], []
    for step in range(num_steps):
        inputs, labels = tied_batch(step, num_samples)
        loss = functional.mse_loss(model(inputs), labels)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, weights_of(model)


def check_stages_agree(world_size: int) -> None:
    num_steps, num_samples = 10, 12 * world_size
    losses, norms, weights = train_tied_plain(num_samples, num_steps)
    assert max(norms) > 0.5  # the clip is at work
    layouts: list[dict[str, Any]] = [
        {"stage": 0},
        {"stage": 1},
        {"stage": 1, "overlap_param_gather": True},
        {"stage": 2, "grad_reduce": 2},
        {"stage": 2, "grad_reduce": "last_micro_batch", "bucket_bytes": 100},
        {"stage": 2, "partition": "parameter", "overlap_comm": False},
    ]
    if world_size == 4:
        layouts = [
            *layouts[:2],
            layouts[3],
            {"stage": 1, "shard_size": 2},
            {"stage": 2, "shard_size": 2, "bucket_bytes": 100},
        ]
    for layout in layouts:
        with variant(accumulate_steps=3, micro_batch_size=4, gradient_clipping=0.5, **layout) as strategy:
            model, optimizer = wrapped(Tied(), adamw, strategy)
            for step in range(num_steps):
                inputs, labels = (own_part(tensor) for tensor in tied_batch(step, num_samples))
                result = model.train_batch((inputs, labels), optimizer, loss_fn=functional.mse_loss)
                assert_close(result.loss, losses[step], SEVERAL_STEPS, f"loss of step {step}")
                assert_close(result.grad_norm, norms[step], SEVERAL_STEPS, f"norm of step {step}")
            assert_weights(model, weights, SEVERAL_STEPS)
            assert model.layers[3].weight is model.layers[0].weight
            assert_same_on_all_ranks(dict(model.named_parameters()), "a weight")


@pytest.mark.parametrize("world_size", [2, 4])
def test_bc01_stages_agree_with_one_process(world_size: int) -> None:
    """Fault: changing only the stage changed the losses, with accumulation and a shared layer."""
    run_ranks(check_stages_agree, world_size, world_size)


# -- BC-03 ------------------------------------------------------------------------------------------------------


def check_stage_stays(make: Callable[[Any], torch.optim.Optimizer], num_states: int) -> None:
    rank_state_elements: list[int] = []
    for stage in (1, 2):
        for late_gather in (False, True):
            with variant(stage=stage, overlap_param_gather=late_gather) as strategy:
                torch.manual_seed(1)
                model, optimizer = wrapped(nn.Linear(60, 40), make, strategy)
                whole_bytes = 4 * (60 * 40 + 40)
                for step in range(3):
                    inputs = torch.randn(8, 60, generator=seeded(step))
                    batch = (own_part(inputs), torch.ones(4, 40))
                    if step < 2:
                        model.train_batch(batch, optimizer, loss_fn=functional.mse_loss)
                        assert model.memory_bytes()["gradients"] == 0
                    else:
                        functional.mse_loss(model(batch[0]), batch[1]).backward()
                        optimizer.step()
                        assert whole_bytes / 2 <= model.memory_bytes()["gradients"] <= 0.6 * whole_bytes
                    # Used outside any forward, as a parameter of its own.
                    weight = model.weight
                    product = inputs @ weight.T
                    assert product.shape == (8, 40)
                    assert (weight.shape, weight.numel(), type(weight)) == ((40, 60), 2400, nn.Parameter)
                    assert_same_on_all_ranks({"product": product}, f"the product after step {step}")
                    state_bytes = model.memory_bytes()["optimizer_state"]
                    assert 0.4 * num_states * whole_bytes <= state_bytes <= 0.6 * num_states * whole_bytes
                rank_state_elements.append(
                    sum(value.numel() for state in optimizer.state.values() for value in state.values())
                )
    assert len(set(rank_state_elements)) == 1


def test_bc03_the_stage_stays_what_it_is_after_every_step() -> None:
    """Fault: after the first update a stage-1 or stage-2 run kept its parameters split, as stage 3."""
    run_ranks(check_stage_stays, 2, adamw, 2)
    run_ranks(check_stage_stays, 2, sgd_momentum, 1)


# -- BC-04 ------------------------------------------------------------------------------------------------------

SIZES = (1, 7, 1000, 3, 64)


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in SIZES])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        pieces = inputs.split(list(SIZES), dim=1)
        return sum(torch.tanh((x * part).mean(1)) for x, part in zip(pieces, self.parts, strict=True))


def sgd_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def sizes_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(100 + step)
    return torch.randn(8, sum(SIZES), generator=generator), torch.randn(8, generator=generator)


def check_bucket_sizes() -> None:
    plain = Sizes()
    plain_optimizer = sgd_momentum(plain.parameters())
    for step in range(5):
        inputs, labels = sizes_batch(step)
        functional.mse_loss(plain(inputs), labels).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    wanted = weights_of(plain)
    first: dict[str, torch.Tensor] | None = None
    for stage, bucket_elements, overlap in [
        *((2, elements, overlap) for elements in (1, 8, 999, 1000, 1001, 10_000_000) for overlap in (True, False)),
        *((1, elements, True) for elements in (1, 1000)),
        *((0, elements, False) for elements in (8, 1001)),
    ]:
        with variant(stage=stage, bucket_bytes=4 * bucket_elements, overlap_comm=overlap) as strategy:
            model, optimizer = wrapped(Sizes(), sgd_momentum, strategy)
            for step in range(5):
                inputs, labels = (own_part(tensor) for tensor in sizes_batch(step))
                model.train_batch((inputs, labels), optimizer, loss_fn=functional.mse_loss)
            assert_weights(model, wanted, ONE_STEP)
            # Two ranks add each element in one order only, so a bucket's borders change no bit.
            got = model.full_state_dict()
            first = first or got
            assert all(torch.equal(got[name], first[name]) for name in got)


def test_bc04_bucket_size_and_overlap_do_not_change_the_result() -> None:
    """Fault: the result depended on the bucket size, or on overlap; a parameter larger than a bucket was skipped."""
    run_ranks(check_bucket_sizes, 2)


# -- BC-41 ------------------------------------------------------------------------------------------------------

ODD_SHAPES: dict[str, tuple[int, ...]] = {"scale": (), "one": (1,), "three": (3,), "matrix": (7, 3), "row": (1, 17)}


class Odd(nn.Module):
    """0-d, (1,), (3,), (7, 3), (1, 17), and one parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        generator = seeded(3)
        for name, shape in ODD_SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs @ self.matrix + self.three * self.one
        return (torch.tanh(hidden).sum(1, keepdim=True) * self.row).sum(1) * self.scale + self.empty.sum()


def adam_in_groups(parameters: Any) -> torch.optim.Optimizer:
    """One group holds only the 0-d parameter; one only what has no elements."""
    scale, *others, empty = list(parameters)
    groups = [{"params": [scale], "lr": 0.02}, {"params": others}, {"params": [empty], "lr": 0.5}]
    return torch.optim.Adam(groups, lr=0.01)


def check_odd_sizes(world_size: int) -> None:
    plain = Odd()
    plain_optimizer = adam_in_groups(plain.parameters())
    norms = []
    for step in range(3):
        inputs = torch.randn(12, 7, generator=seeded(200 + step))
        plain(inputs).square().mean().backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.numel()]).item())
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    wanted = weights_of(plain)
    layouts: list[dict[str, Any]] = [
        {"stage": 0, "bucket_bytes": 4},
        {"stage": 1, "shard_size": world_size},
        {"stage": 1, "bucket_bytes": 4},
        {"stage": 2, "bucket_bytes": 4, "shard_size": world_size},
        {"stage": 2},
        {"stage": 2, "partition": "parameter"},
    ]
    for layout in layouts:
        with variant(**layout) as strategy:
            model, optimizer = wrapped(Odd(), adam_in_groups, strategy)
            for step in range(3):
                inputs = torch.randn(12, 7, generator=seeded(200 + step))
                result = model.train_batch(
                    own_part(inputs), optimizer, forward_step=lambda model, batch: model(batch).square().mean()
                )
                assert_close(result.grad_norm, norms[step], ONE_STEP, f"norm of step {step}")
            assert_weights(model, wanted, SEVERAL_STEPS)
            state = optimizer.full_state_dict()["state"]
            for name, shape in ODD_SHAPES.items():
                assert state[name]["exp_avg"].shape == shape
                assert state[name]["step"].shape == ()
                plain_state = plain_optimizer.state[getattr(plain, name)]
                for key, value in plain_state.items():
                    assert_close(state[name][key], value, SEVERAL_STEPS, f"{key} of {name}")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bc41_scalars_and_tiny_parameters_on_any_number_of_ranks(world_size: int) -> None:
    """Fault: a 0-d parameter was refused, a tiny one got no gradient, a group without elements on a rank crashed."""
    run_ranks(check_odd_sizes, world_size, world_size)
