"""The ways to train that `zero_step` compares: one process, DDP, torch's and DeepSpeed's sharding, and hybrid.

Each trains the model of `gpt` on the same batches with the same fused AdamW, in fp32, without clipping.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpt import SIZES, Block, Size, make_batch

__all__ = ["PEERS", "Training", "build", "import_peer", "modes_of"]

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}

PEERS: dict[str, tuple[str, ...]] = {
    "nosync": ("nosync",),
    "ddp": ("ddp",),
    "zero1": ("zero1",),
    "fsdp1": ("fsdp1_grad", "fsdp1_full"),
    "fsdp2": ("fsdp2_grad", "fsdp2_full", "fsdp2_grad_ours", "fsdp2_full_ours"),
    "deepspeed": ("deepspeed1", "deepspeed2", "deepspeed3"),
}
"""Peer -> its modes. `_grad`: gradients and optimizer state cut, parameters whole from forward to backward; `_full`:
parameters freed after each block as well; `_ours`: on the exchange of `hybrid.collectives`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One model in training on this rank."""

    backward: Callable[[int], float]
    """Forward and backward on the batch of a step number; returns the mean loss over this rank's rows."""
    update: Callable[[], object]
    """The optimizer's step; afterwards gradients are empty."""

    def step(self, number: int) -> float:
        loss = self.backward(number)
        self.update()
        return loss


def modes_of(peers: Sequence[str], stages: Sequence[int]) -> list[str]:
    """DDP first, then the modes of these peers, then hybrid at these ZeRO stages."""
    chosen = [mode for peer in peers for mode in PEERS[peer]]
    return list(dict.fromkeys(["ddp", *chosen, *(f"hybrid{stage}" for stage in stages)]))


def import_peer(mode: str) -> None:
    """What is not torch or hybrid, so that memory can be measured from after the import."""
    if mode.startswith("deepspeed"):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed  # noqa: F401


def build(mode: str, size_name: str, *, rank: int, num_ranks: int) -> Training:
    """The model with seed 0 and its optimizer. *Collective.*"""
    import torch

    from benchmarks.gpt import BenchGPT

    size = SIZES[size_name]
    torch.manual_seed(0)
    model = BenchGPT(size)
    if mode == "ddp":
        return _ddp(model, size, rank, num_ranks)
    if mode == "zero1":
        return _zero1(model, size, rank, num_ranks)
    if mode.startswith("fsdp1"):
        return _fsdp1(model, size, rank, num_ranks, cut_parameters=mode == "fsdp1_full")
    if mode.startswith("fsdp2"):
        return _fsdp2(model, size, rank, num_ranks, mode)
    if mode.startswith("deepspeed"):
        return _deepspeed(model, size, rank, num_ranks, zero_stage=int(mode.removeprefix("deepspeed")))
    if mode.startswith("hybrid"):
        return _hybrid(model, size, rank, num_ranks, zero_stage=int(mode.removeprefix("hybrid")))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    if mode == "single":
        size = replace(size, micro_batch=num_ranks * size.micro_batch)
        return _plain_loop(model, optimizer, size, 0, 1)
    assert mode == "nosync", mode  # ranks that do not know of each other
    return _plain_loop(model, optimizer, size, rank, num_ranks)


def _plain_loop(model: Any, optimizer: Any, size: Size, rank: int, num_ranks: int) -> Training:
    def backward(number: int) -> float:
        loss = model(*make_batch(size, step=number, rank=rank, num_ranks=num_ranks))
        loss.backward()
        return float(loss.item())

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Training(backward=backward, update=update)


def _ddp(model: Any, size: Size, rank: int, num_ranks: int) -> Training:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _plain_loop(wrapped, torch.optim.AdamW(model.parameters(), **ADAMW), size, rank, num_ranks)


def _zero1(model: Any, size: Size, rank: int, num_ranks: int) -> Training:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW)
    return _plain_loop(wrapped, optimizer, size, rank, num_ranks)


def _fsdp1(model: Any, size: Size, rank: int, num_ranks: int, *, cut_parameters: bool) -> Training:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.FULL_SHARD if cut_parameters else ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return _plain_loop(wrapped, torch.optim.AdamW(wrapped.parameters(), **ADAMW), size, rank, num_ranks)


def _fsdp2(model: Any, size: Size, rank: int, num_ranks: int, mode: str) -> Training:
    import torch
    from torch.distributed.fsdp import fully_shard

    cut_parameters = mode.startswith("fsdp2_full")
    for module in (*model.blocks, model):
        fully_shard(module, reshard_after_forward=cut_parameters)
    if mode.endswith("_ours"):
        from benchmarks.zero_transport import use_our_exchange

        use_our_exchange(model, (*model.blocks, model))
    return _plain_loop(model, torch.optim.AdamW(model.parameters(), **ADAMW), size, rank, num_ranks)


def _deepspeed(model: Any, size: Size, rank: int, num_ranks: int, *, zero_stage: int) -> Training:
    import deepspeed
    import torch

    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, **ADAMW),
        config={
            "train_micro_batch_size_per_gpu": size.micro_batch,
            "zero_optimization": {"stage": zero_stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )

    def backward(number: int) -> float:
        loss = engine(*make_batch(size, step=number, rank=rank, num_ranks=num_ranks))
        engine.backward(loss)
        return float(loss.item())

    return Training(backward=backward, update=engine.step)


def _hybrid(model: Any, size: Size, rank: int, num_ranks: int, *, zero_stage: int) -> Training:
    import torch

    import hybrid

    strategy = hybrid.DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"stage": zero_stage}
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    wrapped = hybrid.distributed_model(model, strategy=strategy)
    return _plain_loop(wrapped, hybrid.distributed_optimizer(optimizer), size, rank, num_ranks)
