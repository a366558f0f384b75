"""Head counts and widths that modules keep as attributes, as they are on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybrid.contracts.tensor_claims import PLAN, Claims, Problems, general
from hybrid.contracts.tensor_facts import ModelFacts, parent_of
from hybrid.contracts.tensor_families import HEADS
from hybrid.contracts.tensor_regions import Region, holder

__all__ = ["local_attributes"]

_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_WIDTHS = ("split_size", "inner_dim", "all_head_size")
_GROUPS = ("num_key_value_groups", "num_kv_groups", "num_queries_per_kv", "n_rep")


def local_attributes(
    facts: ModelFacts, regions: Sequence[Region], claims: Claims, *, degree: int, problems: Problems
) -> dict[str, dict[str, int]]:
    """Module -> attribute -> its value on each rank.

    A region whose layers name attributes to divide gets exactly those; any other the known names, where the value is
    that of its heads.
    """
    found: dict[str, dict[str, int]] = {}
    kv_heads = {region.parent: region.kv_heads for region in regions if region.head_size > 1}
    said = set()
    for fqn, claim in claims.modules.items():
        if claim.divide is None:
            continue
        said.add(parent_of(fqn))
        for name in claim.divide:
            place = _find(facts, parent_of(fqn), name)
            if place is None:
                known = ", ".join(sorted(facts.attributes.get(parent_of(fqn), ()))) or "none"
                problems.setting(
                    f"{PLAN}: divide = {name!r} of {general(fqn)}: {holder(general(parent_of(fqn)))} has no such "
                    f"attribute with a whole number; known: {known}"
                )
                continue
            _divide(facts, *place, kv_heads.get(parent_of(fqn)), degree, found, problems)
    for fqn, claim in claims.divided.items():
        said.add(fqn)
        for name in claim.divide or ():
            if name not in facts.attributes.get(fqn, {}):
                known = ", ".join(sorted(facts.attributes.get(fqn, ()))) or "none"
                problems.setting(
                    f"{PLAN}: divide = {name!r} of {general(fqn)}: no such attribute with a whole number; known: "
                    f"{known}"
                )
                continue
            _divide(facts, fqn, name, kv_heads.get(fqn), degree, found, problems)
    for region in regions:
        if region.head_size > 1 and region.parent not in said:
            local = _of_region(facts.attributes.get(region.parent, {}), region, degree)
            if local:
                found.setdefault(region.parent, {}).update(local)
    return found


def _of_region(attributes: Mapping[str, int], region: Region, degree: int) -> dict[str, int]:
    heads, kv_heads = region.heads, region.kv_heads
    local_heads, local_kv_heads = heads // degree, max(1, kv_heads // degree)
    whole = dict.fromkeys(HEADS, (heads, local_heads))
    whole |= dict.fromkeys(_KV_HEADS, (kv_heads, local_kv_heads))
    whole |= dict.fromkeys(_WIDTHS, (heads * region.head_size, local_heads * region.head_size))
    whole |= dict.fromkeys(_GROUPS, (heads // kv_heads, local_heads // local_kv_heads))
    return {
        name: whole[name][1]
        for name, value in attributes.items()
        if name in whole and value == whole[name][0] and whole[name][1] != value
    }


def _find(facts: ModelFacts, parent: str, name: str) -> tuple[str, str] | None:
    """The module and attribute of a name: in the parent, or by a dotted path from it or from a module around it."""
    path, _, attribute = name.rpartition(".")
    if not path:
        return (parent, attribute) if attribute in facts.attributes.get(parent, {}) else None
    base = parent
    while True:
        fqn = f"{base}.{path}" if base else path
        if attribute in facts.attributes.get(fqn, {}):
            return fqn, attribute
        if not base:
            return None
        base = parent_of(base)


def _divide(
    facts: ModelFacts,
    fqn: str,
    name: str,
    kv_heads: int | None,
    degree: int,
    found: dict[str, dict[str, int]],
    problems: Problems,
) -> None:
    value = facts.attributes[fqn][name]
    if value % degree == 0:
        found.setdefault(fqn, {})[name] = value // degree
    elif value == kv_heads and degree % value == 0:
        found.setdefault(fqn, {})[name] = 1
    else:
        problems.setting(f"{PLAN}: {name}={value} of {holder(general(fqn))} is not a multiple of the degree {degree}")
