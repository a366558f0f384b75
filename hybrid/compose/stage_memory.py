"""Memory in the balance of a pipeline's stages: what a strategy makes of measured layers, and what a device has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hybrid.compose.memory_limits import Limits
from hybrid.compose.memory_ways import MeasureAgain, refusal, state_rule
from hybrid.contracts.memory_split import MemorySplit, fullest_memory, split_by_memory
from hybrid.contracts.stage_memory import HeldParameter, LayerBytes, MemoryModel
from hybrid.contracts.stage_split import split_by_costs
from hybrid.contracts.tensor_plan import TensorPlan
from hybrid.contracts.tensor_rules import plan_tensor_parallel
from hybrid.errors import ModelError, StrategyError
from hybrid.pipeline.outline import tensors_by_path
from hybrid.pipeline.saved_bytes import MeasuredAs, SavedBytes, measure_saved_bytes
from hybrid.precision.casting import LOW_PRECISION, compute_dtypes
from hybrid.precision.tree import map_tensors
from hybrid.recompute import choose_units
from hybrid.sharding.units import plan_units
from hybrid.strategy import ResolvedStrategy
from hybrid.strategy.resolved import PipelineSettings
from hybrid.tensor.facts import read_facts
from hybrid.tensor.rewrite import is_cut_by_hand

__all__ = ["Measured", "balance", "check_can_be_held", "measure_layers"]

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]
# Adam's two moments, in the type of what is updated; the optimizer is not known before `distributed_optimizer`.
_MOMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What layers need; `memory` is None if it could not be measured, and `note` says why.

    Args:
        has_sample: whether there was something to measure on.
        again: measures under other settings.
    """

    memory: MemoryModel | None
    note: str = ""
    has_sample: bool = True
    again: MeasureAgain = lambda resolved, is_half: None


def balance(costs: Sequence[float], measured: Measured, resolved: ResolvedStrategy, limits: Limits) -> MemorySplit:
    """The layers of each chunk.

    Without a limit of the strategy's own they are those that are cheapest, which is what a planner counts with, as long
    as the device, or the host for all of its ranks, holds them.

    Args:
        measured: with the memory.

    Raises:
        StrategyError: no split fits; fewer layers than chunks.
    """
    assert resolved.pipeline is not None
    memory, most = measured.memory, limits.num_bytes
    assert memory is not None
    if most is None:
        chunks = split_by_costs(costs, memory.schedule.num_chunks)
        return MemorySplit(chunks=chunks, stages=memory.of_stages(chunks), fits=True)
    shared = () if limits.host is None else limits.host.ranks_of_stages(resolved)
    if resolved.pipeline.memory_limit_bytes is None:
        chunks = split_by_costs(costs, memory.schedule.num_chunks)
        stages = memory.of_stages(chunks)
        if fullest_memory(stages, shared) <= most:
            return MemorySplit(chunks=chunks, stages=stages, fits=True)
    found = split_by_memory(costs, memory, limit_bytes=most, shared=shared)
    if not found.fits:
        raise StrategyError(refusal(found, costs, memory, resolved, limits, measured.again))
    return found


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


def measure_layers(
    model: nn.Module,
    resolved: ResolvedStrategy,
    *,
    inputs: _Inputs | None,
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
    buffers = {id(buffer): name for name, buffer in model.named_buffers()}
    layers = [
        _layer(model, unit, more, one, held, buffers) for unit, more, one in zip(calls, others, saved, strict=True)
    ]

    def again(changed: ResolvedStrategy, is_half: bool) -> tuple[MemoryModel, str] | None:
        smaller, size = _halved(inputs) if is_half else (inputs, "")
        if smaller is None:
            return None
        measured = measure_layers(
            model, changed, inputs=smaller, units=units, calls=calls, others=others, is_chain=is_chain
        )
        return None if measured.memory is None else (measured.memory, size)

    schedule = settings.order(resolved.accumulate_steps)
    return Measured(memory=MemoryModel(layers, state_rule(resolved), schedule), again=again)


def _halved(inputs: _Inputs) -> tuple[_Inputs | None, str]:
    """Half of the samples of a micro-batch, and how many they are, in words; None if they cannot be told."""
    sizes = {len(tensor) for tensor in tensors_by_path(*inputs).values() if tensor.dim()}
    size = sizes.pop() if sizes else 0
    if sizes or size < 2:
        return None, ""
    args, kwargs = (
        map_tensors(value, lambda tensor: tensor[: size // 2] if tensor.dim() else tensor) for value in inputs
    )
    return (args, kwargs), f"{size // 2} sample{'s' if size > 3 else ''} instead of {size}"


def _tensor_plan(model: nn.Module, resolved: ResolvedStrategy) -> TensorPlan | None:
    """None where nothing is cut, or is cut already."""
    settings = resolved.tensor_parallel
    if settings is None or is_cut_by_hand(model):
        return None
    return plan_tensor_parallel(
        read_facts(model), degree=settings.degree, plan=settings.plan, sequence_parallel=settings.sequence_parallel
    )


def _layer(
    model: nn.Module,
    unit: str,
    others: Sequence[str],
    saved: SavedBytes,
    held: Mapping[int, tuple[str, HeldParameter]],
    buffers: Mapping[int, str],
) -> LayerBytes:
    module = model.get_submodule(unit)
    own = [*module.parameters(), *(model.get_parameter(fqn) for fqn in others)]
    parameters = dict(held[id(parameter)] for parameter in own)
    weight = max((p.elements * p.parameter_bytes for p in parameters.values() if p.gradient_bytes), default=0)
    return LayerBytes(
        parameters=parameters,
        buffers={buffers[id(buffer)]: buffer.numel() * buffer.element_size() for buffer in module.buffers()},
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
