"""One forward and one backward of a model, with what every module put out and the gradients, kept for a comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hybrid import shims
from hybrid.tensor.logits import VocabParallelLogits

__all__ = ["Call", "Output", "Recording", "differentiate", "record", "scalar_of"]


@dataclass(slots=True, kw_only=True)
class Output:
    """One floating point tensor that a module returned."""

    tensor: torch.Tensor
    """As it was returned, in the graph: later code may have written into it."""
    value: torch.Tensor
    """A copy of what was in it; of cut logits, this rank's part."""
    gradient: torch.Tensor | None = None


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of a module."""

    fqn: str
    outputs: tuple[Output, ...]


@dataclass(slots=True, kw_only=True)
class Recording:
    """All calls in the order in which they ended, what the model returned, gradients by first names of parameters."""

    calls: list[Call] = field(default_factory=list)
    returned: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def by_module(self) -> dict[str, list[int]]:
        """Module -> places of its calls."""
        places: dict[str, list[int]] = {}
        for place, call in enumerate(self.calls):
            places.setdefault(call.fqn, []).append(place)
        return places


def record(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recording:
    """Run forward; the graph stays alive with the recording."""
    recording = Recording()
    handles = []
    for fqn, module in model.named_modules():

        def note(module: nn.Module, args: Any, output: Any, fqn: str = fqn) -> None:
            if not shims.in_backward():
                recording.calls.append(Call(fqn=fqn, outputs=tuple(map(_output, _floats(output)))))

        handles.append(module.register_forward_hook(note))
    try:
        returned = model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    recording.returned = list(_floats(returned))
    return recording


def scalar_of(returned: Sequence[torch.Tensor], chosen: Sequence[int]) -> torch.Tensor | None:
    """A number that depends on every element of the chosen tensors, the same on all ranks; None: on no parameter."""
    total: torch.Tensor | None = None
    for place in chosen:
        tensor = returned[place]
        if not tensor.requires_grad:
            continue
        if isinstance(tensor, VocabParallelLogits):
            tensor = tensor.whole()
        weights = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(place), dtype=torch.float64)
        part = (tensor.double() * weights.to(tensor.device)).sum()
        total = part if total is None else total + part
    return total


def differentiate(recording: Recording, scalar: torch.Tensor, model: nn.Module) -> None:
    """Gradients of the scalar for all outputs and parameters; nothing accumulates in any `.grad`."""
    parameters = {fqn: parameter for fqn, parameter in model.named_parameters() if parameter.requires_grad}
    outputs = [output for call in recording.calls for output in call.outputs if output.tensor.requires_grad]
    unique = {id(tensor): tensor for tensor in (*(output.tensor for output in outputs), *parameters.values())}
    found = torch.autograd.grad(scalar, list(unique.values()), allow_unused=True)
    gradients = dict(zip(unique, found, strict=True))
    for output in outputs:
        output.gradient = gradients[id(output.tensor)]
    recording.gradients = {fqn: gradients[id(parameter)] for fqn, parameter in parameters.items()}


def _output(tensor: torch.Tensor) -> Output:
    local = tensor.local() if isinstance(tensor, VocabParallelLogits) else tensor
    return Output(tensor=tensor, value=local.detach().clone())


def _floats(value: Any) -> Iterator[torch.Tensor]:
    """The floating point tensors in what a module returns; objects that are no container (caches) are passed over."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floats(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from _floats(getattr(value, one.name))
