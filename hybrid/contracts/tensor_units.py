"""Modules that hold column layers together with the row layers that close them: what they return is whole again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from hybrid.contracts.tensor_facts import ModelFacts, parent_of
from hybrid.contracts.tensor_plan import CutUnit, ModuleRule
from hybrid.contracts.tensor_regions import Region
from hybrid.contracts.tensor_sequence import find_blocks

__all__ = ["cut_units"]

# They hold modules for others to call.
_NEVER_CALLED = ("ModuleDict", "ModuleList")


def cut_units(
    facts: ModelFacts,
    rules: Mapping[str, ModuleRule],
    *,
    regions: Sequence[Region],
    attributes: Iterable[str],
    by_user: Set[str],
) -> tuple[CutUnit, ...]:
    """The blocks of all stacks, and the smallest modules around what is cut outside of them.

    Args:
        regions: the pairs of layers.
        attributes: modules of which attributes are divided.
        by_user: modules and parameters of which the user's plan says something.
    """
    stacks = find_blocks(facts, rules)
    # The layers of a Sequential that are cut themselves are no units: one of them has a part of what another needs.
    blocks = [fqn for stack in stacks if not any(fqn in rules for fqn in stack) for fqn in stack]
    blocks = [block for block in blocks if facts.by_fqn[block].class_name not in _NEVER_CALLED]
    found = [block for block in blocks if any(_is_in(rule, block) for rule in rules)]
    for region in regions:
        held = [region.row.fqn, *(column.fqn for column in region.columns)]
        if not any(all(_is_below(fqn, unit) for fqn in held) for unit in found):
            found.append(_around(facts, held))
    for fqn in (*attributes, *_others(rules, by_user)):
        if not any(_is_in(fqn, unit) for unit in found):
            held = [child.fqn for child in facts.children(fqn)] if fqn in facts.by_fqn else []
            found.append(_around(facts, held or [fqn]))
    found = list(dict.fromkeys(found))
    outermost = [
        fqn for fqn in found if not any(_is_below(fqn, other) and not _holds(other, blocks) for other in found)
    ]
    return tuple(
        CutUnit(
            fqn=fqn,
            by_user=any(_is_in(one, fqn) for one in by_user),
            is_known=all(module.is_known for module in facts.inside(fqn)),
            holds_others=_holds(fqn, outermost),
        )
        for fqn in sorted(outermost, key=list(facts.by_fqn).index)
    )


def _others(rules: Mapping[str, ModuleRule], by_user: Set[str]) -> Iterator[str]:
    """What the user says acts on cut activations, or gives some: somebody else must be the other half."""
    for fqn in by_user:
        rule = rules.get(fqn)
        if rule is not None and rule.style in {"partial", "embedding_colwise"}:
            yield fqn


def _is_in(fqn: str, unit: str) -> bool:
    return fqn == unit or _is_below(fqn, unit)


def _is_below(fqn: str, unit: str) -> bool:
    return fqn != unit and (not unit or fqn.startswith(f"{unit}."))


def _holds(unit: str, others: Iterable[str]) -> bool:
    return any(_is_below(other, unit) for other in others)


def _around(facts: ModelFacts, held: Sequence[str]) -> str:
    """The smallest module that all of these lie in and that somebody calls."""
    around = parent_of(held[0])
    while not all(_is_below(fqn, around) for fqn in held) or facts.by_fqn[around].class_name in _NEVER_CALLED:
        around = parent_of(around)
    return around
