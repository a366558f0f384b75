"""The world equation: pp × dp_replicate × dp_shard × cp × tp = world_size.

Degrees that were given are kept; what is open (not given, or -1) follows from the rest. Without any word the
model axes are 1, the cut state is spread over all data-parallel ranks, and there is one replica of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hybrid.contracts.layout import AXES
from hybrid.strategy.choice import Choice

__all__ = ["MODEL_AXES", "Degrees", "divisors", "nearest", "solve_degrees"]

MODEL_AXES = ("pp", "cp", "tp")
_SETTING = {"pp": "pp", "dp_replicate": "dp_replicate", "dp_shard": "shard_size", "cp": "cp", "tp": "tp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """The solved degrees by axis (None where they cannot be right), with how each came about."""

    by_axis: Mapping[str, int] | None
    choices: Mapping[str, Choice]
    problems: tuple[str, ...]
    data_parallel_size: int | None = None
    """World size / (pp × cp × tp), where that divides; also with a problem on the data axes."""


def divisors(number: int) -> list[int]:
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


def nearest(wanted: int, candidates: list[int]) -> str:
    """`2 or 4`: the candidates next below and next above what was wanted."""
    below = [value for value in candidates if value < wanted]
    above = [value for value in candidates if value > wanted]
    return " or ".join(str(value) for value in (*below[-1:], *above[:1]))


def solve_degrees(choices: Mapping[str, Choice], world_size: int) -> Degrees:
    """Fill in what is open; every way in which the degrees cannot make `world_size` is a problem."""
    given = {axis: choices[_SETTING[axis]] for axis in AXES}
    cut = choices["zero_stage"].value >= 1
    known: dict[str, int] = {}
    for axis, choice in given.items():
        if choice.value is not None and choice.value != -1:
            known[axis] = choice.value
        elif axis in MODEL_AXES and choice.value is None:
            known[axis] = 1
    problems: list[str] = []
    if not cut:
        _check_uncut(given["dp_shard"], choices["zero_stage"], problems)
        known["dp_shard"] = 1

    open_model = [axis for axis in MODEL_AXES if axis not in known]
    asked = [axis for axis in AXES if given[axis].value == -1 and axis not in known]
    if len(asked) > 1:
        names = " and ".join(f"{given[axis].where} = -1" for axis in asked)
        problems.append(f"{names}: only one degree can be derived from world_size {world_size}; give the others")
    elif open_model:
        _derive_model_axis(open_model[0], given, known, cut, world_size, problems)
    if problems and any(axis not in known for axis in MODEL_AXES):
        return Degrees(by_axis=None, choices={}, problems=tuple(problems))

    _solve_data_axes(given, known, cut, world_size, problems)
    model = math.prod(known[axis] for axis in MODEL_AXES)
    data = None if world_size % model else world_size // model
    if problems:
        return Degrees(by_axis=None, choices={}, problems=tuple(problems), data_parallel_size=data)
    return Degrees(
        by_axis={axis: known[axis] for axis in AXES},
        choices=_explained(given, known, cut, world_size),
        problems=(),
        data_parallel_size=data,
    )


def _check_uncut(shard: Choice, stage: Choice, problems: list[str]) -> None:
    if shard.given and shard.value != 1:
        why = f"at stage 0 ({stage.where} = 0)" if stage.given else "while sharding is off"
        problems.append(f"{shard.where} = {shard.value}: nothing is cut {why}; choose stage 1, 2 or 3, or leave it out")


def _derive_model_axis(
    axis: str,
    given: Mapping[str, Choice],
    known: dict[str, int],
    cut: bool,
    world_size: int,
    problems: list[str],
) -> None:
    """`mp_degree = -1` is what the world leaves beside all other degrees, which must then be given."""
    missing = [name for name in ("dp_replicate", "dp_shard") if name not in known]
    if missing == ["dp_replicate"] and cut:
        known["dp_replicate"] = 1  # the shard group is given: one replica unless said otherwise
    elif missing == ["dp_shard"]:
        known["dp_shard"] = 1
    elif missing:
        problems.append(
            f"{given[axis].where} = -1: it follows from world_size {world_size} only when the data-parallel "
            f"degrees are given too (hybrid_configs.dp_degree, or shard_size under sharding)"
        )
        return
    rest = math.prod(known.values())
    if world_size % rest:
        terms = " × ".join(f"{name} {known[name]}" for name in AXES if name in known)
        problems.append(
            f"{given[axis].where} = -1: {terms} = {rest} does not divide world_size {world_size}; "
            f"products that do: {nearest(rest, divisors(world_size))}"
        )
        return
    known[axis] = world_size // rest


def equation(degrees: Mapping[str, int]) -> str:
    """`pp 3 × dp_replicate 1 × dp_shard 2 × tp 2 = 12`; an axis of 1 that is rarely used is left out."""
    shown = [axis for axis in AXES if axis in degrees and (axis != "cp" or degrees[axis] != 1)]
    return f"{' × '.join(f'{axis} {degrees[axis]}' for axis in shown)} = {math.prod(degrees.values())}"


def _solve_data_axes(
    given: Mapping[str, Choice], known: dict[str, int], cut: bool, world_size: int, problems: list[str]
) -> None:
    replicas, shard = known.get("dp_replicate"), known.get("dp_shard")
    model = math.prod(known[axis] for axis in MODEL_AXES)
    if replicas is not None and shard is not None:
        if model * replicas * shard != world_size:
            problems.append(_wrong_product(given, known, world_size))
        return
    if world_size % model:
        problems.append(_model_does_not_divide(given, known, model, world_size))
        return
    data = world_size // model
    size = f"data-parallel size {data} (= world_size {world_size} / ({_model_terms(known)}))"
    if shard is not None:
        if data % shard:
            more = ", and is larger than it" if shard > data else ""
            problems.append(
                f"{given['dp_shard'].where} = {shard} does not divide the {size}{more}; values that work: "
                f"{', '.join(map(str, divisors(data)))}"
            )
            return
        known["dp_replicate"] = data // shard
    elif replicas is not None:
        if data % replicas:
            problems.append(
                f"{given['dp_replicate'].where} = {replicas} does not divide the {size}; values that work: "
                f"{', '.join(map(str, divisors(data)))}"
            )
            return
        known["dp_shard"] = data // replicas
        if data > 1 and known["dp_shard"] == 1:
            problems.append(
                f"{given['dp_replicate'].where} = {replicas}: with that many replicas of the state on the {size} "
                f"each rank keeps all of it, and sharding cuts nothing; leave it out to cut over all {data}, or "
                f"set shard_size to one of {', '.join(map(str, divisors(data)[1:]))} with dp_degree "
                f"{data} / shard_size"
            )
    else:
        known["dp_replicate"], known["dp_shard"] = 1, data


def _model_terms(known: Mapping[str, int]) -> str:
    return " × ".join(f"{axis} {known[axis]}" for axis in MODEL_AXES)


def _model_does_not_divide(given: Mapping[str, Choice], known: Mapping[str, int], model: int, world_size: int) -> str:
    fixes = []
    for axis in MODEL_AXES:
        others = model // known[axis]
        if given[axis].given and known[axis] > 1 and world_size % others == 0:
            fixes.append(f"{given[axis].where} = {nearest(known[axis], divisors(world_size // others))}")
    fixes.append(f"world_size {nearest(world_size, [model * k for k in range(1, world_size // model + 2)])}")
    return (
        f"{_paths(given, MODEL_AXES, known)}: {_model_terms(known)} = {model} does not divide "
        f"world_size {world_size} (pp × dp × cp × tp must be equal to it, for a whole dp); "
        f"works: {'; '.join(fixes)}"
    )


def _wrong_product(given: Mapping[str, Choice], known: Mapping[str, int], world_size: int) -> str:
    product = math.prod(known.values())
    fixes = []
    for axis in AXES:
        rest = product // known[axis]
        if given[axis].given and world_size % rest == 0:
            fixes.append(f"{given[axis].where.split(' = ')[0]} = {world_size // rest}")
    fixes.append(f"world_size {product}")
    idle = f"; {world_size - product} processes would be idle" if product < world_size else ""
    return (
        f"{_paths(given, AXES, known)}: {equation(known)}, but world_size is {world_size}{idle}; "
        f"works: {'; or '.join(fixes)}"
    )


def _paths(given: Mapping[str, Choice], axes: tuple[str, ...], known: Mapping[str, int]) -> str:
    said = [f"{given[axis].where} = {known[axis]}" for axis in axes if given[axis].given and known[axis] > 1]
    said = said or [f"{given[axis].where} = {known[axis]}" for axis in axes if given[axis].given]
    return ", ".join(said)


def _explained(given: Mapping[str, Choice], known: Mapping[str, int], cut: bool, world_size: int) -> dict[str, Choice]:
    """The choices with their final values: open ones become derived, with the equation that gave them."""
    model = math.prod(known[axis] for axis in MODEL_AXES)
    data = world_size // model
    whys = {
        "dp_replicate": f"data-parallel size {data} / dp_shard {known['dp_shard']}",
        "dp_shard": f"data-parallel size {data} / dp_replicate {known['dp_replicate']}",
    }
    explained = {}
    for axis in AXES:
        choice = given[axis]
        setting = _SETTING[axis]
        if choice.value is not None and choice.value != -1:
            explained[setting] = choice
        elif axis in MODEL_AXES and choice.value is None:
            explained[setting] = replace(choice, value=1)
        elif axis == "dp_shard" and not cut:
            explained[setting] = Choice(value=1, origin="default", where=choice.where, why="nothing is cut")
        else:
            rest = world_size // known[axis]
            why = whys.get(axis, f"world_size {world_size} / {rest}")
            why += f" ({choice.where} = -1)" if choice.given else ""
            explained[setting] = replace(choice, value=known[axis], origin="derived", why=why)
    return explained
