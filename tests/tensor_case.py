"""Strategies with tensor parallel: one run of the parity matrix, and others in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import hybrid
from tests.tensor_models import MODELS

__all__ = ["AMP", "CLIP", "TensorCase", "tensor_strategy", "tensor_variant"]

CLIP = 0.05  # below every norm

AMP: Mapping[str, dict[str, Any] | None] = {
    "none": None,
    "bf16-O1": {"level": "O1"},
    "bf16-O2": {"level": "O2"},
    "fp16-scaler": {"level": "O1", "dtype": "float16", "init_loss_scaling": 256},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCase:
    """One run.

    Args:
        way: "train": one micro-batch by `train_batch`; "micro": two of them; "nosync": two in a plain loop.
        clip: "none", "strategy" or "call" (the model's own method).
        recompute: "none", "full" or "selective".
        built: whether the optimizer is built before the model is wrapped, or after.
    """

    model: str = "gpt"
    world_size: int = 2
    tp: int = 2
    zero_stage: int = 0
    shard_size: int | None = None
    sequence_parallel: bool = False
    amp: str = "none"
    clip: str = "strategy"
    recompute: str = "none"
    way: str = "train"
    built: str = "before"
    backend: str = "gloo"

    @property
    def id(self) -> str:
        words = [
            self.model,
            f"w{self.world_size}",
            f"tp{self.tp}",
            f"z{self.zero_stage}",
            "" if self.shard_size is None else f"shard{self.shard_size}",
            "sequence" if self.sequence_parallel else "",
            "" if self.amp == "none" else self.amp,
            "" if self.clip == "none" else f"clip-{self.clip}",
            "" if self.recompute == "none" else f"recompute-{self.recompute}",
            self.way,
            f"built-{self.built}",
            "" if self.backend == "gloo" else self.backend,
        ]
        return "-".join(word for word in words if word)

    @property
    def dtype(self) -> torch.dtype:
        return MODELS[self.model].dtype if self.amp == "none" else torch.float32

    def strategy(self) -> hybrid.DistributedStrategy:
        strategy = hybrid.DistributedStrategy()
        strategy.timeout_seconds = 20
        strategy.tensor_parallel = True
        configs: dict[str, Any] = {"degree": self.tp}
        if MODELS[self.model].plan is not None:
            configs["plan"] = MODELS[self.model].plan
        if self.sequence_parallel:
            configs["sequence_parallel"] = True
        strategy.tensor_parallel_configs = configs
        strategy.sharding = True
        sharding: dict[str, Any] = {"stage": self.zero_stage, "bucket_bytes": 3000}
        strategy.sharding_configs = sharding if self.shard_size is None else {**sharding, "shard_size": self.shard_size}
        if AMP[self.amp] is not None:
            strategy.amp, strategy.amp_configs = True, AMP[self.amp]
        if self.recompute != "none":
            strategy.recompute, strategy.recompute_configs = True, {"policy": self.recompute}
        if self.clip == "strategy":
            strategy.gradient_clipping = CLIP
        if self.way == "micro":
            strategy.accumulate_steps = 2
        return strategy


def tensor_strategy(
    tp: int, *, stage: int | None = None, plan: Mapping[str, Any] | None = None, **settings: Any
) -> hybrid.DistributedStrategy:
    """In one line; `sequence_parallel`, `verify`, `shard_size`, `bucket_bytes`, `recompute` are put in place."""
    strategy = hybrid.DistributedStrategy()
    strategy.timeout_seconds = 20
    strategy.tensor_parallel = True
    configs: dict[str, Any] = {"degree": tp} if plan is None else {"degree": tp, "plan": plan}
    for name in ("sequence_parallel", "verify"):
        if name in settings:
            configs[name] = settings.pop(name)
    strategy.tensor_parallel_configs = configs
    sharding = {name: settings.pop(name) for name in ("shard_size", "bucket_bytes") if name in settings}
    if stage is not None:
        strategy.sharding, strategy.sharding_configs = True, {"stage": stage, **sharding}
    if policy := settings.pop("recompute", None):
        strategy.recompute, strategy.recompute_configs = True, {"policy": policy}
    for name, value in settings.items():
        setattr(strategy, name, value)
    return strategy


@contextlib.contextmanager
def tensor_variant(tp: int, **settings: Any) -> Iterator[hybrid.DistributedStrategy]:
    """One strategy of several in this world; the job is left at the end, so that the next may begin."""
    try:
        yield tensor_strategy(tp, **settings)
    except BaseException as error:
        error.add_note(f"with tp {tp}, {settings}, rank {torch.distributed.get_rank()}")
        raise
    finally:
        hybrid.shutdown()
