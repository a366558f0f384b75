"""Finds out under which values of which axes something is refused, by asking the code's own checks again and again.

A refused choice is first made as small as it can be with the same sentence; then each axis is moved through all of its
values, one at a time: those under which the sentence stays are part of the rule, and an axis that makes no difference
is not. What such rules say of other choices is put to the test by `wrongly_told`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from tests.support.axes import MODEL, OPTIMIZER, Choice, Floor, refusals

__all__ = ["LEFT_OUT", "Rule", "find_rules", "pairs_of", "random_choices", "singles_of", "wrongly_told"]

Axes = Mapping[str, Sequence[Any]]
Asked = Callable[[Choice], tuple[Floor | None, tuple[str, ...]]]
LEFT_OUT = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Refused wherever each of these axes has one of its values; `said` is the sentence of `example`."""

    floor: Floor
    conditions: Mapping[str, tuple[Any, ...]]
    example: Choice
    said: str

    def holds(self, choice: Choice) -> bool:
        return all(choice.get(axis, LEFT_OUT) in values for axis, values in self.conditions.items())

    @property
    def kind(self) -> str:
        """The sentence without what differs from case to case."""
        return kind_of(self.said)


def kind_of(sentence: str) -> str:
    values = re.sub(r"'[^']*'|\[[^\]]*\]|\{[^}]*\}|\d[\d.e+-]*|True|False", "_", sentence.replace(" (the default)", ""))
    return re.sub(r"_(?:(?:, | or | and )_)+", "_", values)


# ---- choices ---------------------------------------------------------------------------------------------------------


def singles_of(axes: Axes) -> Iterator[Choice]:
    for axis, values in axes.items():
        yield from ({axis: value} for value in values)


def pairs_of(axes: Axes) -> Iterator[Choice]:
    for one, other in combinations(axes, 2):
        yield from ({one: a, other: b} for a, b in product(axes[one], axes[other]))


def random_choices(axes: Axes, number: int, *, seed: int, most: int) -> Iterator[Choice]:
    """Up to `most` axes that are not left out."""
    generator = random.Random(seed)
    names = list(axes)
    for _ in range(number):
        chosen = sorted(generator.sample(names, generator.randint(2, min(most, len(names)))), key=names.index)
        yield {axis: generator.choice(list(axes[axis])) for axis in chosen}


# ---- rules -----------------------------------------------------------------------------------------------------------


def find_rules(
    axes: Axes, choices: Iterable[Choice], *, known: Sequence[Rule] = (), ask: Asked = refusals
) -> list[Rule]:
    """The rules behind the refusals of these choices, those of `known` left out."""
    found: list[Rule] = []
    for choice in choices:
        floor, said = ask(choice)
        for sentence in said:
            kind = kind_of(sentence)
            told = [rule for rule in (*known, *found) if rule.holds(choice)]
            # Settings are checked all at once; of a model and an optimizer only the first problem is told.
            if floor is None or (any(rule.kind == kind for rule in told) if floor == "strategy" else told):
                continue
            example = _smallest(choice, kind, ask)
            found.append(_rule(axes, floor, example, kind, ask))
    return found


def wrongly_told(rules: Sequence[Rule], choices: Iterable[Choice], *, ask: Asked = refusals) -> list[str]:
    """Choices that are refused where no rule says so, or not where one does."""
    wrong = []
    for choice in choices:
        floor, said = ask(choice)
        told = [rule for rule in rules if rule.holds(choice)]
        if bool(told) != (floor is not None):
            wrong.append(f"{choice}: {'refused, ' + said[0] if said else f'accepted, against {told[0].said}'}")
    return wrong


def _smallest(choice: Choice, kind: str, ask: Asked) -> Choice:
    small = dict(choice)
    for axis in list(choice):
        less = {name: value for name, value in small.items() if name != axis}
        if _says(ask(less)[1], kind):
            small = less
    return small


def _rule(axes: Axes, floor: Floor, example: Choice, kind: str, ask: Asked) -> Rule:
    conditions: dict[str, tuple[Any, ...]] = {}
    for axis, values in axes.items():
        own, held, masked = example.get(axis, LEFT_OUT), [], False
        for value in (LEFT_OUT, *values):
            other = {name: item for name, item in example.items() if name != axis}
            now, said = ask(other if value is LEFT_OUT else {**other, axis: value})
            if _says(said, kind):
                held.append(value)
            # Refused for another reason, that is looked at first: it does not tell.
            elif floor != "strategy" and now is not None and (axis not in {MODEL, OPTIMIZER} or now == "strategy"):
                masked = True
            else:
                break
        else:
            if not masked or own is LEFT_OUT or any(value != own for value in held):
                continue
        conditions[axis] = tuple(value for value in (LEFT_OUT, *values) if _held(axis, value, example, kind, ask))
    said = next(sentence for sentence in ask(example)[1] if kind_of(sentence) == kind)
    return Rule(floor=floor, conditions=conditions, example=example, said=said)


def _held(axis: str, value: Any, example: Choice, kind: str, ask: Asked) -> bool:
    other = {name: item for name, item in example.items() if name != axis}
    return _says(ask(other if value is LEFT_OUT else {**other, axis: value})[1], kind)


def _says(said: Sequence[str], kind: str) -> bool:
    return any(kind_of(sentence) == kind for sentence in said)
