"""One run of the parity matrix: its settings, its name, its strategy, its optimizer, its way through a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

import hybrid

__all__ = ["CLIPS", "PIECES", "TRAIN_WAYS", "WAYS", "Case", "even_cuts", "make_optimizer", "pieces_of"]

# Way of accumulation -> accumulate_steps. The first three are train_batch, the others a plain loop.
WAYS = {"train": 1, "train-mb3": 3, "calls": 2, "loop": 1, "nosync": 1, "repeat": 1}
TRAIN_WAYS = ("train", "train-mb3", "calls")
PIECES = {"train": 1, "train-mb3": 3, "calls": 3, "loop": 1, "nosync": 3, "repeat": 3}
"""Parts into which a rank cuts its batch; `calls` cuts each of them in two again."""

CLIPS = {"none": None, "norm2": (0.3, 2.0), "norminf": (0.05, math.inf), "value": 0.02}
OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run. `shard_size` None leaves the setting out; `clip_by` "call" clips by the model's own method."""

    world_size: int
    zero_stage: int
    shard_size: int | None = None
    way: str = "train"
    overlap_comm: bool = True
    overlap_param_gather: bool = False
    clip: str = "none"
    clip_by: str = "strategy"
    optimizer: str = "adamw"
    partition: str = "auto"
    built: str = "before"
    grad_reduce: str | int = "auto"
    bucket_bytes: int = 3000
    model: str = "blocks"
    dtype: torch.dtype = torch.float32
    backend: str = "gloo"

    @property
    def id(self) -> str:
        """Readable, and different for different cases."""
        words = [
            f"dp{self.world_size}",
            "" if self.shard_size is None else f"shard{self.shard_size}",
            f"z{self.zero_stage}",
            self.way,
            "overlap" if self.overlap_comm else "",
            "lategather" if self.overlap_param_gather else "",
            "" if self.clip == "none" else f"clip{self.clip}" + ("call" if self.clip_by == "call" else ""),
            self.optimizer,
            "" if self.partition == "auto" else self.partition,
            f"built{self.built}",
            "" if self.grad_reduce == "auto" else f"reduce{str(self.grad_reduce).removesuffix('_micro_batch')}",
            f"{self.bucket_bytes}B",
            self.model,
            "fp64" if self.dtype is torch.float64 else "",
        ]
        return "-".join(word for word in words if word)

    def strategy(self) -> hybrid.DistributedStrategy:
        strategy = hybrid.DistributedStrategy()
        strategy.timeout_seconds = 20
        strategy.accumulate_steps = WAYS[self.way]
        strategy.sharding = True
        sharding = {
            "stage": self.zero_stage,
            "bucket_bytes": self.bucket_bytes,
            "overlap_comm": self.overlap_comm,
            "overlap_param_gather": self.overlap_param_gather,
            "grad_reduce": self.grad_reduce,
            "partition": self.partition,
        }
        strategy.sharding_configs = sharding if self.shard_size is None else {**sharding, "shard_size": self.shard_size}
        clip = CLIPS[self.clip]
        if clip is not None and self.clip_by == "strategy":
            by_norm = isinstance(clip, tuple)
            strategy.gradient_clipping = (
                {"max_norm": clip[0], "norm_type": clip[1]} if by_norm else {"clip_value": clip}
            )
        return strategy


def pieces_of(way: str, start: int, end: int) -> list[tuple[int, int]]:
    """How one rank's samples are cut; parts may be empty."""
    parts = even_cuts(start, end, PIECES[way])
    return [piece for part in parts for piece in even_cuts(*part, WAYS[way])] if way == "calls" else parts


def even_cuts(start: int, end: int, parts: int) -> list[tuple[int, int]]:
    """Ranges of nearly equal length, empty ones among them where there are too few samples."""
    bounds = [start + (end - start) * index // parts for index in range(parts + 1)]
    return list(pairwise(bounds))


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with options of their own: matrices, and everything with fewer dims; frozen ones among them."""
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    if name == "adamw":
        groups = [
            {"params": matrices, "lr": 1e-2, "weight_decay": 0.1},
            {"params": others, "lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.99)},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]])
    assert name == "sgd"
    groups = [
        {"params": matrices, "momentum": 0.9, "nesterov": True},
        {"params": others, "lr": 0.02, "momentum": 0.5, "weight_decay": 0.01},
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1)
