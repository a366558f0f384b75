"""Units: the modules whose parameters are gathered, freed and reduced together.

Each block of a repeated stack is a unit; the parameters around them (embeddings, final norm, head) form one
unit per run between blocks, so that reverse registration order stays close to the order of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from hybrid.contracts.partition import plan_buckets
from hybrid.errors import ModelError

__all__ = ["Unit", "plan_buckets", "plan_units"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A named set of parameters, in registration order. A tied parameter belongs to its first unit."""

    name: str
    fqns: tuple[str, ...]

    @property
    def is_around(self) -> bool:
        """A run of parameters around the units proper, rather than a module of its own."""
        return self.name.startswith("(")


def plan_units(model: nn.Module, *, class_names: Sequence[str] | None = None) -> tuple[Unit, ...]:
    """Cut a model's parameters into units, in registration order.

    Args:
        model: the model.
        class_names: class names of the modules that are units; None finds them: children of a `ModuleList`,
            a `Sequential` or another module with numbered children (a `PipelineLayer`) whose class stands there more
            than once.

    Raises:
        ModelError: a name in `class_names` that no module of the model has.
    """
    blocks = _named_blocks(model, class_names) if class_names is not None else _repeated_blocks(model)
    units: list[Unit] = []
    for fqn, _ in model.named_parameters():
        owner = _owner(fqn, blocks)
        if units and (units[-1].name == owner or (owner == "" and units[-1].is_around)):
            units[-1] = Unit(name=units[-1].name, fqns=(*units[-1].fqns, fqn))
        else:
            units.append(Unit(name=owner or f"(around {fqn})", fqns=(fqn,)))
    return tuple(units)


def _repeated_blocks(model: nn.Module) -> set[str]:
    blocks: set[str] = set()
    for name, module in model.named_modules():
        if not _is_list(module) or _inside(name, blocks):
            continue
        classes = [type(child) for child in module.children()]
        for child_name, child in module.named_children():
            has_parameters = next(child.parameters(), None) is not None
            if classes.count(type(child)) > 1 and has_parameters:
                blocks.add(f"{name}.{child_name}" if name else child_name)
    return {block for block in blocks if not _inside(block, blocks - {block})}


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return True
    names = [name for name, _ in module.named_children()]
    return len(names) > 1 and names == [str(place) for place in range(len(names))]


def _named_blocks(model: nn.Module, class_names: Sequence[str]) -> set[str]:
    present = {type(module).__name__ for module in model.modules()}
    unknown = sorted(set(class_names) - present)
    if unknown:
        raise ModelError(
            f"sharding_configs['units'] names {unknown}, but the model has no module of that class; "
            f"it has {sorted(present)}"
        )
    blocks = {name for name, module in model.named_modules() if type(module).__name__ in class_names}
    return {block for block in blocks if not _inside(block, blocks - {block})}


def _inside(name: str, blocks: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in blocks for length in range(1, len(parts) + 1))


def _owner(fqn: str, blocks: set[str]) -> str:
    parts = fqn.split(".")
    for length in range(1, len(parts)):
        prefix = ".".join(parts[:length])
        if prefix in blocks:
            return prefix
    return ""
