"""Column layers with the row layer that closes them, and where heads lie in their widths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hybrid.contracts.tensor_claims import PLAN, Claim, Problems, general
from hybrid.contracts.tensor_facts import ModelFacts, ModuleFacts, parent_of
from hybrid.contracts.tensor_families import HEAD_SIZES, HEADS

__all__ = ["Parts", "Region", "Requirement", "find_regions", "holder", "requirements", "resolve_heads"]

Parts = tuple[tuple[int, int], ...]


@dataclass(slots=True, kw_only=True)
class Region:
    """What lies between column layers and a row layer: activations in it are cut.

    `parts` and `head_size` are filled by `resolve_heads`; without heads the head size is 1.
    """

    row: ModuleFacts
    columns: list[ModuleFacts]
    head_size: int = 1
    parts: dict[str, Parts] = field(default_factory=dict)

    @property
    def parent(self) -> str:
        """The module that calls the column layers."""
        return self.columns[0].parent

    @property
    def heads(self) -> int:
        """Heads of the row layer's input: the query heads."""
        return sum(heads for heads, _ in self.parts[self.row.fqn])

    @property
    def kv_heads(self) -> int:
        """Fewest heads of any part of a column layer."""
        return min([self.heads, *(heads for column in self.columns for heads, _ in self.parts[column.fqn])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A number that restricts the degree.

    Args:
        number: the number.
        words: what it counts.
        may_copy: heads that may be fewer than ranks, if they divide them.
        at_least: it need not be a multiple, only not smaller.
    """

    number: int
    words: str
    may_copy: bool = False
    at_least: bool = False

    def allows(self, degree: int) -> bool:
        if self.at_least:
            return degree <= self.number
        return self.number % degree == 0 or (self.may_copy and degree % self.number == 0)


def find_regions(facts: ModelFacts, claims: Mapping[str, Claim], problems: Problems) -> list[Region]:
    """Pair each column layer with the row layer that closes it; what has no partner goes to `problems`."""
    linear = [facts.by_fqn[fqn] for fqn in facts.by_fqn if fqn in claims and facts.by_fqn[fqn].is_linear]
    place = {module.fqn: index for index, module in enumerate(facts.modules)}
    columns = [one for one in linear if claims[one.fqn].style == "colwise" and not claims[one.fqn].gather_output]
    rows = [one for one in linear if claims[one.fqn].style == "rowwise" and not claims[one.fqn].split_input]
    regions: dict[str, Region] = {}
    away: list[ModuleFacts] = []
    holders = {column.parent for column in columns}
    for column in columns:
        here = [row for row in rows if row.parent == column.parent]
        if not here:
            away.append(column)
            continue
        near = next((row for row in here if place[row.fqn] > place[column.fqn]), here[-1])
        regions.setdefault(near.fqn, Region(row=near, columns=[])).columns.append(column)
    # As BERT has it: the columns in one module, the row in the one that is called after it.
    closing: dict[str, ModuleFacts] = {}
    for column in away:
        beside = parent_of(column.parent)
        row = closing.get(column.parent) or next(
            (
                row
                for row in rows
                if column.parent
                and row.fqn not in regions
                and row.parent not in holders
                and (not beside or row.fqn.startswith(f"{beside}."))
                and place[row.fqn] > place[column.fqn]
            ),
            None,
        )
        if row is None:
            problems.model(_lonely_column(column, claims[column.fqn]))
            continue
        closing[column.parent] = row
        regions.setdefault(row.fqn, Region(row=row, columns=[])).columns.append(column)
    for row in rows:
        if row.fqn not in regions:
            problems.model(_lonely_row(row, claims[row.fqn]))
    return [regions[module.fqn] for module in facts.modules if module.fqn in regions]


def _lonely_column(column: ModuleFacts, claim: Claim) -> str:
    return (
        f"{general(column.fqn)} is 'colwise' ({claim.source}), but no 'rowwise' layer in {holder(column.parent)} or "
        "beside it takes its cut output; give that layer the style 'rowwise', or this one 'gather_output': True"
    )


def _lonely_row(row: ModuleFacts, claim: Claim) -> str:
    return (
        f"{general(row.fqn)} is 'rowwise' ({claim.source}), but no 'colwise' layer in {holder(row.parent)} or before "
        "it leaves its output cut; make that layer 'colwise' without gather_output, or this one 'rowwise_split_input'"
    )


def holder(fqn: str) -> str:
    return general(fqn) if fqn else "the model"


def _sections(module: ModuleFacts, claim: Claim, problems: Problems) -> tuple[int, ...]:
    """Widths of the fused parts of a layer along the dim that is cut."""
    size = module.sizes[1] if claim.style == "colwise" else module.sizes[0]
    if claim.gather_output or claim.split_input:
        return (size,)
    if isinstance(claim.fused, tuple):
        if sum(claim.fused) == size:
            return claim.fused
        total = f"{' + '.join(map(str, claim.fused))} = {sum(claim.fused)}"
        problems.setting(
            f"{PLAN}: fused = {list(claim.fused)} of {general(module.fqn)}: {total}, but its width is {size}"
        )
    elif size % claim.fused == 0:
        return (size // claim.fused,) * claim.fused
    else:
        problems.setting(
            f"{PLAN}: fused = {claim.fused} of {general(module.fqn)} does not divide its width {size}; "
            "give the sizes of the parts in a list"
        )
    return (size,)


def resolve_heads(facts: ModelFacts, region: Region, claims: Mapping[str, Claim], problems: Problems) -> None:
    """Fill in the parts of a region's layers: from the plan, else from the attributes of the module that calls them."""
    layers = [*region.columns, region.row]
    widths = {layer.fqn: _sections(layer, claims[layer.fqn], problems) for layer in layers}
    head_size = _said_head_size(facts, region, claims, widths, problems)
    if head_size is None:
        head_size = _known_head_size(facts, region.parent, sum(widths[region.row.fqn]))
    if head_size is None and any(claims[layer.fqn].in_attention for layer in layers):
        names = ", ".join(layer.name for layer in region.columns)
        problems.model(
            f"the number of heads of {holder(region.parent)} ({names}) is not in its attributes; say it in {PLAN}: "
            f"{{{general(layers[0].fqn)!r}: {{'style': 'colwise', 'heads': ...}}}}, and likewise for its other layers"
        )
    region.head_size = head_size or 1
    for layer in layers:
        whole = all(width % region.head_size == 0 for width in widths[layer.fqn])
        size = region.head_size if whole else 1
        region.parts[layer.fqn] = tuple((width // size, size) for width in widths[layer.fqn])


def _said_head_size(
    facts: ModelFacts,
    region: Region,
    claims: Mapping[str, Claim],
    widths: Mapping[str, tuple[int, ...]],
    problems: Problems,
) -> int | None:
    """Size of a head by the `heads` of the plan's entries."""
    found: dict[int, str] = {}
    for layer in [*region.columns, region.row]:
        heads = claims[layer.fqn].heads
        if isinstance(heads, str):
            value = facts.attribute(region.parent, heads)
            if value is None:
                known = ", ".join(sorted(facts.attributes.get(region.parent, ()))) or "none"
                problems.setting(
                    f"{PLAN}: heads = {heads!r} of {general(layer.fqn)}: {holder(region.parent)} has no such attribute "
                    f"with a number; known: {known}"
                )
            heads = value
        if heads is None:
            continue
        width = widths[layer.fqn][0]
        if heads < 1 or width % heads:
            problems.setting(f"{PLAN}: {heads} heads do not divide the width {width} of {general(layer.fqn)}")
            continue
        found[width // heads] = f"{heads} heads of {general(layer.fqn)}"
    if len(found) > 1:
        sizes = " but ".join(f"{words} have size {size}" for size, words in found.items())
        problems.setting(f"{PLAN}: {sizes}")
    return next(iter(found), None)


def _known_head_size(facts: ModelFacts, parent: str, width: int) -> int | None:
    """Size of a head by the attributes of the module that holds the layers."""
    size = facts.attribute(parent, *HEAD_SIZES)
    if size is not None and size > 0 and width % size == 0:
        return size
    heads = facts.attribute(parent, *HEADS)
    if heads is not None and heads > 0 and width % heads == 0:
        return width // heads
    return None


def requirements(region: Region, problems: Problems) -> Iterator[Requirement]:
    """What a region asks of the degree."""
    heads, where = region.heads, holder(region.parent)
    if region.head_size == 1:
        names = " and ".join(dict.fromkeys((region.columns[0].name, region.row.name)))
        for width in dict.fromkeys(size for parts in region.parts.values() for size, _ in parts):
            yield Requirement(number=width, words=f"width {width} between {names} of {where}")
        return
    yield Requirement(number=heads, words=f"num_heads={heads} of {where}")
    for column in region.columns:
        for number, _ in region.parts[column.fqn]:
            if number >= heads:
                continue
            if heads % number:
                problems.model(
                    f"{heads} query heads of {where} are not a multiple of its {number} key/value heads "
                    f"({column.name}); use a number that divides {heads}"
                )
                continue
            # In one weight with the queries they cannot be copied: a cut copies all of its parts or none.
            alone = all(part[0] == number for part in region.parts[column.fqn])
            words = f"num_kv_heads={number} of {where}"
            if not alone:
                words += f" (in one weight with the queries, {column.name}, they cannot be copied)"
            yield Requirement(number=number, words=words, may_copy=alone)
