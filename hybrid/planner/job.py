"""What is to be planned, and one way to lay it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid.contracts.cluster import Cluster
from hybrid.contracts.schedule_choice import schedule_splits_backward
from hybrid.planner.model_spec import ModelSpec, Recompute
from hybrid.planner.software import Software

__all__ = ["Candidate", "Job", "Offload", "OptimizerSpec", "Precision"]

Offload = Literal["none", "optimizer", "parameters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes per element of each kind of state.

    Args:
        compute: dtype of matrix products and activations: `bf16`, `fp16`, `fp32`, `fp8`.
        parameter: the copy that computes.
        gradient: as it accumulates (4 for `grad_dtype` float32).
        reduce: as it travels.
        master: fp32 copy of the optimizer; 0 where the parameters are fp32.
        activation: of a saved activation.
        norm: of a parameter of torch's own normalisation layers, which keep fp32 without a master; 0: as all others.
    """

    compute: Literal["bf16", "fp16", "fp32", "fp8"] = "bf16"
    parameter: int = 2
    gradient: int = 4
    reduce: int = 4
    master: int = 4
    activation: int = 2
    norm: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """Args:
    name: of the class.
    state: bytes per element that it keeps (Adam: 8).
    is_element_wise: steps on shards cut anywhere; others need whole parameters (stages 1 and 2 only).
    """

    name: str = "AdamW"
    state: int = 8
    is_element_wise: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Args:
    model: the model.
    cluster: the devices, in rank order.
    global_batch_size: samples per optimizer step.
    seq: tokens per sample.
    precision, optimizer: of the training state.
    is_flash: whether attention runs in a kernel that stores no scores.
    software: the constants that time is priced with, or the name of a set in `planner/data/software.yaml`.
    bucket_bytes, prefetch: as in `sharding_configs`.
    context_bytes: low, expected and high of what a process has before it trains, where that was measured.
    """

    model: ModelSpec
    cluster: Cluster
    global_batch_size: int
    seq: int
    precision: Precision = Precision()
    optimizer: OptimizerSpec = OptimizerSpec()
    is_flash: bool = True
    software: str | Software = "hybrid"
    bucket_bytes: int = 25 * 2**20
    prefetch: int = 1
    context_bytes: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout. Axes outer to inner: pp, dp_replicate, dp_shard, cp, tp.

    Args:
        schedule: name of `contracts/schedule.py`; `1f1b` also where pp is 1.
        virtual_stages: chunks per pipeline rank.
        num_micro_batches: per step and data-parallel rank; micro_batch_size · num_micro_batches · dp is the batch.
        split: units per chunk, in the order of the model; empty: `planner/stages.py` balances them.
        grad_reduce: stages 2 and 3: every micro-batch or once per step.
        reshard_after: stage 3: `unit`, or `run` of micro-batches.
        ep: expert-parallel ranks, out of the data-parallel ones.
        is_overlapped: gradients travel while backward runs (`overlap_comm`).
        offload: `optimizer`: masters, optimizer state and reduced gradients lie in host memory, and the host updates;
            `parameters`: as well the own shards of parameters (stage 3).
    """

    tp: int = 1
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    zero_stage: int = 0
    schedule: str = "1f1b"
    virtual_stages: int = 1
    micro_batch_size: int = 1
    num_micro_batches: int = 1
    recompute: Recompute = "none"
    split: tuple[int, ...] = ()
    grad_reduce: Literal["every_micro_batch", "last_micro_batch"] = "last_micro_batch"
    reshard_after: Literal["unit", "run"] = "unit"
    is_overlapped: bool = True
    offload: Offload = "none"

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def is_offloaded(self) -> bool:
        """Whether any state lies in host memory."""
        return self.offload != "none"

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def label(self) -> str:
        """Short, unique among the candidates of one search."""
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp_replicate}x{self.dp_shard}"]
        parts += [f"cp{self.cp}"] * (self.cp > 1) + [f"ep{self.ep}"] * (self.ep > 1)
        parts += ["sp"] * self.sequence_parallel + [f"z{self.zero_stage}"]
        chunks = "" if schedule_splits_backward(self.schedule) else f"v{self.virtual_stages}"
        parts += [f"{self.schedule}{chunks}"] * (self.pp > 1)
        parts += [f"mb{self.micro_batch_size}x{self.num_micro_batches}"]
        parts += [self.recompute] * (self.recompute != "none")
        parts += ["every"] * (self.zero_stage >= 2 and self.grad_reduce == "every_micro_batch")
        parts += ["run"] * (self.zero_stage == 3 and self.reshard_after == "run")
        parts += [{"none": "", "optimizer": "offload", "parameters": "offload-parameters"}[self.offload]]
        return " ".join(filter(None, parts))
