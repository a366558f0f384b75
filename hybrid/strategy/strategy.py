"""`DistributedStrategy`: everything a user can say about how a model is trained over many devices."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BeforeValidator, Field, WithJsonSchema

from hybrid.errors import StrategyError
from hybrid.strategy import text_form
from hybrid.strategy.explain import explanation
from hybrid.strategy.live_model import Model, is_module
from hybrid.strategy.resolve import resolve, work_out
from hybrid.strategy.resolved import ResolvedStrategy
from hybrid.strategy.schema import schema_of
from hybrid.strategy.sections import (
    AmpConfigs,
    CompileConfigs,
    GradientClippingConfigs,
    GradientMergeConfigs,
    GradientScaleConfigs,
    HybridConfigs,
    PipelineConfigs,
    ProfileConfigs,
    RecomputeConfigs,
    ShardingConfigs,
    TensorParallelConfigs,
)
from hybrid.strategy.settings import Settings
from hybrid.strategy.summary import summary
from hybrid.strategy.values import Boolean, Count, Positive, one_of, whole
from hybrid.strategy.words import other_tool

__all__ = ["DistributedStrategy"]

Seed = Annotated[int, BeforeValidator(whole(0, 2**63 - 1)), WithJsonSchema({"type": "integer", "minimum": 0})]


class DistributedStrategy(Settings):
    """How a model is trained over many devices; the same object on every process.

        strategy = hybrid.DistributedStrategy()
        strategy.sharding = True
        strategy.sharding_configs = {"stage": 2, "shard_size": 8}
        print(strategy.explain(world_size=16))

    Every assignment is checked at once and replaces what was there; what can only be judged together (degrees
    against the world size, sections against their flags) is checked by `resolve`. Problems come as one
    `StrategyError` that lists them all.
    """

    PATH: ClassVar[str] = ""

    if TYPE_CHECKING:  # pydantic's metaclass would announce only the fields, with their own types

        def __init__(self, settings: Mapping[str, Any] | None = None, /, **more: Any) -> None: ...

    sharding: Boolean = False
    """ZeRO: cut optimizer state, gradients, parameters over the data-parallel ranks."""
    sharding_configs: ShardingConfigs = Field(default_factory=ShardingConfigs)
    """Settings of `sharding`."""
    tensor_parallel: Boolean = False
    """Cut weights inside layers."""
    tensor_parallel_configs: TensorParallelConfigs = Field(default_factory=TensorParallelConfigs)
    """Settings of `tensor_parallel`."""
    pipeline: Boolean = False
    """Spread layers over stages."""
    pipeline_configs: PipelineConfigs = Field(default_factory=PipelineConfigs)
    """Settings of `pipeline`."""
    hybrid_configs: HybridConfigs = Field(default_factory=HybridConfigs)
    """All degrees, and the order of the axes, with Fleet's names."""
    amp: Boolean = False
    """Mixed precision."""
    amp_configs: AmpConfigs = Field(default_factory=AmpConfigs)
    """Settings of `amp`."""
    recompute: Boolean = False
    """Compute activations again in backward instead of keeping them."""
    recompute_configs: RecomputeConfigs = Field(default_factory=RecomputeConfigs)
    """Settings of `recompute`."""
    compile: Boolean = False
    """Compile each repeated block by torch.compile."""
    compile_configs: CompileConfigs = Field(default_factory=CompileConfigs)
    """Settings of `compile`."""
    profile: Boolean = False
    """Trace some steps of `train_batch`, then print where their time went and what to change."""
    profile_configs: ProfileConfigs = Field(default_factory=ProfileConfigs)
    """Settings of `profile`."""
    gradient_merge: Boolean = False
    """Fleet's name for accumulation over micro-batches."""
    gradient_merge_configs: GradientMergeConfigs = Field(default_factory=GradientMergeConfigs)
    """Settings of `gradient_merge`."""
    gradient_scale_configs: GradientScaleConfigs = Field(default_factory=GradientScaleConfigs)
    """Fleet's name for `loss_reduction`."""
    gradient_clipping: GradientClippingConfigs | None = None
    """A number (largest global norm), or a dict with max_norm and norm_type, or with clip_value; None is off."""
    micro_batch_size: Count | None = None
    """Samples per rank and micro-batch."""
    accumulate_steps: Count | None = None
    """Micro-batches per optimizer step; 1 unless given or derived."""
    global_batch_size: Count | None = None
    """Samples per optimizer step over all ranks: micro_batch_size × accumulate_steps × data-parallel size."""
    loss_reduction: Annotated[Literal["mean", "sum"], BeforeValidator(one_of("mean", "sum"))] = "mean"
    """How the losses of micro-batches and ranks are joined; it must be what the loss function does with samples."""
    seed: Seed | None = None
    """Seed of the random states, if the library shall set them."""
    timeout_seconds: Positive = 600.0
    """A collective that does not complete within this time ends the job."""

    # ------------------------------------------------------------ working it out

    def resolve(self, world_size: int) -> ResolvedStrategy:
        """Every value decided for this many processes; `StrategyError` with all problems otherwise."""
        return resolve(self, world_size)

    def problems(self, world_size: int | None = None) -> tuple[str, ...]:
        """What `resolve` would refuse; without a world size, what is wrong with any of them."""
        return work_out(self, world_size).problems

    def explain(self, model: Model | int | None = None, world_size: int | None = None, *, sample: Any = None) -> str:
        """A table of every value and where it came from: the user, a default, or derived from what.

        With a model also what becomes of each of its parameters: shape, shape on each rank, rule and source, and why
        what is whole stays whole; and under a pipeline the layers, parameters and flops of each stage, how many
        micro-batches it keeps, and the bubble. Nothing is started; the model may be on the meta device, and a
        `PipelineLayer` need not be built.

            print(strategy.explain(8))
            print(strategy.explain(model, world_size=8))
            print(strategy.explain(model, world_size=8, sample=input_ids))

        Args:
            model: a model, or the world size alone.
            world_size: number of processes; without it degrees that follow from it stay open.
            sample: an input of the first layer, a micro-batch best; only its shapes and types are looked at.

        Raises:
            StrategyError: settings that cannot work, or do not fit the model; all of them.
            ModelError: the model cannot be trained this way; without rules for it, with a plan to paste.
        """
        if is_module(model):
            return explanation(self, world_size, model=model, sample=sample).to_text()
        if sample is not None:
            raise StrategyError("explain: a sample is an input of a model, and none is given; give the model first")
        if model is not None and world_size is not None:
            raise StrategyError(
                f"explain: expected a torch.nn.Module and a world size, got {model!r} and {world_size!r}"
            )
        return explanation(self, cast("int | None", model if world_size is None else world_size)).to_text()

    # ------------------------------------------------------------ text form

    def to_json(self, *, indent: int = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def to_yaml(self) -> str:
        return text_form.to_yaml(self.to_dict())

    def save(self, path: str | Path) -> None:
        """Write the text form; `.json` as JSON, `.yaml` or `.yml` as YAML."""
        text_form.write_text(Path(path), as_json=self.to_json, as_yaml=self.to_yaml)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        if not isinstance(settings, Mapping):
            raise StrategyError(f"a strategy is a dict of settings, got {type(settings).__name__}: {settings!r}")
        return cls(settings)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(text_form.read_json(text))

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        return cls.from_dict(text_form.read_yaml(text))

    @classmethod
    def load(cls, path: str | Path, *, world_size: int | None = None) -> Self:
        """Read a text form; the problems of the file are named with its path.

        With a world size, a file with wrong settings is told those of the right ones beside them on that world size as
        well: all problems at once.
        """
        source = Path(path)
        try:
            settings = text_form.read_text(source)
            loaded = cls()
            problems = loaded.assign(settings) if isinstance(settings, Mapping) else cls.from_dict(settings).problems()
            if problems and world_size is not None:
                problems = [*problems, *(p for p in loaded.problems(world_size) if p not in problems)]
            if problems and isinstance(settings, Mapping) and (tool := other_tool(settings)) is not None:
                hint = (
                    f"this seems to be a file of {tool}: `hybrid import {source}` writes the strategy that it becomes"
                )
                problems = [hint, *problems]
        except StrategyError as error:
            problems = list(error.problems)
        if problems:
            raise StrategyError([f"{source}: {problem}" for problem in problems])
        return loaded

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON Schema of the text form, for editors; it knows exactly the keys that are accepted."""
        return schema_of(cls)

    def digest(self) -> str:
        """A short hash of what was set: equal on all processes that were given the same settings."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    # ------------------------------------------------------------ for people

    def __repr__(self) -> str:
        given = "".join(f"    {key}={value!r},\n" for key, value in self.to_dict().items())
        plan = "".join(f"    # {line}\n" for line in textwrap.wrap(summary(self), width=100))
        return f"DistributedStrategy(\n{given}{plan})"

    __str__ = __repr__
