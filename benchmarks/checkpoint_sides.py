"""What `checkpoint_io` compares: a trained model each, and how it is saved and loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import hybrid
from benchmarks.gpt import BenchGPT, Size, make_batch
from benchmarks.tensor_step import PLAN

__all__ = ["LAYOUTS", "Side", "build", "raw_read", "raw_write"]

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
# Layouts of hybrid on two ranks.
LAYOUTS: dict[str, dict[str, Any]] = {
    "hybrid3": {"sharding": True, "sharding_configs": {"stage": 3}},
    "hybrid2": {"sharding": True, "sharding_configs": {"stage": 2}},
    "hybrid_tp": {"tensor_parallel": True, "tensor_parallel_configs": {"degree": 2, "plan": PLAN}},
    "hybrid0": {},
}
_GATHERED = "state.pt"
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One model with AdamW under one layout, and what reads and writes its state. All of it is collective."""

    train: Callable[[int], None]
    loss: Callable[[], float]
    """Of a batch that is not trained on."""
    save: Callable[[Path, bool], object]
    """Into a folder that is empty; with checksums or without."""
    start_save: Callable[[Path], Callable[[], object]] | None
    """Begins a save beside the training and returns what waits for it; None: this side has none."""
    """The same beside the training; gives what waits for its end."""
    load: Callable[[Path, bool], object]
    """Verified by checksums or not."""


def build(name: str, size: Size) -> Side:
    """`fsdp2` is saved by `torch.distributed.checkpoint`, `gathered` is FSDP2 as well, saved whole by `torch.save`."""
    torch.manual_seed(0)
    model: Any = BenchGPT(size)
    if name in LAYOUTS:
        strategy = hybrid.DistributedStrategy(**LAYOUTS[name])
        optimizer: Any = torch.optim.AdamW(model.parameters(), **ADAMW)
        model = hybrid.distributed_model(model, strategy=strategy)
        optimizer = hybrid.distributed_optimizer(optimizer)
        hybrid.shutdown()  # the next one has another strategy; the group is ours, so this model goes on
        by = _by_hybrid(model, optimizer)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        by = _by_dcp(model, optimizer) if name == "fsdp2" else _by_torch_save(model, optimizer)
    cuts_batch = name != "hybrid_tp"

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (dist.get_rank(), dist.get_world_size()) if cuts_batch else (0, 1)
        return make_batch(size, step=number, rank=parts[0], num_ranks=parts[1])

    def train(number: int) -> None:
        model(*batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def loss() -> float:
        rows, labels = make_batch(size, step=3, rank=0, num_ranks=1)  # the same on all ranks
        with torch.no_grad():
            return float(model(rows, labels))

    return Side(train=train, loss=loss, **by)


def _by_hybrid(model: Any, optimizer: Any) -> dict[str, Any]:
    def save(folder: Path, checksums: bool) -> None:
        hybrid.save_checkpoint(folder, model, optimizer, step=0, checksums=checksums)

    def start_save(folder: Path) -> Callable[[], object]:
        return hybrid.async_save_checkpoint(folder, model, optimizer, step=0).wait

    def load(folder: Path, checksums: bool) -> None:
        hybrid.load_checkpoint(folder, model, optimizer, checksums=checksums)

    return {"save": save, "start_save": start_save, "load": load}


def _by_dcp(model: Any, optimizer: Any) -> dict[str, Any]:
    beside = dist.new_group()  # its thread has its own traffic, while this one goes on

    def state() -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}

    def save(folder: Path, checksums: bool) -> None:
        assert not checksums, "it has none that loading verifies"
        dcp.save(state(), checkpoint_id=folder)

    def start_save(folder: Path) -> Callable[[], object]:
        future: Any = dcp.async_save(state(), checkpoint_id=folder, process_group=beside)
        return future.result

    def load(folder: Path, checksums: bool) -> None:
        assert not checksums
        found = state()
        dcp.load(found, checkpoint_id=folder)
        set_model_state_dict(model, found["model"])
        set_optimizer_state_dict(model, optimizer, found["optimizer"])

    return {"save": save, "start_save": start_save, "load": load}


def _by_torch_save(model: Any, optimizer: Any) -> dict[str, Any]:
    def save(folder: Path, checksums: bool) -> None:
        assert not checksums
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = {
            "model": get_model_state_dict(model, options=options),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        }
        if dist.get_rank() == 0:
            with (folder / _GATHERED).open("xb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())  # as the others do
        dist.barrier()

    def load(folder: Path, checksums: bool) -> None:
        assert not checksums
        state: dict[str, Any] = {"model": {}, "optimizer": {}}
        if dist.get_rank() == 0:
            state = torch.load(folder / _GATHERED, weights_only=True)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state["model"], options=options)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)

    return {"save": save, "start_save": None, "load": load}


def raw_write(data: memoryview, folder: Path) -> None:
    """The least that a save costs: these bytes written and synced by each rank."""
    with (folder / f"raw.{dist.get_rank()}").open("xb", buffering=0) as file:
        while data:
            data = data[file.write(data[:_BLOCK_BYTES]) :]
        os.fsync(file.fileno())


def raw_read(data: memoryview, folder: Path, *, rank: int) -> None:
    """The least that a load costs: what a rank wrote, read into memory that is there."""
    with (folder / f"raw.{rank}").open("rb", buffering=0) as file:
        while count := file.readinto(data[:_BLOCK_BYTES]):
            data = data[count:]
