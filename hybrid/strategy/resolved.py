"""A strategy worked out for one world size: every value decided, nothing left to interpret."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hybrid.contracts.chunk_placement import ChunkPlacement
from hybrid.contracts.layout import Layout
from hybrid.contracts.schedule import Schedule
from hybrid.contracts.schedule_choice import choose_schedule, schedule_name, schedule_placement
from hybrid.units import format_bytes, format_seconds

__all__ = [
    "AmpSettings",
    "CompileSettings",
    "GradientClipping",
    "PipelineSettings",
    "ProfileSettings",
    "RecomputeSettings",
    "ResolvedStrategy",
    "TensorParallelSettings",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientClipping:
    """How gradients are clipped: by their global norm, or element by element."""

    kind: Literal["norm", "value"]
    max_norm: float | None = None
    norm_type: float = 2.0
    clip_value: float | None = None

    def __str__(self) -> str:
        if self.kind == "value":
            return f"every element to ±{self.clip_value:g}"
        return f"global {self.norm_type:g}-norm to {self.max_norm:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AmpSettings:
    """Mixed precision: which type, and what is kept in fp32."""

    dtype: Literal["bfloat16", "float16"]
    level: Literal["O1", "O2"]
    custom_fp32: tuple[str, ...]
    buffer_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """`float32` leaves the buffers as the model has them."""
    init_loss_scaling: float
    growth_interval: int
    growth_factor: float
    backoff_factor: float

    def __str__(self) -> str:
        kept = f", {', '.join(self.custom_fp32)} in float32" if self.custom_fp32 else ""
        buffers = f", buffers in {self.buffer_dtype}" if self.buffer_dtype != "float32" else ""
        scale = f", loss scale from {self.init_loss_scaling:g}" if self.dtype == "float16" else ""
        return f"{self.dtype} {self.level}{kept}{buffers}{scale}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSettings:
    """Which units compute their activations again in backward."""

    units: tuple[str, ...] | None
    policy: Literal["full", "selective"]
    preserve_rng: bool

    def __str__(self) -> str:
        names = ", ".join(self.units) if self.units else "every block"
        rng = "" if self.preserve_rng else ", with other random numbers"
        return f"{self.policy}, {names}{rng}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSettings:
    """Which units are compiled, and how."""

    units: tuple[str, ...] | None
    backend: str
    mode: str | None
    dynamic: bool | None
    fullgraph: bool

    def __str__(self) -> str:
        words = [f"{', '.join(self.units) if self.units else 'every block'} by {self.backend}"]
        words += [f"mode {self.mode}"] if self.mode is not None else []
        words += [] if self.dynamic is None else [f"shapes {'variable' if self.dynamic else 'fixed'}"]
        words += ["each in one graph"] * self.fullgraph
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """Which steps are traced, and where the files go."""

    steps: int
    warmup: int
    directory: str

    def __str__(self) -> str:
        return f"{self.steps} steps after {self.warmup}, into {self.directory}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelSettings:
    """How layers are cut over tp ranks."""

    degree: int
    sequence_parallel: bool
    plan: Mapping[str, Any] | None
    verify: bool | None
    """What is compared with the plain model: True all of it, None a block of each kind, False nothing."""

    def __str__(self) -> str:
        words = [f"over {self.degree} ranks"]
        words += ["activations between layers cut along the sequence"] * self.sequence_parallel
        words += [f"plan of {len(self.plan)} entries"] if self.plan else []
        words += ["verified against the plain model"] * (self.verify is True)
        words += ["not verified"] * (self.verify is False)
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """How layers are spread over the stages of a pipeline."""

    degree: int
    schedule: str
    """A name, or the text of a schedule of one's own."""
    virtual_stages: int
    split: str | tuple[int, ...] | tuple[str, ...] | None
    memory_limit_bytes: int | None = None
    """Of a rank; None for what its device has."""

    @property
    def num_chunks(self) -> int:
        return self.degree * self.virtual_stages

    def __str__(self) -> str:
        chunks = f" of {self.virtual_stages} chunks" if self.virtual_stages > 1 else ""
        split = "auto" if self.split is None else self.split
        shown = split if isinstance(split, str) else ", ".join(map(str, split))
        limit = self.memory_limit_bytes
        most = "" if limit is None else f", each within {format_bytes(limit)}"
        return f"{self.degree} stages{chunks}, schedule {schedule_name(self.schedule)}, layers {shown}{most}"

    @property
    def placement(self) -> ChunkPlacement:
        """How the chunks lie on the stages."""
        return schedule_placement(self.schedule)

    def order(self, num_micro_batches: int) -> Schedule:
        """Each rank's actions. Raises StrategyError: they cannot be for this number of micro-batches."""
        return choose_schedule(
            self.schedule,
            num_stages=self.degree,
            num_micro_batches=num_micro_batches,
            virtual_stages=self.virtual_stages,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedStrategy:
    """All settings as the runtime uses them. Made by `DistributedStrategy.resolve`."""

    world_size: int
    layout: Layout
    data_parallel_size: int
    """dp_replicate × dp_shard: the ranks that get different samples."""
    zero_stage: int
    """0 when sharding is off."""
    shard_size: int
    """Ranks that hold one copy of the cut state; 1 at stage 0."""
    bucket_bytes: int
    overlap_comm: bool
    overlap_param_gather: bool
    grad_reduce: Literal["every_micro_batch", "last_micro_batch"] | int
    grad_dtype: Literal["float32", "bfloat16", "float16", "param"]
    reduce_dtype: Literal["float32", "bfloat16", "float16", "grad"]
    partition: Literal["auto", "element", "parameter"]
    """`auto` is decided by the optimizer, when it is wrapped."""
    units: tuple[str, ...] | None
    prefetch: int
    reshard_after: Literal["unit", "run"]
    offload: Literal["none", "optimizer", "parameters"]
    micro_batch_size: int | None
    accumulate_steps: int
    global_batch_size: int | None
    gradient_clipping: GradientClipping | None
    loss_reduction: Literal["mean", "sum"]
    amp: AmpSettings | None
    recompute: RecomputeSettings | None
    tensor_parallel: TensorParallelSettings | None
    """None at degree 1."""
    pipeline: PipelineSettings | None
    """None at degree 1."""
    compile: CompileSettings | None = None
    """None while it is off."""
    profile: ProfileSettings | None = None
    """None while it is off."""
    seed: int | None
    timeout_seconds: float
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """The plan in a few lines."""
        cut = {
            0: "nothing cut",
            1: "optimizer state cut",
            2: "gradients and optimizer state cut",
            3: "parameters, gradients and optimizer state cut",
        }[self.zero_stage]
        replicas = self.data_parallel_size // self.shard_size
        lines = [
            f"world       {self.world_size} = {self.layout.describe()}",
            f"sharding    ZeRO stage {self.zero_stage} ({cut}); {replicas} × {self.shard_size} ranks "
            f"(replicas × shard_size)",
            *([f"tensor      layers cut {self.tensor_parallel}"] if self.tensor_parallel is not None else []),
            *([f"pipeline    {self.pipeline}"] if self.pipeline is not None else []),
            *([f"offload     {_offload(self)}"] if self.offload != "none" else []),
            f"traffic     buckets of {format_bytes(self.bucket_bytes)}; overlap {_switch(self.overlap_comm)}; "
            f"{_gather(self)}; "
            f"gradients reduced {_reduction(self.grad_reduce)}",
            f"types       gradients of low-precision parameters accumulated in "
            f"{'their own type' if self.grad_dtype == 'param' else self.grad_dtype}; all sent in "
            f"{'the type of accumulation' if self.reduce_dtype == 'grad' else self.reduce_dtype}",
            f"precision   {self.amp or 'as the model'}; recompute {self.recompute or 'off'}",
            *([f"compiled    {self.compile}"] if self.compile is not None else []),
            f"batch       {_batch(self)}",
            f"clipping    {self.gradient_clipping or 'off'}",
            f"loss        {self.loss_reduction} over samples; seed {'not set' if self.seed is None else self.seed}; "
            f"timeout {format_seconds(self.timeout_seconds)}",
            *(f"note        {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def _gather(resolved: ResolvedStrategy) -> str:
    if resolved.zero_stage == 0:
        return "no parameter gather"
    if resolved.zero_stage == 3:
        units = ", ".join(resolved.units) if resolved.units else "every repeated block"
        kept = ", kept for a run of micro-batches" if resolved.reshard_after == "run" else ""
        return f"parameters gathered by unit ({units}), {resolved.prefetch} ahead{kept}"
    return f"parameter gather {'in the next forward' if resolved.overlap_param_gather else 'at the end of the step'}"


def _offload(resolved: ResolvedStrategy) -> str:
    also = ", and the cut parameters" if resolved.offload == "parameters" else ""
    return f"optimizer state, masters and reduced gradients in host memory{also}; the host updates"


def _switch(value: bool) -> str:
    return "on" if value else "off"


def _reduction(grad_reduce: str | int) -> str:
    if isinstance(grad_reduce, int):
        return f"every {grad_reduce} micro-batches"
    return {"every_micro_batch": "every micro-batch", "last_micro_batch": "once per step"}[grad_reduce]


def _batch(resolved: ResolvedStrategy) -> str:
    if resolved.global_batch_size is None:
        many = "es" if resolved.accumulate_steps > 1 else ""
        return f"{resolved.accumulate_steps} micro-batch{many} per step; sizes follow the batches given"
    return (
        f"global {resolved.global_batch_size} = micro {resolved.micro_batch_size} × accumulate "
        f"{resolved.accumulate_steps} × data-parallel {resolved.data_parallel_size}"
    )
