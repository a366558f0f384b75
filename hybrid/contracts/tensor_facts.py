"""What the rules of tensor parallelism need to know about a model: names, kinds and sizes, no tensors.

Read from a live model by `hybrid.tensor.facts`; written by hand in tests and by the planner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

__all__ = ["Kind", "ModelFacts", "ModuleFacts", "parent_of"]

Kind = Literal["linear", "conv1d", "embedding", "attention", "norm", "dropout", "other"]
"""`conv1d` is a linear layer that holds its weight as (in, out); `attention` is `torch.nn.MultiheadAttention`."""


def parent_of(fqn: str) -> str:
    """Dotted name of the module that holds `fqn`; the model itself is ""."""
    return fqn.rpartition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """One module.

    Args:
        fqn: dotted name; "" for the model itself. The first one if the module is registered under several.
        class_name: name of its class.
        kind: what it is to the rules.
        in_features, out_features: sizes of a linear layer; rows and columns of an embedding; None for others.
        has_bias: whether it adds a bias.
        exact: its forward is the stock one of its kind, and its weight an ordinary parameter.
        parameters: its own parameters, name -> shape.
        trainable: those of them that require a gradient.
        tied: for each own parameter that has other names, those names.
        aliases: other names of this same module.
        is_known: its code is torch's own, or that of a family for which there are rules.
        options: what it was built with that no cut layer can do, such as "sparse=True".
    """

    fqn: str
    class_name: str
    kind: Kind = "other"
    in_features: int | None = None
    out_features: int | None = None
    has_bias: bool = False
    exact: bool = True
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    trainable: frozenset[str] = frozenset()
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    is_known: bool = True

    @property
    def parent(self) -> str:
        return parent_of(self.fqn)

    @property
    def name(self) -> str:
        """Its name in its parent."""
        return self.fqn.rpartition(".")[2]

    @property
    def is_linear(self) -> bool:
        return self.kind in {"linear", "conv1d"}

    @property
    def sizes(self) -> tuple[int, int]:
        """(in, out) of a linear layer, (rows, columns) of an embedding."""
        assert self.in_features is not None and self.out_features is not None, self.fqn
        return self.in_features, self.out_features

    def parameter_fqn(self, name: str) -> str:
        return f"{self.fqn}.{name}" if self.fqn else name


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """One model.

    Args:
        class_name: name of its class.
        modules: each module once, in registration order; the first is the model itself.
        attributes: module fqn -> its plain int attributes (num_heads, head_dim, split_size, ...).
        model_plan: the plan that the model brings along (Hugging Face: pattern -> style), if it has one.
    """

    class_name: str
    modules: tuple[ModuleFacts, ...]
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    model_plan: Mapping[str, str] | None = None

    @cached_property
    def by_fqn(self) -> Mapping[str, ModuleFacts]:
        return {module.fqn: module for module in self.modules}

    @cached_property
    def _children(self) -> Mapping[str, tuple[ModuleFacts, ...]]:
        children: dict[str, list[ModuleFacts]] = {}
        for module in self.modules:
            if module.fqn:
                children.setdefault(module.parent, []).append(module)
        return {fqn: tuple(held) for fqn, held in children.items()}

    def children(self, fqn: str) -> tuple[ModuleFacts, ...]:
        """Modules directly in `fqn`, in registration order."""
        return self._children.get(fqn, ())

    def inside(self, fqn: str) -> Iterator[ModuleFacts]:
        """`fqn` itself and all modules below it."""
        return (one for one in self.modules if not fqn or one.fqn == fqn or one.fqn.startswith(f"{fqn}."))

    def attribute(self, fqn: str, *names: str) -> int | None:
        """The first of these attributes that the module has."""
        known = self.attributes.get(fqn, {})
        return next((known[name] for name in names if name in known), None)

    @cached_property
    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        """Every name of every parameter -> shape, in registration order."""
        return {
            module.parameter_fqn(name): shape for module in self.modules for name, shape in module.parameters.items()
        }

    @cached_property
    def first_names(self) -> Mapping[str, str]:
        """Every name of every parameter -> the first name of the same parameter."""
        first: dict[str, str] = {}
        for module in self.modules:
            for name in module.parameters:
                fqn = module.parameter_fqn(name)
                for other in (fqn, *module.tied.get(name, ())):
                    first.setdefault(other, first.get(fqn, fqn))
        return first

    def is_tied_to(self, module: ModuleFacts, other: ModuleFacts) -> bool:
        """Whether the two hold the same weight."""
        return other.parameter_fqn("weight") in module.tied.get("weight", ())
