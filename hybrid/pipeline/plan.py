"""How a model is cut by its own forward: its units, what they cost, and which of their calls each chunk makes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hybrid.contracts.stage_memory import MemoryModel
from hybrid.contracts.stage_split import (
    LayerCost,
    LayerCosts,
    split_by_costs,
    split_by_counts,
    split_by_marks,
    split_by_names,
    split_evenly,
)
from hybrid.errors import ModelError
from hybrid.pipeline.cut_units import can_be_taken_apart, find_cut_units
from hybrid.pipeline.flow import Flow, assign_chunks
from hybrid.pipeline.following import BufferWritten, Following
from hybrid.pipeline.own_checkpoints import check_told_apart
from hybrid.pipeline.skeleton import FakeTensorMode, skeleton_of

__all__ = ["OwnForwardPlan", "as_inputs", "modes_key", "modes_of", "plan_own_forward", "signature_of"]

_SPLIT = "pipeline_configs.split"
_MOST_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnForwardPlan:
    """One model, cut.

    Args:
        units: names of the modules that are cut as a whole, in the order of registration.
        flow: of the forward with the sample.
        in_training: the same with all modules in training mode, if the model is not; else None.
        chunks: the calls of each chunk.
        costs: of each call.
        kind, sizes: of the sample, see `signature_of`; the modes of the modules are part of the kind.
        following: looks at forwards with other inputs.
        memory: what each call needs; None where it was not asked for or not measured.
    """

    units: tuple[str, ...]
    flow: Flow
    in_training: Flow | None
    chunks: tuple[range, ...]
    costs: LayerCosts
    kind: Any
    sizes: Any
    following: Following
    memory: MemoryModel | None = None

    @property
    def held_by(self) -> Flow:
        """What decides which chunk holds what: the flow, with the buffers that either of the two reads."""
        others = self.in_training.read_buffers if self.in_training is not None else frozenset[str]()
        return replace(self.flow, read_buffers=self.flow.read_buffers | others)

    def follow(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: Mapping[str, bool]) -> Flow:
        """The flow of a forward with these inputs, and its modules in these modes.

        Raises:
            ModelError: a value that cannot be followed.
        """
        try:
            return self.following.follow(args, kwargs, training=training)
        except BufferWritten as error:
            raise _written_outside(str(error)) from None


def plan_own_forward(
    model: nn.Module,
    sample: Any,
    *,
    num_chunks: int,
    split: str | Sequence[int] | Sequence[str] | None,
    blocks: Callable[[nn.Module], Collection[str]],
) -> OwnForwardPlan:
    """Cut a model.

    Args:
        model: with all of its parameters, which may be on the meta device.
        sample: what it is called with, see `as_inputs`.
        num_chunks: how many chunks.
        split: the strategy's.
        blocks: model -> names of its repeated blocks.

    Raises:
        ModelError: a value that cannot be followed from unit to unit.
        StrategyError: fewer calls of units than chunks, a split that does not fit them.
    """
    args, kwargs = as_inputs(sample)
    wanted = (
        [name for name in split if isinstance(name, str)] if split is not None and not isinstance(split, str) else []
    )
    known = dict(model.named_modules(remove_duplicate=False))
    first = {id(module): name for name, module in model.named_modules()}
    wanted = [first[id(known[name])] for name in wanted if name in known]
    apart: set[str] = set()
    promoted: set[str] = set()
    for _ in range(_MOST_ROUNDS):
        units = find_cut_units(model, blocks=[*blocks(model), *promoted], wanted=wanted, apart=apart)
        fakes = FakeTensorMode(allow_non_fake_inputs=True)  # a model may hold plain tensors as constants
        following = Following(skeleton_of(model, fakes, units=units), fakes, units=units)
        try:
            flow = following.follow(args, kwargs, training=modes_of(model))
            in_training = None if model.training else _in_training(following, args, kwargs)
        except BufferWritten as error:
            owner = str(error).rpartition(".")[0]
            if owner in promoted or not owner or next(model.get_submodule(owner).children(), None) is not None:
                raise _written_outside(str(error)) from None
            promoted.add(owner)
            continue
        more = _to_take_apart(model, units, flow, num_chunks)
        if in_training is not None:
            more |= _to_take_apart(model, units, in_training, num_chunks)
        if not more:
            break
        apart |= more
    if not flow.calls:
        raise ModelError(
            f"the forward of the {type(model).__name__} calls none of its modules that have parameters, so there is "
            "nothing to cut. Write it as a hybrid.PipelineLayer, or set pipeline_configs.degree = 1"
        )
    costs = _costs(model, flow)
    chunks = _split(model, flow, costs, num_chunks=num_chunks, split=split)
    check_told_apart(flow, chunks)
    if in_training is not None:
        check_told_apart(in_training, assign_chunks(in_training, flow, chunks))
    return OwnForwardPlan(
        units=units,
        flow=flow,
        in_training=in_training,
        chunks=chunks,
        costs=costs,
        kind=(signature_of((args, kwargs), sizes=False), modes_key(model.modules())),
        sizes=signature_of((args, kwargs), sizes=True),
        following=following,
    )


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Name of each module -> whether it is in training mode."""
    return {name: module.training for name, module in model.named_modules()}


def modes_key(modules: Iterable[nn.Module]) -> bytes:
    """Equal for equal modes of the same modules."""
    return bytes(bool(module.training) for module in modules)


def _in_training(following: Following, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow:
    """What the forward does once the model is trained: one that `from_pretrained` returns is not in training mode."""
    try:
        return following.follow(args, kwargs, training={"": True})
    except ModelError as error:
        raise ModelError(f"in training mode (model.train(); the model is in eval mode now): {error}") from error


def as_inputs(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword) arguments of the model: of a dict all by name, of a tuple or list in order, else one."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, tuple | list):
        return tuple(sample), {}
    return (sample,), {}


def signature_of(value: Any, *, sizes: bool) -> Any:
    """Equal for inputs of the same kind: the same containers and types; with `sizes` the same shapes and numbers."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape) if sizes else value.dim(), value.requires_grad
    if isinstance(value, Mapping):
        return tuple((key, signature_of(item, sizes=sizes)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return (type(value), *(signature_of(item, sizes=sizes) for item in value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (type(value), value) if sizes else type(value)
    if value is None or isinstance(value, bool | complex | str | bytes | torch.dtype):
        return value
    return type(value)


def _to_take_apart(model: nn.Module, units: Sequence[str], flow: Flow, num_chunks: int) -> set[str]:
    """Units that code calls part by part, and the largest if there are not enough for all chunks."""
    called = {call.unit for call in flow.calls}
    read = {fqn for call in flow.calls for fqn in call.parameters} | flow.output_parameters
    never = {
        name
        for name in units
        if name not in called and any(fqn.startswith(f"{name}.") for fqn in read) and can_be_taken_apart(model, name)
    }
    if never or len(flow.calls) >= num_chunks:
        return never
    sizes = {name: _num_parameters(model, name) for name in called if can_be_taken_apart(model, name)}
    return {max(sizes, key=lambda name: sizes[name])} if sizes else set()


def _costs(model: nn.Module, flow: Flow) -> LayerCosts:
    """A unit that is called again has its parameters already."""
    seen: set[str] = set()
    costs = []
    for call in flow.calls:
        count = 0 if call.unit in seen else _num_parameters(model, call.unit)
        seen.add(call.unit)
        costs.append(LayerCost(name=call.unit, num_parameters=count, forward_flops=call.forward_flops))
    return LayerCosts(layers=tuple(costs))


def _num_parameters(model: nn.Module, name: str) -> int:
    return sum(parameter.numel() for parameter in model.get_submodule(name).parameters())


def _split(
    model: nn.Module,
    flow: Flow,
    costs: LayerCosts,
    *,
    num_chunks: int,
    split: str | Sequence[int] | Sequence[str] | None,
) -> tuple[range, ...]:
    num_calls = len(flow.calls)
    if split is None or split == "auto":
        return split_by_costs(costs.weights, num_chunks)
    if split == "uniform":
        return split_evenly(num_calls, num_chunks)
    if isinstance(split, str):
        classes = [type(model.get_submodule(call.unit)).__name__ for call in flow.calls]
        return split_by_marks(classes, split.removeprefix("layer:"), num_chunks, setting=_SPLIT)
    if any(isinstance(item, str) for item in split):
        first = {id(module): name for name, module in model.named_modules()}
        known = dict(model.named_modules(remove_duplicate=False))
        names = [first[id(known[name])] if name in known else name for name in map(str, split)]
        return split_by_names(names, [call.unit for call in flow.calls], num_chunks, setting=_SPLIT)
    return split_by_counts([int(count) for count in split], num_calls, num_chunks, setting=_SPLIT)


def _written_outside(buffer: str) -> ModelError:
    return ModelError(
        f"the forward of the model writes buffer {buffer!r} outside of its units, so every stage of a pipeline would "
        "go on with a copy of its own. Let the module that holds it write it in its own forward, write the model as a "
        "hybrid.PipelineLayer, or set pipeline_configs.degree = 1"
    )
