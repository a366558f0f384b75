"""Memory in the balance of a pipeline's stages: what a strategy makes of measured layers, and what a device has."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from hybrid.compose import context
from hybrid.contracts.memory_split import MemorySplit, split_by_memory
from hybrid.contracts.stage_memory import HeldParameter, LayerBytes, MemoryModel, StageBytes, StateRule
from hybrid.contracts.stage_split import split_by_costs
from hybrid.contracts.tensor_plan import TensorPlan
from hybrid.contracts.tensor_rules import plan_tensor_parallel
from hybrid.errors import HybridError, ModelError, StrategyError
from hybrid.launch.environment import read_environment
from hybrid.pipeline.saved_bytes import MeasuredAs, SavedBytes, measure_saved_bytes
from hybrid.precision.casting import LOW_PRECISION, compute_dtypes
from hybrid.recompute import choose_units
from hybrid.sharding.units import plan_units
from hybrid.strategy import ResolvedStrategy
from hybrid.strategy.resolved import PipelineSettings
from hybrid.tensor.facts import read_facts
from hybrid.tensor.rewrite import is_cut_by_hand
from hybrid.units import format_bytes

__all__ = [
    "HostLimit",
    "Limits",
    "Measured",
    "balance",
    "check_can_be_held",
    "limits_of",
    "measure_layers",
]

_DRY = "dry"
# What the allocator, the communicators and the process itself take of a GPU beside tensors.
_FOR_TENSORS = 0.92
# Adam's two moments, in the type of what is updated; the optimizer is not known before `distributed_optimizer`.
_MOMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimit:
    """Memory that the ranks of a host share."""

    num_bytes: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the stages may need.

    Args:
        stage_bytes: of a rank; None where nothing says it.
        host: of the ranks of a host together, where they compute on its CPUs.
        source: of `stage_bytes`, in words.
    """

    stage_bytes: int | None = None
    host: HostLimit | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What layers need; `memory` is None if it could not be measured, and `note` says why."""

    memory: MemoryModel | None
    note: str = ""
    has_sample: bool = True


def limits_of(resolved: ResolvedStrategy, *, is_here: bool) -> Limits:
    """The strategy's own limit, else, for a job that will run here, what this machine has: all should have the same."""
    assert resolved.pipeline is not None
    own = resolved.pipeline.memory_limit_bytes
    if own is not None:
        return Limits(stage_bytes=own, source=f"pipeline_configs.memory_limit_bytes = {own} ({format_bytes(own)})")
    if not is_here:
        return Limits()
    if context.is_initialized() and context.get_mesh().backend == _DRY:
        return Limits()  # nothing will run here
    try:
        environment = read_environment()
    except HybridError:
        return Limits()  # said where the job starts
    if torch.cuda.is_available():
        device = environment.local_rank % max(1, torch.cuda.device_count())
        has = torch.cuda.get_device_properties(device).total_memory
        source = f"the device has {format_bytes(has)}, of which {_FOR_TENSORS:.0%} are counted on"
        return Limits(stage_bytes=int(has * _FOR_TENSORS), source=source)
    host = _host_bytes()
    if host is None or not environment.launched:
        return Limits()
    return Limits(host=HostLimit(num_bytes=host, num_ranks=environment.local_world_size))


def _host_bytes() -> int | None:
    """Memory of this host, or of the container that this runs in."""
    try:
        found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError):
        return None
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found.append(int(Path(name).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return min(found)


def balance(costs: Sequence[float], memory: MemoryModel, resolved: ResolvedStrategy, limits: Limits) -> MemorySplit:
    """The layers of each chunk.

    Without a limit of the strategy's own they are those that are cheapest, which is what a planner counts with, as long
    as the device holds them.

    Raises:
        StrategyError: no split fits; fewer layers than chunks.
    """
    assert resolved.pipeline is not None
    if resolved.pipeline.memory_limit_bytes is None:
        chunks = split_by_costs(costs, memory.schedule.num_chunks)
        stages = memory.of_stages(chunks)
        if _keeps(stages, resolved, limits):
            return MemorySplit(chunks=chunks, stages=stages, fits=True)
    found = split_by_memory(costs, memory, limit_bytes=limits.stage_bytes)
    if not found.fits:
        raise StrategyError(_too_little(found, memory, limits))
    if limits.host is not None and not _keeps(found.stages, resolved, limits):
        each = limits.host.num_bytes // limits.host.num_ranks
        again = split_by_memory(costs, memory, limit_bytes=each)
        most = _on_fullest_host(again.stages, resolved, limits.host)
        if most > limits.host.num_bytes:
            raise StrategyError(
                f"the {limits.host.num_ranks} ranks of a host need {format_bytes(most)} together, and it has "
                f"{format_bytes(limits.host.num_bytes)}: "
                + _too_little(again, memory, Limits(stage_bytes=each, source=f"{format_bytes(each)} for each of them"))
            )
        return again
    return found


def _keeps(stages: Sequence[StageBytes], resolved: ResolvedStrategy, limits: Limits) -> bool:
    """Whether the stages need no more than there is."""
    most, host = limits.stage_bytes, limits.host
    if most is not None and any(stage.total > most for stage in stages):
        return False
    return host is None or _on_fullest_host(stages, resolved, host) <= host.num_bytes


def check_can_be_held(measured: Measured, settings: PipelineSettings | None) -> None:
    """Raises ModelError: the strategy has a limit, and what the layers need is not known."""
    limit = None if settings is None else settings.memory_limit_bytes
    if limit is not None and measured.memory is None:
        raise ModelError(
            f"pipeline_configs.memory_limit_bytes = {limit} cannot be kept: what the layers need is not known "
            f"({measured.note}). "
            + ("" if measured.has_sample else "Give a sample of a micro-batch, distributed_model(sample=...), or ")
            + "leave it out"
        )


def _on_fullest_host(stages: Sequence[StageBytes], resolved: ResolvedStrategy, host: HostLimit) -> int:
    layout = resolved.layout
    sums: Counter[int] = Counter()
    for rank in range(layout.world_size):
        sums[rank // host.num_ranks] += stages[layout.coordinate(rank)["pp"]].total
    return max(sums.values())


def _too_little(found: MemorySplit, memory: MemoryModel, limits: Limits) -> str:
    fullest = found.fullest
    what = "temporaries of the optimizer's step" if fullest.is_step else "working memory of one layer"
    parts = {
        "state": fullest.state,
        "gradients": fullest.gradients,
        "activations": fullest.activations,
        what: fullest.working,
    }
    ways = {
        "state": "a larger shard_size or ZeRO stage, offload or more stages",
        "gradients": "ZeRO stage 2 or 3 or more stages",
        "activations": "recompute or smaller micro-batches",
        what: "a larger shard_size" if fullest.is_step else "smaller micro-batches or tensor parallel",
    }
    most = max(parts, key=lambda part: parts[part])
    shown = ", ".join(f"{part} {format_bytes(size)}" for part, size in parts.items())
    sizes = ", ".join(str(len(chunk)) for chunk in found.chunks)
    return (
        f"{limits.source}: no split of {len(memory.layers)} layers into {len(found.chunks)} chunks fits. The leanest, "
        f"{sizes}, needs {format_bytes(fullest.total)} on stage {fullest.stage} ({shown}). Nearest: {ways[most]}; or "
        f"pipeline_configs.memory_limit_bytes = {fullest.total}, if there is as much"
    )


def measure_layers(
    model: nn.Module,
    resolved: ResolvedStrategy,
    *,
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None,
    units: Sequence[str],
    calls: Sequence[str],
    others: Sequence[Sequence[str]],
    is_chain: bool,
) -> Measured:
    """What each layer needs.

    Args:
        model: whole; its parameters may be on the meta device.
        inputs: positional and keyword arguments of a micro-batch; None if none is known.
        units: modules that are cut as a whole.
        calls: the unit of each call, in order.
        others: of each call names of the parameters that it holds beside those of its unit.
        is_chain: whether units are layers of a chain.
    """
    settings = resolved.pipeline
    assert settings is not None
    if inputs is None:
        return Measured(
            memory=None, note="without a sample the activations of the layers are not known", has_sample=False
        )
    try:
        plan = _tensor_plan(model, resolved)
        measured_as = _measured_as(model, resolved, plan, is_chain=is_chain)
        saved = measure_saved_bytes(model, *inputs, units=units, num_calls=len(calls), measured_as=measured_as)
        held = _held_parameters(model, resolved, plan)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        return Measured(memory=None, note=f"memory was not measured ({type(error).__name__}: {reason})")
    layers = [_layer(model, unit, more, one, held) for unit, more, one in zip(calls, others, saved, strict=True)]
    schedule = settings.order(resolved.accumulate_steps)
    return Measured(memory=MemoryModel(layers, _rule(resolved), schedule))


def _tensor_plan(model: nn.Module, resolved: ResolvedStrategy) -> TensorPlan | None:
    """None where nothing is cut, or is cut already."""
    settings = resolved.tensor_parallel
    if settings is None or is_cut_by_hand(model):
        return None
    return plan_tensor_parallel(
        read_facts(model), degree=settings.degree, plan=settings.plan, sequence_parallel=settings.sequence_parallel
    )


def _layer(
    model: nn.Module, unit: str, others: Sequence[str], saved: SavedBytes, held: Mapping[int, tuple[str, HeldParameter]]
) -> LayerBytes:
    module = model.get_submodule(unit)
    own = [*module.parameters(), *(model.get_parameter(fqn) for fqn in others)]
    parameters = dict(held[id(parameter)] for parameter in own)
    weight = max((p.elements * p.parameter_bytes for p in parameters.values() if p.gradient_bytes), default=0)
    return LayerBytes(
        parameters=parameters,
        fixed=sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
        kept=saved.kept,
        put_off=saved.put_off,
        recomputed=saved.recomputed,
        working=saved.working + weight,
    )


def _measured_as(
    model: nn.Module, resolved: ResolvedStrategy, plan: TensorPlan | None, *, is_chain: bool
) -> MeasuredAs:
    recomputed: dict[str, Literal["full", "selective"]] = {}
    if resolved.recompute is not None:
        if is_chain:
            blocks = [name for name, layer in model.named_children() if next(layer.parameters(), None) is not None]
        else:
            blocks = [unit.name for unit in plan_units(model, class_names=resolved.units) if not unit.is_around]
        chosen = choose_units(model, resolved.recompute.units, blocks=blocks)
        recomputed = dict.fromkeys(blocks if "" in chosen else chosen, resolved.recompute.policy)
    cuts: dict[str, Literal["column", "row"]] = {}
    if plan is not None:
        for row in plan.rows:
            if row.local_shape != row.global_shape and len(row.global_shape) > 1:
                module = model.get_submodule(row.fqn.rpartition(".")[0])
                is_row = row.local_shape[1:] != row.global_shape[1:]
                if type(module).__name__ == "Conv1D":  # of transformers: its weight lies the other way round
                    is_row = not is_row
                if not isinstance(module, nn.Embedding):  # what a cut table gives is summed to the whole
                    cuts[row.fqn] = "row" if is_row else "column"
    amp = resolved.amp
    return MeasuredAs(
        dtype=None if amp is None else getattr(torch, amp.dtype),
        keeps_masters=amp is not None and amp.level == "O2",
        custom_fp32=() if amp is None else amp.custom_fp32,
        recomputed=recomputed,
        tp_degree=1 if plan is None else plan.degree,
        cuts=cuts,
    )


def _held_parameters(
    model: nn.Module, resolved: ResolvedStrategy, plan: TensorPlan | None
) -> dict[int, tuple[str, HeldParameter]]:
    """By the parameter's id."""
    amp = resolved.amp
    low: dict[str, torch.dtype] = {}
    if amp is not None and amp.level == "O2":
        low = compute_dtypes(model, dtype=getattr(torch, amp.dtype), custom_fp32=amp.custom_fp32)
    local = {} if plan is None else {row.fqn: row.local_shape for row in plan.rows}
    found = {}
    for fqn, parameter in model.named_parameters():
        dtype = low.get(fqn, parameter.dtype)
        gradient = master = 0
        if parameter.requires_grad:
            gradient, master = dtype.itemsize, 4 * (dtype in LOW_PRECISION)
            if dtype in LOW_PRECISION and resolved.grad_dtype != "param":
                gradient = getattr(torch, resolved.grad_dtype).itemsize
        shape = local.get(fqn, tuple(parameter.shape))
        found[id(parameter)] = (
            fqn,
            HeldParameter(
                elements=int(torch.Size(shape).numel()),
                parameter_bytes=dtype.itemsize,
                gradient_bytes=gradient,
                master_bytes=master,
                state_bytes=_MOMENTS * (master or dtype.itemsize) * parameter.requires_grad,
            ),
        )
    return found


def _rule(resolved: ResolvedStrategy) -> StateRule:
    return StateRule(
        zero_stage=resolved.zero_stage,
        num_shards=resolved.shard_size if resolved.zero_stage else 1,
        bucket_bytes=resolved.bucket_bytes,
        reduces_each=resolved.grad_reduce == "every_micro_batch",
        state_on_host=resolved.offload != "none",
        parameters_on_host=resolved.offload == "parameters",
        keeps_gathered=resolved.reshard_after == "run",
        step_bytes=8 if resolved.amp is not None and resolved.amp.level == "O2" else 4,
    )
