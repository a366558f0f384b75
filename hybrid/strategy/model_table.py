"""What becomes of each parameter of a model under a strategy, as rows; as a plain text table; as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

from hybrid.contracts.tensor_claims import general
from hybrid.contracts.tensor_facts import ModelFacts
from hybrid.contracts.tensor_plan import TABLE_HEADER, ParameterRow, TensorPlan
from hybrid.contracts.tensor_rules import plan_tensor_parallel
from hybrid.strategy.live_model import Model, facts_of, units_of
from hybrid.strategy.resolve import WorkedOut

__all__ = ["ModelTable", "model_table"]

_MOST_UNITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """The parameters of one model.

    Args:
        class_name: of the model.
        degree: tensor-parallel ranks; 1 without.
        rows: one per parameter, by its first name.
        attributes: (module, attribute, value in the model, value on each rank).
        units: modules that ZeRO treats as one.
        notes: what else there is to say.
    """

    class_name: str
    degree: int
    rows: tuple[ParameterRow, ...]
    attributes: tuple[tuple[str, str, int, int], ...] = ()
    units: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def header(self) -> tuple[str, ...]:
        return TABLE_HEADER if self.degree > 1 else TABLE_HEADER[:2]

    def lines(self) -> list[tuple[str, ...]]:
        """Under `header`; parameters of repeated blocks with the same rule share a line, with their number."""
        groups: dict[tuple[str, ...], int] = {}
        for row in self.rows:
            name = general(row.fqn.rpartition(".")[0]) + f".{row.fqn.rpartition('.')[2]}" if "." in row.fqn else row.fqn
            cells = (name, _shape(row.global_shape), _shape(row.local_shape), row.rule, row.source)
            groups[cells] = groups.get(cells, 0) + 1
        return [
            (f"{name} ({number} times)" if number > 1 else name, *rest)[: len(self.header)]
            for (name, *rest), number in groups.items()
        ]

    def remarks(self) -> Iterator[str]:
        """Sizes, attributes, units and notes."""
        whole = sum(prod(row.global_shape) for row in self.rows)
        local = sum(prod(row.local_shape) for row in self.rows)
        if self.degree > 1:
            left = sum(prod(row.global_shape) for row in self.rows if row.local_shape == row.global_shape)
            yield (
                f"{whole:,} parameters, {local:,} on each of {self.degree} tensor-parallel ranks; {left:,} of them are "
                "whole on every rank"
            )
        else:
            yield f"{whole:,} parameters, each whole before ZeRO cuts it (no tensor parallel)"
        seen = dict.fromkeys((_pattern(fqn), name, value, own) for fqn, name, value, own in self.attributes)
        for fqn, name, value, own in seen:
            yield f"{fqn or 'the model'}.{name}: {value} in the model, {own} on each rank"
        if self.units:
            yield f"units of ZeRO: {', '.join(_shortened(self.units))}"
        yield from self.notes

    def to_text(self) -> str:
        cells = [self.header, *self.lines()]
        widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
        lines = [f"model {self.class_name}"]
        lines += [
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        ]
        return "\n".join([*lines, "", *(f"  - {remark}" for remark in self.remarks())])

    def to_dict(self) -> dict[str, Any]:
        return {
            "class": self.class_name,
            "tensor_parallel_degree": self.degree,
            "parameters": [
                {
                    "name": row.fqn,
                    "shape": list(row.global_shape),
                    "local_shape": list(row.local_shape),
                    "rule": row.rule if self.degree > 1 else "",
                    "source": row.source,
                }
                for row in self.rows
            ],
            "attributes": [
                {"module": fqn, "name": name, "value": value, "local_value": own}
                for fqn, name, value, own in self.attributes
            ],
            "units": list(self.units),
            "notes": list(self.notes),
        }


def model_table(model: Model, result: WorkedOut, *, note: str = "") -> ModelTable:
    """What the strategy, as far as it is worked out, does with this model.

    Raises:
        StrategyError: the plan or the degree does not fit the model; all problems in one message.
        ModelError: the model cannot be cut.
    """
    facts = facts_of(model)
    notes = [note] if note else []
    degree = result.choices["tp"].value or 1
    if degree == -1:
        degree = 1
        notes.append("the tensor-parallel degree follows from the world size: give it to see what is cut")
    names = result.choices["units"].value
    units = units_of(model, list(names) if names is not None else None)
    plan = _plan(facts, result, degree)
    return ModelTable(
        class_name=facts.class_name,
        degree=degree,
        rows=plan.rows,
        attributes=tuple(
            (fqn, name, facts.attributes[fqn][name], own)
            for fqn, values in plan.attributes.items()
            for name, own in values.items()
        ),
        units=units,
        notes=tuple(notes),
    )


def _plan(facts: ModelFacts, result: WorkedOut, degree: int) -> TensorPlan:
    values = {name: result.choices[name].value for name in ("tensor_plan", "sequence_parallel")}
    return plan_tensor_parallel(
        facts, degree=degree, plan=values["tensor_plan"], sequence_parallel=bool(values["sequence_parallel"])
    )


def _shape(shape: Iterable[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _shortened(units: tuple[str, ...]) -> Iterator[str]:
    """Blocks of one stack by their pattern and number."""
    for shown, (pattern, group) in enumerate(groupby(units, key=_pattern)):
        held = list(group)
        if shown == _MOST_UNITS:
            yield "..."
            return
        yield held[0] if len(held) == 1 else f"{pattern} ({len(held)} times)"


def _pattern(fqn: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))
