"""Blocks of a model that are alike, so that one of them stands for all."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from torch import nn

from hybrid.contracts.tensor_plan import TensorPlan
from hybrid.tensor.block_check import structure_of
from hybrid.tensor.self_check import NotComparable

__all__ = ["BlockKind", "block_kinds"]


@dataclass(slots=True, kw_only=True)
class BlockKind:
    """Blocks of one class that hold the same and have the same rules.

    Args:
        fqns: of all of them.
        class_name: of each.
        structure: of the first; None where it cannot be compared.
        reason: why it cannot.
    """

    fqns: tuple[str, ...]
    class_name: str
    structure: nn.Module | None = None
    reason: str = ""


def block_kinds(model: nn.Module, plan: TensorPlan) -> list[BlockKind]:
    """What is compared unless it is said otherwise, of a model that is not cut yet.

    That is all that the user's plan has a say in, and all with code for which the rules were not made. Blocks that
    this rank does not hold are passed over.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[Hashable, list[str]] = {}
    large: list[str] = []
    for unit in plan.units:
        if unit.fqn not in modules or not (unit.by_user or not unit.is_known):
            continue
        if unit.holds_others:
            large.append(unit.fqn)
            continue
        found.setdefault(tuple(_signature(unit.fqn, modules[unit.fqn], plan)), []).append(unit.fqn)
    kinds = [
        BlockKind(
            fqns=(fqn,), class_name=type(modules[fqn]).__name__, reason="holds blocks besides layers that are cut"
        )
        for fqn in large
    ]
    for fqns in found.values():
        block = modules[fqns[0]]
        kind = BlockKind(fqns=tuple(fqns), class_name=type(block).__name__)
        try:
            kind.structure = structure_of(block, model)
        except NotComparable as error:
            kind.reason = str(error)
        kinds.append(kind)
    return kinds


def _signature(fqn: str, block: nn.Module, plan: TensorPlan) -> Iterator[Hashable]:
    """What tells kinds apart: classes, sizes, switches and modes, rules. Numbers, such as a block's place, do not."""
    for name, module in block.named_modules():
        inner = ".".join(filter(None, (fqn, name)))
        rule = plan.rules.get(inner)
        yield (
            name,
            type(module),
            tuple((key, tuple(parameter.shape)) for key, parameter in module.named_parameters(recurse=False)),
            tuple(
                (key, re.sub(r"\d+", "", value) if isinstance(value, str) else value)
                for key, value in sorted(vars(module).items())
                if type(value) in (bool, str)
            ),
            tuple(sorted(plan.attributes.get(inner, {}).items())),
            None if rule is None else (rule.describe(), rule.style, rule.parts, rule.in_blocks),
            inner in plan.gather_at,
        )
    yield tuple(sorted(name[len(fqn) :] for name in plan.partial if name.startswith(f"{fqn}.")))
