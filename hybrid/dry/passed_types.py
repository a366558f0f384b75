"""The types in which a model under autocast passes values on, from one forward of the plain model without values.

Autocast casts what goes into matrix products and widens what goes into norms and sums; between the layers it leaves
what comes of that. In Llama it is fp32, since the token table is; in a model that begins with a product it is the lower
type. What ranks send is as wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hybrid.contracts.tensor_plan import TensorPlan
from hybrid.planner.measure.trace import tensors_in
from hybrid.planner.model_spec import ModelSpec, SentWidths, UnitSpec

__all__ = ["passed_types", "with_passed_types"]

PassedTypes = Mapping[tuple[str, str], int]
"""(module, moment) -> bytes of an element of the first floating point tensor: `in`, which its forward was given,
`made`, which its forward gave, and `out`, what hooks of the model made of that."""


def passed_types(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, dtype: torch.dtype
) -> PassedTypes:
    """One forward under autocast, of each module."""
    found: dict[tuple[str, str], int] = {}
    with _noting(model, found), torch.autocast("cpu", dtype=dtype):
        model(*args, **kwargs)
    return found


def with_passed_types(spec: ModelSpec, types: PassedTypes, plan: TensorPlan | None) -> ModelSpec:
    """The planner's description with the width of what is sent of each unit.

    Args:
        spec: of the model.
        types: of its modules.
        plan: what tensor parallel cuts; None without it.
    """
    blocks = [unit.name for unit in spec.blocks]
    if not blocks or any((name, "in") not in types for name in blocks):
        return spec
    before = {name: types[name, "in"] for name in blocks}
    ends = {"embedding": before[blocks[0]], "head": types[blocks[-1], "out"]}
    units = []
    for unit in spec.units:
        between = before.get(unit.name, ends.get(unit.kind, 0))
        units.append(replace(unit, sent=_sent(unit, between, types, plan, blocks)) if between else unit)
    return replace(spec, units=tuple(units))


def _sent(unit: UnitSpec, between: int, types: PassedTypes, plan: TensorPlan | None, blocks: list[str]) -> SentWidths:
    """`blocks`: names of all of them; what lies in none is of the ends."""
    if plan is None:
        return SentWidths(between=between, result=between)

    def is_of_unit(fqn: str) -> bool:
        if unit.kind == "block":
            return fqn.startswith(f"{unit.name}.")
        return not any(fqn.startswith(f"{block}.") for block in blocks)

    def given(style: str) -> int:
        rules = (fqn for fqn, rule in plan.rules.items() if rule.style == style and is_of_unit(fqn))
        return max((types.get((fqn, "made"), 0) for fqn in rules), default=between)

    if unit.kind == "embedding":
        return SentWidths(between=between, result=given("vocab"))
    if unit.kind == "head":
        return SentWidths(between=between, result=between, entries=(given("head"),))
    # A column layer casts what it takes before it is sent; a module around such layers gathers it as it comes.
    around = [types.get((fqn, "in"), between) for fqn in plan.gather_at if is_of_unit(fqn) and fqn not in plan.rules]
    rest = [given("colwise")] * (unit.num_tp_reductions - len(around))
    return SentWidths(between=between, result=given("rowwise"), entries=(*around, *rest))


@contextmanager
def _noting(model: nn.Module, found: dict[tuple[str, str], int]) -> Iterator[None]:
    handles = []

    def note(key: tuple[str, str], value: Any) -> None:
        first = next((one for one in tensors_in(value) if one.is_floating_point()), None)
        if first is not None:
            found.setdefault(key, first.element_size())

    def watch(name: str, module: nn.Module) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            note((name, "in"), (args, kwargs))

        def made(_: nn.Module, args: Any, output: Any) -> None:
            note((name, "made"), output)

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            note((name, "out"), output)

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(made, prepend=True))
        handles.append(module.register_forward_hook(leave))

    for name, module in model.named_modules():
        watch(name, module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
