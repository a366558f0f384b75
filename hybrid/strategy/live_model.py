"""A live model, for `explain`. The one place on this floor that imports torch, and it does so when it is called."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from hybrid.contracts.chunk_placement import ChunkPlacement
from hybrid.contracts.stage_memory import StageBytes
from hybrid.contracts.tensor_facts import ModelFacts
from hybrid.errors import ModelError, StrategyError
from hybrid.strategy.resolve import amp_settings, compile_settings, recompute_settings
from hybrid.strategy.resolved import PipelineSettings, ResolvedStrategy

if TYPE_CHECKING:
    from torch import nn

    Model: TypeAlias = nn.Module
else:
    Model = Any

__all__ = [
    "Crossing",
    "LayerFacts",
    "Model",
    "OwnStages",
    "build",
    "chain_memory",
    "check_settings",
    "check_stages",
    "chunks_of",
    "facts_of",
    "is_module",
    "layers_of",
    "num_cut_layers",
    "own_stages",
    "units_of",
    "whole",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One layer of a chain.

    Args:
        name: in the model.
        class_name: of what it is, or is built from.
        parameters: first name in this layer -> (which parameter of the model it is, its elements).
        forward_flops: of the sample; None where they were not measured.
        weight: what it counts when layers are balanced.
    """

    name: str
    class_name: str
    parameters: dict[str, tuple[int, int]]
    forward_flops: int | None
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One tensor that crosses a cut, on the sample.

    Args:
        unit: the module that returned it.
        call: which call of the module that was, from 0.
        path: where it stands in what the module returned; empty for all of it.
    """

    unit: str
    call: int
    path: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnStages:
    """A model that is cut by its own forward.

    Args:
        chunks: the calls of units of each chunk.
        layers: of each call its unit.
        crossing: of each chunk but the last what crosses the cut behind it.
        memory: what each stage needs; empty if it is not known.
    """

    chunks: tuple[range, ...]
    layers: tuple[LayerFacts, ...]
    crossing: tuple[tuple[Crossing, ...], ...]
    memory: tuple[StageBytes, ...] = ()


def is_module(value: object) -> TypeGuard[Model]:
    """Whether it is a torch module; where torch is not loaded there are none."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_chain(model: Model) -> bool:
    """Whether a pipeline cuts it between layers: a Sequential whose forward is the plain one, or a list of layers."""
    from hybrid.pipeline import layers  # it is a module, so torch is there

    return layers.is_chain(model)


def facts_of(model: Model) -> ModelFacts:
    """Names and sizes, for the rules."""
    from hybrid.tensor.facts import read_facts  # torch comes with it

    return read_facts(model)


def whole(model: Model) -> tuple[Model, str]:
    """The model with all of its layers; of a PipelineLayer that is not built a copy, and a note if it takes memory.

    Raises:
        ModelError: a layer that cannot be built at all.
    """
    from hybrid.pipeline.layers import PipelineLayer  # torch comes with it, as below

    if not isinstance(model, PipelineLayer) or model.is_built:
        return model, ""
    try:
        return copy.deepcopy(model).build(device="meta"), ""
    except ModelError:
        raise
    except Exception as error:
        note = f"built in full, since a layer cannot be built on the meta device ({_shown(error)})"
    try:
        return copy.deepcopy(model).build(), note
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"a layer of the model cannot be built: {_shown(error)}") from error


def chunks_of(
    model: Model, settings: PipelineSettings, *, sample: Any = None, resolved: ResolvedStrategy | None = None
) -> tuple[range, ...]:
    """The layers of each chunk, as `distributed_model` will cut them.

    `resolved`: the strategy for a world size; without it layers are balanced by time alone.

    Raises:
        StrategyError: fewer layers than chunks, counts that do not add up, ...
        ModelError: a model that is no chain of layers.
    """
    from hybrid.compose.stage_plan import plan_stages

    is_balanced = getattr(model, "seg_method", settings.split) in {None, "auto"}
    # No schedule is asked for here: a number of micro-batches with which any of them can be made.
    asked: Any = resolved or SimpleNamespace(pipeline=settings, accumulate_steps=settings.degree)
    planned = plan_stages(
        model,
        asked,
        sample=sample if is_balanced else None,
        is_here=False,
        weighs_memory=resolved is not None,
    )
    assert planned is not None  # it has a pipeline
    return planned.chunks


def own_stages(
    model: Model, settings: PipelineSettings, *, sample: Any = None, resolved: ResolvedStrategy | None = None
) -> OwnStages | None:
    """How a model is cut that is no chain of layers; None of a chain. `resolved`: see `chunks_of`.

    Raises:
        StrategyError: fewer calls of units than chunks, a split that does not fit them.
        ModelError: no sample, or a forward that cannot be followed.
    """
    from hybrid.compose import own_forward
    from hybrid.compose.stage_plan import plan_own_stages
    from hybrid.pipeline.flow import crossing_values

    if is_chain(model):
        return None
    if resolved is None:
        plan = own_forward.plan_own(model, settings, sample=sample)
    else:
        plan = plan_own_stages(model, resolved, sample=sample, is_here=False, measures=True)
    own_forward.check_held(model, plan, num_stages=settings.degree, placement=settings.placement)
    known = dict(model.named_parameters())
    calls: dict[str, int] = {}
    numbers = []
    for call in plan.flow.calls:
        numbers.append(calls.get(call.unit, 0))
        calls[call.unit] = numbers[-1] + 1
    layers = []
    for call, weight in zip(plan.flow.calls, plan.costs.weights, strict=True):
        unit = model.get_submodule(call.unit)
        held = {f"{call.unit}.{fqn}": parameter for fqn, parameter in unit.named_parameters()}
        held |= {fqn: known[fqn] for fqn in sorted(call.parameters)}
        layers.append(
            LayerFacts(
                name=call.unit,
                class_name=type(unit).__name__,
                parameters={fqn: (id(parameter), parameter.numel()) for fqn, parameter in held.items()},
                forward_flops=call.forward_flops,
                weight=weight,
            )
        )
    last = {fqn: (id(known[fqn]), known[fqn].numel()) for fqn in sorted(plan.flow.output_parameters)}
    layers[-1] = replace(layers[-1], parameters={**layers[-1].parameters, **last})
    crossing = []
    for places in crossing_values(plan.flow, plan.chunks):
        sizes = [
            (plan.flow.calls[index].unit, numbers[index], path, plan.flow.size_of((index, path)))
            for index, path in places
        ]
        crossing.append(
            tuple(
                Crossing(unit=unit, call=call, path=path, shape=size.shape, dtype=size.dtype, num_bytes=size.num_bytes)
                for unit, call, path, size in sizes
            )
        )
    memory = () if plan.memory is None else plan.memory.of_stages(plan.chunks)
    return OwnStages(chunks=plan.chunks, layers=tuple(layers), crossing=tuple(crossing), memory=memory)


def num_cut_layers(model: Model, sample: Any) -> tuple[int, str]:
    """Chunks that a model cut by its own forward can have at most, and why it can have no two; 0 of a chain of layers,
    which is cut between any of them."""
    if is_chain(model):
        return 0, ""
    two = PipelineSettings(degree=2, schedule="1f1b", virtual_stages=1, split="auto")
    try:
        found = own_stages(model, two, sample=sample)
    except (ModelError, StrategyError) as error:
        return 1, str(error).splitlines()[0]
    assert found is not None  # no chain
    return len(found.layers), ""


def chain_memory(
    model: Model, resolved: ResolvedStrategy, chunks: Sequence[range], *, sample: Any = None
) -> tuple[StageBytes, ...]:
    """What each stage of a chain needs that has all of its layers; nothing if it is not known."""
    from hybrid.compose.stage_plan import measure_chain

    measured = measure_chain(model, resolved, sample)
    return () if measured.memory is None else measured.memory.of_stages(chunks)


def check_settings(model: Model, value: Mapping[str, Any], *, is_staged: bool) -> None:
    """That what the values of all settings name or change is in a model that has all of its layers.

    Raises:
        ModelError: it is not.
    """
    from hybrid.compose import whole_checks

    whole_checks.check_settings(
        model,
        amp=amp_settings(value),
        recompute=recompute_settings(value),
        grad_dtype=value["grad_dtype"],
        units=value["units"],
        is_staged=is_staged and is_chain(model),
        compiled=compile_settings(value),
        zero_stage=value["zero_stage"],
    )


def check_stages(
    model: Model, chunks: Sequence[range], *, num_stages: int, placement: ChunkPlacement = ChunkPlacement.ROUND
) -> None:
    """That stages can hold what a model with all of its layers has.

    Raises:
        ModelError: they cannot.
    """
    from hybrid.compose import whole_checks

    whole_checks.check_stages(model, chunks, num_stages=num_stages, placement=placement)


def layers_of(model: Model, *, sample: Any = None) -> tuple[tuple[LayerFacts, ...], str]:
    """The layers of a chain that has all of them, and why their flops are not known if they are not.

    Raises:
        ModelError: a sample that is no tree of tensors.
    """
    from hybrid.pipeline.costs import layer_costs, parameter_costs
    from hybrid.pipeline.layer_desc import layer_name

    named = {name: module for name, module in model.named_modules(remove_duplicate=False) if name and "." not in name}
    classes = getattr(model, "layer_names", lambda: [layer_name(layer) for layer in named.values()])()
    flops: list[int | None] = [None] * len(named)
    weights = parameter_costs(model, list(named.values()))
    note = "without a sample a layer counts by the parameters that it multiplies with; give one to count flops"
    if sample is not None:
        costs = layer_costs(model, sample)  # type: ignore[arg-type]  # a chain, by now
        flops, weights, note = [one.forward_flops for one in costs.layers], list(costs.weights), costs.note
    return tuple(
        LayerFacts(
            name=name,
            class_name=class_name,
            parameters={f"{name}.{fqn}": (id(held), held.numel()) for fqn, held in layer.named_parameters()},
            forward_flops=count,
            weight=weight,
        )
        for (name, layer), class_name, count, weight in zip(named.items(), classes, flops, weights, strict=True)
    ), note


def units_of(model: Model, class_names: list[str] | None) -> tuple[str, ...]:
    """Names of the modules that ZeRO gathers, frees and reduces as one.

    Raises:
        ModelError: a name that is no class of the model.
    """
    from hybrid.sharding.units import plan_units  # torch comes with it

    return tuple(unit.name for unit in plan_units(model, class_names=class_names))


def build(reference: str) -> tuple[Model, Any, str]:
    """The model that `package.module:factory` makes, on the meta device where it can, and a note if it could not.

    In between the sample, where the factory returns (model, sample); else None.

    Raises:
        StrategyError: no such module or factory, or it makes no model.
        ModelError: the factory itself failed.
    """
    import torch  # only where a model is to be built

    name, _, attribute = reference.partition(":")
    if not name or not attribute:
        raise StrategyError(f"--model {reference!r}: expected package.module:factory, such as my_package.model:build")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python itself does for a script
    try:
        factory: Any = importlib.import_module(name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        looked = f" (looked in {os.getcwd()} and on Python's path)" if is_missing else ""
        raise StrategyError(f"--model {reference!r}: cannot import {name!r}: {error}{looked}") from error
    except AttributeError as error:
        near = get_close_matches(attribute, vars(sys.modules[name])) if name in sys.modules else []
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise StrategyError(f"--model {reference!r}: {error}{hint}") from error
    if is_module(factory):
        return factory, None, ""
    if not callable(factory):
        raise StrategyError(f"--model {reference!r}: expected a function or a class, got {type(factory).__name__}")
    note = ""
    try:
        with torch.device("meta"):
            made = factory()
    except Exception as error:
        note = f"built in full, since {reference} cannot be built on the meta device ({_shown(error)})"
        try:
            made = factory()
        except Exception as second:
            raise ModelError(f"--model {reference!r}: the factory raised {type(second).__name__}: {second}") from second
    model, sample = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not is_module(model):
        raise StrategyError(
            f"--model {reference!r}: expected a torch.nn.Module, got {type(made).__name__}; (model, sample) works too"
        )
    return model, sample, note


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
