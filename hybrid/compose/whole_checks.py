"""What is refused of a whole model before anything starts: settings that do not fit it, states that no stage would own.

A stage of a pipeline sees its own layers only, so what depends on the model is decided here, alike on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hybrid.compose.compiling import check_compiled, is_inside
from hybrid.compose.own_forward import check_held, check_own_units
from hybrid.compose.pipeline import Stages
from hybrid.compose.stage_plan import PlannedStages
from hybrid.contracts.chunk_placement import ChunkPlacement, chunk_rank
from hybrid.errors import ModelError
from hybrid.precision.casting import check_buffers_to_cast, compute_dtypes
from hybrid.recompute import choose_units
from hybrid.sharding.units import plan_units
from hybrid.strategy import ResolvedStrategy
from hybrid.strategy.resolved import AmpSettings, CompileSettings, RecomputeSettings

__all__ = ["ChosenUnits", "check_settings", "check_stages", "check_whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenUnits:
    """Names of modules, on whatever stages."""

    recomputed: tuple[str, ...]
    compiled: tuple[str, ...]

    @property
    def recomputed_in_programs(self) -> tuple[str, ...]:
        """Those to recompute that are compiled, or part of a module that is."""
        return tuple(name for name in self.recomputed if any(is_inside(name, other) for other in self.compiled))

    def on(self, stages: Stages | None) -> ChosenUnits:
        """Those of this rank's stage."""
        if stages is None:
            return self
        recomputed, compiled = (
            tuple(name for name in names if stages.staged.is_here(name)) for names in (self.recomputed, self.compiled)
        )
        return ChosenUnits(recomputed=recomputed, compiled=compiled)


def check_whole(model: nn.Module, resolved: ResolvedStrategy, planned: PlannedStages | None) -> ChosenUnits:
    """`check_settings` and `check_stages` of a strategy, and of its stages where it has any."""
    chosen = check_settings(
        model,
        amp=resolved.amp,
        recompute=resolved.recompute,
        grad_dtype=resolved.grad_dtype,
        units=resolved.units,
        is_staged=planned is not None and planned.own_forward is None,
        compiled=resolved.compile,
        zero_stage=resolved.zero_stage,
    )
    pipeline = resolved.pipeline
    if pipeline is not None and planned is not None and planned.own_forward is not None:
        check_own_units(planned.own_forward, chosen.recomputed, setting="recompute")
        check_own_units(planned.own_forward, chosen.compiled, setting="compile")
        check_held(model, planned.own_forward, num_stages=pipeline.degree, placement=pipeline.placement)
    elif pipeline is not None and planned is not None:
        check_stages(model, planned.chunks, num_stages=pipeline.degree, placement=pipeline.placement)
    return chosen


def check_settings(
    model: nn.Module,
    *,
    amp: AmpSettings | None,
    recompute: RecomputeSettings | None,
    grad_dtype: str,
    units: Sequence[str] | None,
    is_staged: bool,
    compiled: CompileSettings | None = None,
    zero_stage: int = 0,
) -> ChosenUnits:
    """That what the strategy names or changes is there. Returns the modules that it chooses.

    Args:
        model: with all of its layers; their parameters may be on the meta device.
        amp, recompute, grad_dtype, units: the strategy's.
        is_staged: whether a pipeline cuts it, whose layers are the units then.
        compiled, zero_stage: the strategy's.

    Raises:
        ModelError: names of `custom_fp32`, of the `units` of a section or of `units` that the model does not have; a
            tied parameter that is in `custom_fp32` at one place only; settings that would do nothing; modules that
            cannot be compiled.
    """
    low: dict[str, torch.dtype] = {}
    if amp is not None:
        low = compute_dtypes(model, dtype=getattr(torch, amp.dtype), custom_fp32=amp.custom_fp32)
        if amp.buffer_dtype != "float32":
            check_buffers_to_cast(model, dtype=getattr(torch, amp.buffer_dtype), custom_fp32=amp.custom_fp32)
    _check_grad_dtype(dict(model.named_parameters()), grad_dtype, low if amp is not None and amp.level == "O2" else {})
    if is_staged:
        blocks = [name for name, layer in model.named_children() if next(layer.parameters(), None) is not None]
    else:
        blocks = [unit.name for unit in plan_units(model, class_names=units) if not unit.is_around]
    chosen = choose_units(model, recompute.units, blocks=blocks) if recompute is not None else ()
    # A chain that is cut runs no forward of its own, so where its own class is named its layers are meant.
    recomputed = tuple(blocks) if is_staged and "" in chosen else chosen
    if compiled is None:
        return ChosenUnits(recomputed=recomputed, compiled=())
    chosen = choose_units(model, compiled.units, blocks=blocks, feature="compile")
    names = tuple(blocks) if is_staged and "" in chosen else chosen
    check_compiled(model, names, blocks=blocks if zero_stage == 3 else (), recomputed=recomputed, recompute=recompute)
    return ChosenUnits(recomputed=recomputed, compiled=names)


def _check_grad_dtype(
    parameters: Mapping[str, nn.Parameter], grad_dtype: str, low_dtypes: Mapping[str, torch.dtype]
) -> None:
    dtypes = {low_dtypes.get(fqn, p.dtype) for fqn, p in parameters.items() if p.requires_grad}
    if grad_dtype in {"bfloat16", "float16"} and not dtypes & {torch.bfloat16, torch.float16}:
        raise ModelError(
            f"sharding_configs['grad_dtype'] = {grad_dtype!r} is for low-precision parameters, and this "
            f"model has {sorted(map(str, dtypes))}: it would do nothing. Leave it out, or use reduce_dtype "
            "for what is sent"
        )


def check_stages(
    model: nn.Module,
    chunks: Sequence[range],
    *,
    num_stages: int,
    placement: ChunkPlacement = ChunkPlacement.ROUND,
) -> None:
    """That every state of a chain of layers is that of one stage, or a parameter that several stages tie.

    Args:
        model: with all of its layers.
        chunks: the layers of each chunk.
        num_stages: degree of the pipeline.
        placement: of chunks on stages.

    Raises:
        ModelError: a parameter outside the layers; a buffer of layers on several stages, or memory of parameters there.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name and "." not in name]
    layers = names[: chunks[-1].stop]
    outside = [name for name, _ in model.named_parameters() if name.partition(".")[0] not in layers]
    if outside:
        raise ModelError(
            f"parameter {outside[0]!r} belongs to the {type(model).__name__} itself and to none of its layers, so no "
            "stage of a pipeline would hold and train it: put it into the layer that uses it, or set "
            "pipeline_configs.degree = 1"
        )
    stage_of = {
        layers[index]: chunk_rank(chunk, num_stages, placement) for chunk, held in enumerate(chunks) for index in held
    }
    _check_buffers(model, stage_of)
    _check_memory(model, stage_of)


def _check_buffers(model: nn.Module, stage_of: Mapping[str, int]) -> None:
    first: dict[tuple[str, int], str] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name.partition(".")[0] not in stage_of:
            continue  # the chain's own, which no layer reads
        known = first.setdefault(_identity(buffer), name)
        stages = stage_of[known.partition(".")[0]], stage_of[name.partition(".")[0]]
        if stages[0] != stages[1]:
            owners = [type(model.get_submodule(fqn.rpartition(".")[0])).__name__ for fqn in (known, name)]
            raise ModelError(
                f"buffer {known!r} of a {owners[0]} on pipeline stage {stages[0]} and {name!r} of a {owners[1]} on "
                f"stage {stages[1]} are one tensor: each stage would go on with a copy of its own, which one process "
                "has not. Give each layer a buffer of its own (a second module, buffer.clone()), or choose a split "
                "that puts both layers on one stage"
            )


def _identity(tensor: torch.Tensor) -> tuple[str, int]:
    """Equal for tensors over the same memory."""
    if tensor.is_meta or tensor.numel() == 0 or tensor.layout is not torch.strided:
        return "object", id(tensor)
    return "memory", tensor.untyped_storage().data_ptr()


def _check_memory(model: nn.Module, stage_of: Mapping[str, int]) -> None:
    """Two parameters over one memory: on one rank the engine refuses them, as it would be updated twice."""
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta or parameter.numel() == 0 or parameter.layout is not torch.strided:
            continue
        known, held = first.setdefault(parameter.data_ptr(), (name, parameter))
        stages = stage_of[known.partition(".")[0]], stage_of[name.partition(".")[0]]
        if held is not parameter and stages[0] != stages[1]:
            raise ModelError(
                f"parameters {known!r} on pipeline stage {stages[0]} and {name!r} on stage {stages[1]} are two "
                "nn.Parameters over one memory, which the stages cannot share: make them one nn.Parameter "
                "(b.weight = a.weight), which is kept the same on both"
            )
