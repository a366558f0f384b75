"""The order of the axes, from outer to inner, as a user may give it."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.contracts.layout import AXES
from hybrid.strategy.choice import Choice
from hybrid.strategy.values import closest

__all__ = ["read_order"]

_AXIS_OF = {
    "dp": "dp_replicate",
    "data": "dp_replicate",
    "sharding": "dp_shard",
    "mp": "tp",
    "model": "tp",
    "pipe": "pp",
    "sep": "cp",
    "context": "cp",
    **{axis: axis for axis in AXES},
}
_WRITTEN = {"pp": "pp", "dp_replicate": "dp", "dp_shard": "sharding", "cp": "sep", "tp": "mp"}


def read_order(order: Choice, choices: Mapping[str, Choice]) -> tuple[tuple[str, ...], list[str]]:
    """The axes from outer to inner, and the problems; `sep` may be left out while its degree is 1."""
    if order.value is None:
        return AXES, []
    problems: list[str] = []
    named: list[str] = []
    for word in order.value:
        axis = _AXIS_OF.get(word.strip().lower())
        if axis is None:
            guess = closest(word, _AXIS_OF)
            hint = f"; did you mean {guess!r}?" if guess else ""
            problems.append(f"{order.where}: {word!r} is not an axis; the axes are {_listed(AXES)}{hint}")
        elif axis in named:
            problems.append(f"{order.where} = {list(order.value)}: {word!r} stands twice; each axis once")
        else:
            named.append(axis)
    left_out = [axis for axis in AXES if axis not in named]
    if left_out == ["cp"] and choices["cp"].value in {None, 1}:
        # Orders without sep are common. Its groups have one rank, so any place gives the same numbering.
        named.insert(named.index("tp"), "cp")
    elif left_out and not problems:
        complete = [*order.value, *(_WRITTEN[axis] for axis in left_out)]
        problems.append(
            f"{order.where} = {list(order.value)}: {_listed(left_out)} left out; list every axis, outer to inner, "
            f"for example {complete}"
        )
    return (tuple(named) if not problems else AXES), problems


def _listed(axes: tuple[str, ...] | list[str]) -> str:
    return ", ".join(_WRITTEN[axis] for axis in axes)
