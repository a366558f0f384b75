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
from hybrid.errors import ModelError, StrategyError
from hybrid.strategy.live_model import Model, check_settings, facts_of, units_of, whole
from hybrid.strategy.resolve import WorkedOut
from hybrid.strategy.stage_table import StageTable, stage_table

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
        stages: where its layers are in a pipeline; None without one.
    """

    class_name: str
    degree: int
    rows: tuple[ParameterRow, ...]
    attributes: tuple[tuple[str, str, int, int], ...] = ()
    units: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stages: StageTable | None = None

    @property
    def title(self) -> str:
        return f"model {self.class_name}"

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
        return "\n\n".join([_text(self), *([] if self.stages is None else [_text(self.stages)])])

    def to_dict(self) -> dict[str, Any]:
        stages = {} if self.stages is None else {"pipeline": self.stages.to_dict()}
        return stages | {
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


def model_table(model: Model, result: WorkedOut, *, note: str = "", sample: Any = None) -> ModelTable:
    """What the strategy, as far as it is worked out, does with this model. `sample`: an input, to count flops on.

    Raises:
        StrategyError: the plan or a degree does not fit the model; all problems in one message.
        ModelError: the model cannot be cut.
    """
    given = model
    model, whole_note = whole(given)
    facts = facts_of(model)
    notes = [text for text in (note, whole_note) if text]
    degree = result.choices["tp"].value or 1
    if degree == -1:
        degree = 1
        notes.append("the tensor-parallel degree follows from the world size: give it to see what is cut")
    if result.choices["pp"].value == -1:
        notes.append("the number of pipeline stages follows from the world size: give it to see the stages")
    errors: list[StrategyError | ModelError] = []
    stages, plan = None, None
    try:
        stages = stage_table(given, model, result, sample=sample)
    except (StrategyError, ModelError) as error:
        errors.append(error)
    if not result.problems and result.choices["pp"].value != -1:
        value = {name: choice.value for name, choice in result.choices.items()}
        try:
            check_settings(model, value, is_staged=(value["pp"] or 1) > 1)
        except ModelError as error:
            errors.append(error)
    try:
        plan = _plan(facts, result, degree)
    except (StrategyError, ModelError) as error:
        errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise StrategyError([problem for error in errors for problem in _problems(error)])
    assert plan is not None
    if sample is not None and stages is None:
        notes.append("the sample is for counting what the stages of a pipeline compute, and there are none here")
    names = result.choices["units"].value
    units = stages.units if stages is not None else units_of(model, list(names) if names is not None else None)
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
        stages=stages,
    )


def _problems(error: StrategyError | ModelError) -> tuple[str, ...]:
    return tuple(error.problems) if isinstance(error, StrategyError) else (str(error),)


def _plan(facts: ModelFacts, result: WorkedOut, degree: int) -> TensorPlan:
    values = {name: result.choices[name].value for name in ("tensor_plan", "sequence_parallel")}
    return plan_tensor_parallel(
        facts, degree=degree, plan=values["tensor_plan"], sequence_parallel=bool(values["sequence_parallel"])
    )


def _text(table: ModelTable | StageTable) -> str:
    cells = [table.header, *table.lines()]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([table.title, *(f"  {row}" for row in rows), "", *(f"  - {text}" for text in table.remarks())])


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
