"""Reported faults around frozen parameters and buffers: memory, decay, export, statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

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

WIDTH, ADAPTER_RANK = 64, 2


class Adapted(nn.Module):
    """A frozen linear with a trainable low-rank part beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(ADAPTER_RANK, WIDTH) * 0.1)
        self.up = nn.Parameter(torch.randn(WIDTH, ADAPTER_RANK) * 0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + inputs @ self.down.T @ self.up.T


class Frozen(nn.Module):
    """Two adapted blocks; the head's weight is frozen and its bias is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.blocks = nn.ModuleList([Adapted(), Adapted()])
        self.head = nn.Linear(WIDTH, 3)
        self.head.weight.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        return self.head(inputs)


TRAINABLE = 2 * 2 * ADAPTER_RANK * WIDTH + 3


def adamw_over_all(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-2, weight_decay=0.1)


def adamw_over_trainable(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2, weight_decay=0.1)


def frozen_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(400 + step)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, 3, generator=generator)


def train_frozen_plain(make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    model = Frozen()
    optimizer = make(model.parameters())
    for step in range(3):
        inputs, labels = frozen_batch(step)
        functional.mse_loss(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def check_adapters() -> None:
    before = weights_of(Frozen())
    trainable = {name for name, parameter in Frozen().named_parameters() if parameter.requires_grad}
    for make in (adamw_over_all, adamw_over_trainable):
        wanted = train_frozen_plain(make)
        for stage in (0, 1, 2):
            for partition in ("element", "parameter") if stage else (None,):
                with variant(stage=stage, partition=partition, bucket_bytes=1500) as strategy:
                    model, optimizer = wrapped(Frozen(), make, strategy)
                    for step in range(3):
                        inputs, labels = (own_part(tensor) for tensor in frozen_batch(step))
                        functional.mse_loss(model(inputs), labels).backward()
                        optimizer.step()
                        gradient_bytes = model.memory_bytes()["gradients"]
                        optimizer.zero_grad()
                    assert_weights(model, wanted, SEVERAL_STEPS)
                    for name, value in model.full_state_dict().items():
                        assert name in trainable or torch.equal(value, before[name]), f"frozen {name} has changed"
                    assert set(optimizer.full_state_dict()["state"]) == trainable
                    share = TRAINABLE if stage == 0 else TRAINABLE / 2
                    everything = 4 * share + 8 * share
                    counted = gradient_bytes + model.memory_bytes()["optimizer_state"]
                    assert abs(counted - everything) <= 0.1 * everything, (counted, everything)


def test_bc34_frozen_weights_cost_and_change_nothing() -> None:
    """Fault: a mixed unit was refused, or kept gradients and moments as of a full fine-tune, or decayed."""
    run_ranks(check_adapters, 2)


# -- BC-36 ------------------------------------------------------------------------------------------------------


class Backbone(nn.Module):
    def __init__(self, *, all_frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.backbone = nn.Linear(5, 5).requires_grad_(False)
        with torch.no_grad():
            self.backbone.weight.copy_(torch.arange(25.0).reshape(5, 5) / 25)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("table", torch.arange(6, dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.head = nn.Linear(5, 2)
        if all_frozen:
            self.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.backbone(inputs)))


def check_export(world_size: int) -> None:
    names = list(Backbone(all_frozen=False).state_dict())
    pattern = weights_of(Backbone(all_frozen=True))
    inputs, labels = torch.randn(6, 5, generator=seeded(1)), torch.ones(6, 2)
    for stage in (0, 1, 2):
        for all_frozen in (False, True):
            with variant(stage=stage) as strategy:
                plain = Backbone(all_frozen=all_frozen)
                model = Backbone(all_frozen=all_frozen)
                if dist.get_rank() > 0:
                    model.table += 1  # other buffers and frozen weights than rank 0's, which are what counts
                model, optimizer = wrapped(model, adamw_over_all, strategy)
                if not all_frozen:
                    model.train_batch((own_part(inputs), own_part(labels)), optimizer, loss_fn=functional.mse_loss)
                state = model.full_state_dict()
                assert list(state) == list(model.state_dict()) == names
                for name in ("backbone.weight", "backbone.bias", "table"):
                    assert torch.equal(state[name], pattern[name]), name
                    assert state[name].dtype == pattern[name].dtype
                for name in pattern if all_frozen else ():
                    assert torch.equal(state[name], pattern[name]), name
                # Into the plain model, strictly; and back into the wrapped one.
                plain.load_state_dict(state)
                model.load_state_dict(state)
                evaluated = model.eval_batch((own_part(inputs), own_part(labels)), functional.mse_loss)
                assert evaluated.count == len(inputs)
                if all_frozen:
                    plain.eval()
                    assert_close(evaluated.loss, functional.mse_loss(plain(inputs), labels), ONE_STEP, "loss")
                    assert model.memory_bytes()["optimizer_state"] == 0
                    assert list(model.named_gradients()) == []
                    assert optimizer.full_state_dict()["state"] == {}


@pytest.mark.parametrize("world_size", [2, 3])
def test_bc36_frozen_weights_and_buffers_are_exported_and_start_alike(world_size: int) -> None:
    """Fault: frozen weights were left out of the file; a model with nothing to train broke the export."""
    run_ranks(check_export, world_size, world_size)


# -- BC-38 ------------------------------------------------------------------------------------------------------


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.features = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.features(images))).flatten(1))


def images_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight images; the two halves, one for each rank, are differently scaled."""
    generator = seeded(500 + step)
    images = torch.randn(8, 3, 4, 4, generator=generator)
    images[4:] = images[4:] * 3 + 1
    return images, torch.randn(8, 2, generator=generator)


def train_with_ddp() -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Gradients of each of four steps, accumulating two micro-batches, and this rank's buffers at the end."""
    module = Convolution()
    # Buffers stay local, as each rank's own statistics do here.
    model = DistributedDataParallel(module, broadcast_buffers=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    gradients = []
    for step in range(4):
        images, labels = (own_part(tensor) for tensor in images_of(step))
        with model.no_sync():
            (functional.mse_loss(model(images[:2]), labels[:2]) / 2).backward()
        (functional.mse_loss(model(images[2:]), labels[2:]) / 2).backward()
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return gradients, {name: buffer.clone() for name, buffer in module.named_buffers()}


def check_batch_norm() -> None:
    gradients, buffers = train_with_ddp()
    for stage in (0, 1, 2):
        with variant(stage=stage, accumulate_steps=2) as strategy:
            model, optimizer = wrapped(Convolution(), lambda p: torch.optim.SGD(p, lr=0.1), strategy)
            seen: list[dict[str, Any]] = []
            optimizer.register_step_pre_hook(
                lambda *_, model=model, seen=seen: seen.append(dict(model.named_gradients()))
            )
            for step in range(4):
                images, labels = (own_part(tensor) for tensor in images_of(step))
                model.train_batch((images, labels), optimizer, loss_fn=functional.mse_loss)
                for name, gradient in gradients[step].items():
                    assert_close(seen[step][name], gradient, ONE_STEP, f"gradient of {name} in step {step}")
            assert model.norm.running_mean.dtype == model.norm.running_var.dtype == torch.float32
            assert model.norm.num_batches_tracked.dtype == torch.int64
            assert model.norm.num_batches_tracked == 8
            for name, buffer in model.named_buffers():
                assert_close(buffer, buffers[name], SEVERAL_STEPS, name)
            # A load gives every rank the same statistics.
            state = model.full_state_dict()
            everyone: list[Any] = [None] * 2
            dist.all_gather_object(everyone, {name: value.tolist() for name, value in state.items()})
            plain = Convolution().state_dict()
            model.load_state_dict(
                {name: torch.tensor(value, dtype=plain[name].dtype) for name, value in everyone[0].items()}
            )
            assert_same_on_all_ranks(dict(model.named_buffers()), "a loaded buffer")


def test_bc38_batch_norm_statistics_keep_dtype_and_count_and_gradients_are_those_of_ddp() -> None:
    """Fault: statistics were cast or broadcast in each micro-step, or gradients differed from data parallel."""
    run_ranks(check_batch_norm, 2)
