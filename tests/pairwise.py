"""All-pairs covers: few cases in which every two settings meet in every two values.

    >>> cover({"stage": (0, 1), "clip": ("none", "norm"), "mode": ("a", "b")})      # 4 cases, not 8

Most faults of configurable code need one or two settings at certain values; a cover of all pairs finds these with
a number of cases that grows with the two largest factors, not with the product (Cohen et al., AETG, 1997). The
choice is greedy and without chance: the same factors give the same cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

__all__ = ["cover", "everything", "missing_pairs"]

Factors = Mapping[str, Sequence[Any]]
Choice = dict[str, Any]
Allowed = Callable[[Choice], bool]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def everything(factors: Factors, *, allowed: Allowed = lambda choice: True) -> Iterator[Choice]:
    """The whole product without what is not allowed, the last factor changing fastest."""
    for values in product(*factors.values()):
        choice = dict(zip(factors, values, strict=True))
        if allowed(choice):
            yield choice


def cover(factors: Factors, *, allowed: Allowed = lambda choice: True) -> list[Choice]:
    """Cases that hold every pair of values which some allowed case holds.

    Args:
        factors: name -> values. Put factors that constrain others first.
        allowed: says of a partial choice whether it may still become a case: it must hold for every part of a
            choice for which it holds.
    """
    uses = {pair: 0 for pair in _pairs(factors) if _can_be_completed(dict(pair), factors, allowed)}
    cases: list[Choice] = []
    for pair in list(uses):
        if uses[pair]:
            continue
        case = _grow(dict(pair), factors, allowed, uses)
        for held in combinations(case.items(), 2):
            uses[held] += 1
        cases.append(case)
    return cases


def missing_pairs(cases: Sequence[Choice], factors: Factors, *, allowed: Allowed = lambda choice: True) -> list[Pair]:
    """The pairs that an allowed case could hold and none of these cases does."""
    held = {pair for case in cases for pair in combinations(((name, case[name]) for name in factors), 2)}
    return [pair for pair in _pairs(factors) if pair not in held and _can_be_completed(dict(pair), factors, allowed)]


def _pairs(factors: Factors) -> Iterator[Pair]:
    for (one, ones), (two, twos) in combinations(factors.items(), 2):
        for first, second in product(ones, twos):
            yield (one, first), (two, second)


def _grow(start: Choice, factors: Factors, allowed: Allowed, uses: Mapping[Pair, int]) -> Choice:
    """Complete a choice, factor by factor, with the value that makes most new pairs; then the rarest pairs."""
    order = {name: place for place, name in enumerate(factors)}
    case = dict(start)
    for name, values in factors.items():
        if name in case:
            continue
        ranked = sorted(values, key=lambda value: _staleness(case, (name, value), order, uses))
        case[name] = next(value for value in ranked if _can_be_completed({**case, name: value}, factors, allowed))
    return {name: case[name] for name in factors}


def _staleness(
    case: Choice, item: tuple[str, Any], order: Mapping[str, int], uses: Mapping[Pair, int]
) -> tuple[int, float]:
    counts = []
    for other in case.items():
        pair = (other, item) if order[other[0]] < order[item[0]] else (item, other)
        counts.append(uses.get(pair, 0))
    return (-counts.count(0), sum(counts) / len(counts))


def _can_be_completed(choice: Choice, factors: Factors, allowed: Allowed) -> bool:
    if not allowed(choice):
        return False
    left = next((name for name in factors if name not in choice), None)
    if left is None:
        return True
    return any(_can_be_completed({**choice, left: value}, factors, allowed) for value in factors[left])
