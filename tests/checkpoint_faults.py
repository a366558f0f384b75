"""A small job whose checkpoints are broken on purpose: processes killed at a file operation, files damaged, disks full.

model   two linear layers of odd widths, a frozen weight, a buffer; AdamW
ranks   two, ZeRO stage 2, unless a test says otherwise
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from hybrid.checkpoint.tensor_file import TensorFileWriter

__all__ = ["FileOperations", "die", "digest", "file_operations", "on_all_ranks", "strategy_of", "train", "wrap"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.second(torch.tanh(self.first(value))) * self.scale


def strategy_of(stage: int = 2, *, timeout_seconds: float = 20, **settings: Any) -> hybrid.DistributedStrategy:
    strategy = hybrid.DistributedStrategy()
    strategy.sharding, strategy.sharding_configs = True, {"stage": stage, "bucket_bytes": 64, **settings}
    strategy.timeout_seconds = timeout_seconds
    return strategy


def wrap(stage: int = 2, *, timeout_seconds: float = 20, seed: int = 0, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model: Any = hybrid.distributed_model(Model(), strategy=strategy_of(stage, timeout_seconds=timeout_seconds))
    return model, hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01, **settings))


def train(model: Any, optimizer: Any, steps: int = 1) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        inputs, labels = torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)
        model.train_batch((inputs, labels), optimizer, loss_fn=functional.mse_loss)


def digest(model: Any, optimizer: Any) -> str:
    """Of every bit of weights, buffers and optimizer state; equal on all ranks."""
    plain = []

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                walk(value[key], f"{path}/{key}")
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                walk(item, f"{path}/{index}")
        elif isinstance(value, torch.Tensor):
            plain.append((path, str(value.dtype), value.detach().cpu().contiguous().numpy().tobytes()))
        else:
            plain.append((path, repr(value), b""))

    walk({"weights": model.full_state_dict(), "optimizer": optimizer.full_state_dict()}, "")
    return hashlib.sha256(pickle.dumps(plain)).hexdigest()


def on_all_ranks(value: Any) -> Any:
    """The value, which must be equal on all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(one == values[0] for one in values), values
    return value


class FileOperations:
    """Counts calls that open a file or change the disk, and does something before one of them."""

    def __init__(self, number: int | None, act: Callable[[str], None], *, lasts: bool) -> None:
        self.count = 0
        self._number = number
        self._act = act
        self._lasts = lasts

    def came(self, what: str) -> None:
        self.count += 1
        if self._number is None or self.count <= self._number:
            return
        if self._lasts or self.count == self._number + 1:
            self._act(what)


_CALLS: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("rename", "mkdir", "unlink", "rmdir", "fsync", "open")),
    (io, "open"),
    (TensorFileWriter, "write"),
)


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def file_operations(
    number: int | None = None, act: Callable[[str], None] = die, *, lasts: bool = False
) -> Iterator[FileOperations]:
    """Inside the block, `act` is called before file operation `number` of this process; None: never.

    Args:
        lasts: before all that follow, too.
    """
    operations = FileOperations(number, act, lasts=lasts)

    def counting(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            operations.came(name)
            return call(*args, **kwargs)

        return replacement

    patches = [mock.patch.object(owner, name, counting(getattr(owner, name), name)) for owner, name in _CALLS]
    for patch in patches:
        patch.start()
    try:
        yield operations
    finally:
        for patch in patches:
            patch.stop()
