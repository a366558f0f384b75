"""An uneven chain of layers for the planner's memory tests, and what the planner is told of it.

Two sizes: `SMALL`, of which every byte is counted, and `LARGE`, whose activations are most of its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from hybrid.planner.model_spec import ActivationBytes, MatmulSpec, ModelSpec, ParameterSpec, UnitSpec

__all__ = ["LARGE", "SMALL", "Size", "batch", "chain", "spec_of"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the model, its batch and its buckets. No tensor of it is whole pages large."""

    width: int
    hidden: tuple[int, ...]
    samples: int
    bucket_bytes: int


SMALL = Size(width=15, hidden=(18, 30, 18, 34, 22), samples=24, bucket_bytes=3000)
LARGE = Size(width=60, hidden=(72, 240, 240, 136, 240), samples=480, bucket_bytes=100_000)


class Block(nn.Module):
    """Residual; `scale` is frozen. What it gives back is saved by whoever takes it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, hidden)
        self.narrow = nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.full((width,), 0.9), requires_grad=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.narrow(functional.gelu(self.widen(value))) * self.scale


class First(nn.Linear):
    """A class of its own: no block."""


class Last(nn.Linear):
    """Its weight is the first layer's."""


def chain(size: Size) -> nn.Sequential:
    torch.manual_seed(0)
    first, last = First(size.width, size.width), Last(size.width, size.width, bias=False)
    last.weight = first.weight
    return nn.Sequential(first, *(Block(size.width, hidden) for hidden in size.hidden), last)


def batch(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (size.samples, size.width)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


# -- the model as the planner sees it ----------------------------------------------------------------------------------


def spec_of(size: Size, *, is_low: bool, has_pipeline: bool) -> ModelSpec:
    """Parameters from the module, saved bytes by the hooks of autograd on a plain run."""
    model = chain(size)
    saved = saved_bytes(model.to(torch.bfloat16) if is_low else model, size, is_low=is_low)
    element_bytes = 2 if is_low else 4
    owners: dict[int, str] = {}
    units = []
    for (name, module), kept in zip(model.named_children(), saved, strict=True):
        parameters = []
        for fqn, parameter in module.named_parameters():
            tied = owners.get(id(parameter))
            owners.setdefault(id(parameter), f"{name}.{fqn}")
            cut_dim = {"widen.weight": 0, "widen.bias": 0, "narrow.weight": 1}.get(fqn)
            parameters.append(
                ParameterSpec(
                    name=fqn, shape=tuple(parameter.shape), cut_dim=cut_dim, tied_to=tied,
                    trainable=parameter.requires_grad,
                )
            )  # fmt: skip
        is_block = isinstance(module, Block)
        own_input = ActivationBytes(whole=size.width * element_bytes) if is_block else kept
        results = kept
        if isinstance(module, Block):  # its input, and what both products give
            width = size.width * element_bytes
            results = ActivationBytes(whole=2 * width, cut=module.widen.out_features * element_bytes, collective=width)
        if has_pipeline and name == "0":  # all layers are units there, and the input of the first is the batch
            own_input = ActivationBytes()
        units.append(
            UnitSpec(
                name=name,
                kind="block" if is_block else "other",
                parameters=tuple(parameters),
                activations={("none", True): kept, ("selective", True): results, ("full", True): own_input},
                matmuls=tuple(products(module)),
                input_bytes=element_bytes * size.width if name != "0" else 0,
            )
        )
    return ModelSpec(name="chain", units=tuple(units), hidden=size.width)


def products(module: nn.Module) -> Iterator[MatmulSpec]:
    cuts = {"widen": "column", "narrow": "row"}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            cut: Any = cuts.get(name, "none")
            yield MatmulSpec(
                name=f"mlp.{name}", in_features=layer.in_features, out_features=layer.out_features, cut=cut
            )


def saved_bytes(model: nn.Sequential, size: Size, *, is_low: bool) -> list[ActivationBytes]:
    """Per unit and sample: a storage counts for the first unit that saves it; those as wide as a block's inside are cut
    by tensor parallel."""
    inputs, labels = batch(size)
    known = {t.untyped_storage().data_ptr() for t in (inputs, labels, *model.parameters())}
    found: list[tuple[float, float]] = []
    alive = []
    value = inputs
    for index, layer in enumerate(model):
        here: dict[int, tuple[int, bool]] = {}

        def keep(tensor: torch.Tensor, here: dict[int, tuple[int, bool]] = here) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known and tensor.numel() > 1:
                known.add(storage.data_ptr())
                here[storage.data_ptr()] = (storage.nbytes(), tensor.shape[-1] in size.hidden)
                alive.append(tensor)
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=is_low):
            value = layer(value)
            if index == len(model) - 1:
                functional.mse_loss(value.float(), labels)
        found.append((sum(n for n, cut in here.values() if not cut), sum(n for n, cut in here.values() if cut)))
    return [ActivationBytes(whole=whole / size.samples, cut=cut / size.samples) for whole, cut in found]
