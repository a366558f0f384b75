"""The sections of a strategy: which settings there are, their types and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema

from hybrid.errors import StrategyError
from hybrid.strategy.settings import Section
from hybrid.strategy.values import (
    AmpDtype,
    BackendName,
    BackoffFactor,
    Boolean,
    BufferDtype,
    ByteCount,
    CompileMode,
    Count,
    Degree,
    FolderPath,
    GradDtype,
    GradReduce,
    GrowthFactor,
    LossScale,
    Names,
    Order,
    ParallelPlan,
    PositiveOrInfinite,
    ReduceDtype,
    ScheduleOrder,
    StageSplit,
    WholeFromZero,
    one_of,
    read_boolean,
    whole,
)

__all__ = [
    "AmpConfigs",
    "CompileConfigs",
    "GradientClippingConfigs",
    "GradientMergeConfigs",
    "GradientScaleConfigs",
    "HybridConfigs",
    "HybridMpConfigs",
    "HybridPpConfigs",
    "HybridShardingConfigs",
    "PipelineConfigs",
    "ProfileConfigs",
    "RecomputeConfigs",
    "ShardingConfigs",
    "TensorParallelConfigs",
]

ZeroStage = Annotated[
    Literal[0, 1, 2, 3],
    BeforeValidator(whole(0, 3)),
    WithJsonSchema({"type": "integer", "enum": [0, 1, 2, 3]}),
]
ReshardAfter = Annotated[Literal["unit", "run"], BeforeValidator(one_of("unit", "run"))]


def _read_offload(value: object) -> str:
    """A word, or Fleet's boolean."""
    if value is None:
        return "none"
    try:
        return "optimizer" if read_boolean(value) else "none"
    except ValueError:
        return one_of("none", "optimizer", "parameters")(value)


Offload = Annotated[
    Literal["none", "optimizer", "parameters"],
    BeforeValidator(_read_offload),
    WithJsonSchema({"enum": ["none", "optimizer", "parameters", False, True]}),
]
Partition = Annotated[Literal["auto", "element", "parameter"], BeforeValidator(one_of("auto", "element", "parameter"))]


class ShardingConfigs(Section):
    """ZeRO: what is cut over the data-parallel ranks, and how its traffic runs. Needs `sharding = True`."""

    PATH: ClassVar[str] = "sharding_configs"
    ALIASES: ClassVar[Mapping[str, str]] = {"sharding_degree": "shard_size"}

    stage: ZeroStage = 1
    """What each rank keeps only its part of: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too."""
    shard_size: Degree | None = None
    """Data-parallel ranks that together hold one copy of the cut state; all of them if not given (or -1)."""
    bucket_bytes: ByteCount = 25 * 2**20
    """Size towards which parameters are grouped for one collective."""
    overlap_comm: Boolean = True
    """Reduce gradients while backward goes on."""
    overlap_param_gather: Boolean = False
    """Gather updated parameters during the next forward instead of at the end of the step (`train_batch`)."""
    grad_reduce: GradReduce = "auto"
    """When gradients are reduced under accumulation: every micro-batch, the last one, or every k-th."""
    grad_dtype: GradDtype = "float32"
    """Type in which gradients of low-precision parameters are accumulated; `param` is the parameters' own."""
    reduce_dtype: ReduceDtype = "grad"
    """Type in which gradients are sent; `grad` is that in which they are accumulated."""
    partition: Partition = "auto"
    """How state is cut: anywhere (`element`), or each parameter whole to one rank (`parameter`)."""
    units: Names | None = None
    """Class names of the modules that are gathered and freed as a whole (stage 3)."""
    prefetch: WholeFromZero = 1
    """Units gathered ahead of the one that computes (stage 3)."""
    reshard_after: ReshardAfter = "unit"
    """How long a gathered unit stays whole: while it computes, or for a run of micro-batches (stage 3)."""
    offload: Offload = "none"
    """What lies in host memory: optimizer state, masters and reduced gradients (`optimizer`, also `true`); at stage 3
    the cut parameters as well (`parameters`)."""


class TensorParallelConfigs(Section):
    """Weights cut inside layers. Needs `tensor_parallel = True`."""

    PATH: ClassVar[str] = "tensor_parallel_configs"
    ALIASES: ClassVar[Mapping[str, str]] = {
        "tensor_parallel_degree": "degree",
        "mp_degree": "degree",
        "tp_degree": "degree",
    }

    degree: Degree | None = None
    """Ranks over which each layer is cut."""
    sequence_parallel: Boolean = False
    """Also cut the activations between the layers, along the sequence."""
    plan: ParallelPlan | None = None
    """Pattern of module names -> how they are cut, where the model's own plan and the known families do not say."""
    verify: Boolean | None = None
    """Compare with the plain model in the first forward, and stop at the first module that differs: not given, a block
    of each kind that the plan or code of your own is in; `true`, the whole model; `false`, nothing, at your risk."""


class PipelineConfigs(Section):
    """Layers spread over stages. Needs `pipeline = True`."""

    PATH: ClassVar[str] = "pipeline_configs"
    ALIASES: ClassVar[Mapping[str, str]] = {"pp_degree": "degree", "schedule_mode": "schedule"}

    degree: Degree | None = None
    """Number of stages."""
    accumulate_steps: Count | None = None
    """Micro-batches per optimizer step; the same setting as the strategy's own `accumulate_steps`."""
    micro_batch_size: Count | None = None
    """Samples per micro-batch; the same setting as the strategy's own `micro_batch_size`."""
    schedule: ScheduleOrder = "1f1b"
    """Order of forwards and backwards on each stage: a name, or a schedule of your own, by file or text."""
    virtual_stages: Count = 1
    """Chunks of layers on each stage."""
    split: StageSplit | None = None
    """Which layers each chunk holds: `auto` (balanced), `uniform`, `layer:ClassName`, the number of each, or the first
    layer of each chunk but the first."""
    memory_limit_bytes: ByteCount | None = None
    """What a rank may need, at most, where `split` is `auto`; what the device has if not given."""


class AmpConfigs(Section):
    """Mixed precision. Needs `amp = True`."""

    PATH: ClassVar[str] = "amp_configs"
    ALIASES: ClassVar[Mapping[str, str]] = {
        "incr_every_n_steps": "growth_interval",
        "incr_ratio": "growth_factor",
        "decr_ratio": "backoff_factor",
        "custom_black_list": "custom_fp32",
    }

    dtype: AmpDtype = "bfloat16"
    """Type in which the model computes."""
    level: Annotated[Literal["O1", "O2"], BeforeValidator(one_of("O1", "O2"))] = "O1"
    """O1 casts in each operation; O2 keeps low-precision weights and fp32 masters."""
    custom_fp32: Names | None = None
    """Names or classes of the modules that compute in fp32."""
    buffer_dtype: BufferDtype = "float32"
    """Type of the model's floating point buffers; `float32` leaves them as the model has them."""
    init_loss_scaling: LossScale = 65536.0
    """First loss scale (float16 only, as the three that follow; `train_batch`)."""
    growth_interval: Count = 2000
    """Steps without overflow after which the loss scale grows."""
    growth_factor: GrowthFactor = 2.0
    """Factor by which it grows."""
    backoff_factor: BackoffFactor = 0.5
    """Factor by which it shrinks after an overflow."""


class RecomputeConfigs(Section):
    """Activations computed again in backward instead of kept. Needs `recompute = True`."""

    PATH: ClassVar[str] = "recompute_configs"

    units: Names | None = None
    """Names or classes of the modules whose activations are recomputed; every repeated block if not given."""
    policy: Annotated[Literal["full", "selective"], BeforeValidator(one_of("full", "selective"))] = "full"
    """`full` keeps only the inputs; `selective` keeps the results of expensive operations as well."""
    preserve_rng: Boolean = True
    """The second forward draws the same random numbers as the first."""


class CompileConfigs(Section):
    """Units compiled by torch.compile. Needs `compile = True`."""

    PATH: ClassVar[str] = "compile_configs"

    units: Names | None = None
    """Names or classes of the modules to compile, each by itself; every repeated block if not given."""
    backend: BackendName = "inductor"
    """What makes programs of the graphs, one of `torch.compiler.list_backends()`."""
    mode: CompileMode | None = None
    """What inductor spends its time on: `default`, or `max-autotune-no-cudagraphs`."""
    dynamic: Boolean | None = None
    """Shapes as variables: from the start, never, or (not given) those that have been seen to change."""
    fullgraph: Boolean = False
    """Stop at a unit that cannot be one graph, instead of running what lies between its graphs as it is."""


class ProfileConfigs(Section):
    """Some steps traced, and where their time went. Needs `profile = True`."""

    PATH: ClassVar[str] = "profile_configs"

    steps: Count = 3
    """Steps that are traced (`train_batch`)."""
    warmup: WholeFromZero = 3
    """Steps before them that are not."""
    directory: FolderPath = "hybrid_profile"
    """Folder for a trace per rank and `profile.json`; what lies there of an earlier run is replaced."""


class GradientMergeConfigs(Section):
    """Fleet's name for accumulation over micro-batches. Needs `gradient_merge = True`."""

    PATH: ClassVar[str] = "gradient_merge_configs"
    ALIASES: ClassVar[Mapping[str, str]] = {"accumulate_steps": "k_steps"}

    k_steps: Count | None = None
    """Micro-batches per optimizer step; the same setting as the strategy's own `accumulate_steps`."""


class GradientClippingConfigs(Section):
    """Clip by the global norm (`max_norm`, `norm_type`) or element by element (`clip_value`)."""

    PATH: ClassVar[str] = "gradient_clipping"
    ALIASES: ClassVar[Mapping[str, str]] = {"clip_norm": "max_norm"}

    max_norm: PositiveOrInfinite | None = None
    """Largest global norm; infinity measures the norm and never clips."""
    norm_type: PositiveOrInfinite = 2.0
    """p of the p-norm; infinity for the largest element."""
    clip_value: PositiveOrInfinite | None = None
    """Largest absolute value of an element."""

    @classmethod
    def read(cls, value: Any) -> Self:
        """A bare number is the norm: `gradient_clipping = 1.0`."""
        if isinstance(value, Real | str):
            value = {"max_norm": value}
        if isinstance(value, Mapping) and not value:
            raise StrategyError("gradient_clipping = {}: give max_norm or clip_value, or None to switch it off")
        return super().read(value)


class GradientScaleConfigs(Section):
    """Fleet's name for how losses are joined; answered by the table of Fleet's fields."""

    PATH: ClassVar[str] = "gradient_scale_configs"


class HybridMpConfigs(Section):
    """Fleet's fine settings of tensor parallel; all answered by the table of Fleet's fields."""

    PATH: ClassVar[str] = "hybrid_configs.mp_configs"


class HybridPpConfigs(Section):
    """Fleet's fine settings of the pipeline; all answered by the table of Fleet's fields."""

    PATH: ClassVar[str] = "hybrid_configs.pp_configs"


class HybridShardingConfigs(Section):
    """Fleet's fine settings of sharding; all answered by the table of Fleet's fields."""

    PATH: ClassVar[str] = "hybrid_configs.sharding_configs"


class HybridConfigs(Section):
    """All degrees in one place, with Fleet's names. A degree above 1 switches its feature on."""

    PATH: ClassVar[str] = "hybrid_configs"
    ALIASES: ClassVar[Mapping[str, str]] = {"tp_degree": "mp_degree", "cp_degree": "sep_degree"}

    dp_degree: Degree | None = None
    """Replicas of the sharded state (`dp_replicate`); -1 derives it."""
    sharding_degree: Degree | None = None
    """Ranks that hold one copy of the cut state (`dp_shard`, the same setting as `shard_size`)."""
    mp_degree: Degree | None = None
    """Tensor-parallel ranks (`tp`)."""
    pp_degree: Degree | None = None
    """Pipeline stages (`pp`)."""
    sep_degree: Degree | None = None
    """Ranks that share a sequence (`cp`)."""
    order: Order | None = None
    """Axes from the outermost to the innermost: dp, sharding, pp, sep and mp in any order."""
    mp_configs: HybridMpConfigs = Field(default_factory=HybridMpConfigs)
    """Fleet's fine settings of tensor parallel."""
    pp_configs: HybridPpConfigs = Field(default_factory=HybridPpConfigs)
    """Fleet's fine settings of the pipeline."""
    sharding_configs: HybridShardingConfigs = Field(default_factory=HybridShardingConfigs)
    """Fleet's fine settings of sharding."""
