"""What can be wrong with rules that fit by themselves: odd classes, weights between cut layers, ties."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from hybrid.contracts.placement import Cut
from hybrid.contracts.tensor_claims import PLAN, Claim, Claims, Problems, general, listed
from hybrid.contracts.tensor_facts import ModelFacts, ModuleFacts
from hybrid.contracts.tensor_plan import ModuleRule
from hybrid.contracts.tensor_regions import Region, holder

__all__ = ["check_classes", "check_groups", "check_ties", "holds_norms", "partial_between"]

_OF_HEADS = ("q_", "k_", "query_", "key_", "v_", "value_")


def check_classes(facts: ModelFacts, rules: Mapping[str, ModuleRule], problems: Problems) -> None:
    """Only layers with the stock forward can be cut: of any other nobody knows what it does with its weight."""
    odd: dict[str, ModuleRule] = {}
    for fqn, rule in rules.items():
        module = facts.by_fqn[fqn]
        if rule.style == "partial":
            continue
        if not module.exact:
            odd.setdefault(general(fqn), rule)
        if module.options and rule.style in {"vocab", "embedding_colwise"}:
            problems.model(
                f"{general(fqn)}: an embedding with {' and '.join(module.options)} cannot be cut; build it without, or "
                f"keep it whole: {PLAN} = {{{general(fqn)!r}: 'replicated'}}"
            )
    for pattern, rule in odd.items():
        name = facts.by_fqn[rule.fqn].class_name
        low_rank = [one for one in facts.by_fqn[rule.fqn].parameters if one.lower().startswith("lora_")]
        if low_rank:
            problems.model(
                f"{pattern} ({name}) holds a low-rank side path (LoRA) as parameters of its own, "
                f"{' and '.join(low_rank)}, which its forward adds to its weight's product, so it cannot be cut "
                f"({rule.source}); hold linear layers lora_A and lora_B beside the layer, as base_layer, in a module "
                f"in its place; merge them; or keep it whole: {PLAN} = {{{pattern!r}: 'replicated'}}, and the layers "
                "that are cut with it"
            )
            continue
        problems.model(
            f"{pattern} ({name}) has a forward or a weight of its own, not the stock layer's, so it cannot be cut "
            f"({rule.source}); use the stock class, or keep it whole: {PLAN} = {{{pattern!r}: 'replicated'}}, and the "
            "layers that are cut with it"
        )


def check_groups(groups: Iterable[tuple[str, ...]], claims: Mapping[str, Claim], problems: Problems) -> None:
    """Layers that work on the same heads or width are cut together or not at all: shapes may fit by chance."""
    for group in groups:
        held = [(fqn, claims[fqn]) for fqn in group if fqn in claims]
        cut = [fqn for fqn, claim in held if not _is_whole(claim)]
        whole = [(fqn, claim) for fqn, claim in held if _is_whole(claim)]
        if cut and whole:
            fqn, claim = whole[0]
            problems.setting(
                f"{general(fqn)} gives or takes whole activations ({claim.source}), but {general(cut[0])} works on cut "
                f"ones ({claims[cut[0]].source}); in {PLAN} treat them alike: {', '.join(map(general, group))}"
            )


def _is_whole(claim: Claim) -> bool:
    return claim.style == "replicated" or claim.gather_output or claim.split_input


def holds_norms(facts: ModelFacts, parent: str) -> bool:
    """Whether a module holds norms of the model's width, as a whole block does, and not only norms of heads."""
    return any(
        module.kind == "norm" and module.fqn != parent and not module.name.startswith(_OF_HEADS)
        for module in facts.inside(parent)
    )


def partial_between(facts: ModelFacts, regions: Sequence[Region], claims: Claims, problems: Problems) -> dict[str, str]:
    """Whole parameters that act on cut activations, so that each rank has a part of their gradient -> why.

    Norms of the size of a head are known. Where sizes cannot tell on which side of the cut a parameter acts, the
    user must say it.
    """
    found: dict[str, str] = {}
    for fqn, claim in claims.parameters.items():
        if claim.style == "partial":
            found[fqn] = "acts on cut activations"
    for fqn, claim in claims.modules.items():
        if claim.style == "partial":
            module = facts.by_fqn[fqn]
            found |= {module.parameter_fqn(name): "acts on cut heads" for name in module.parameters}
    for region in regions:
        for module in _beside(facts, region, claims):
            said = claims.modules.get(module.fqn)
            for name, shape in module.parameters.items():
                fqn = module.parameter_fqn(name)
                if fqn in claims.parameters or fqn in found:
                    continue
                # Whatever the plan calls it: whole it stays, and its gradient is a sum.
                if _acts_on_heads(module, shape, region):
                    found[fqn] = "acts on cut heads"
                elif said is not None and said.explicit:
                    continue
                elif module.kind == "norm" and _is_over_cut_width(module, shape, region):
                    problems.model(
                        f"{general(module.fqn)} normalises over the whole width of {shape[0]} that is cut between the "
                        f"layers of {holder(region.parent)}; keep these layers whole, or give the column layers "
                        "'colwise_gather_output' and the row layer 'rowwise_split_input'"
                    )
                elif module.is_linear and not _is_outside(module, shape, region, claims.modules[region.row.fqn], facts):
                    problems.model(
                        f"{general(module.fqn)} is a linear layer beside cut layers and has no rule: give it "
                        "'colwise' if its output goes to cut heads or columns, 'replicated' if it goes in or comes "
                        "back whole; where it mixes the two (a gate on the heads from a whole input), keep the layers "
                        "around it 'replicated'"
                    )
                elif not _is_outside(module, shape, region, claims.modules[region.row.fqn], facts):
                    problems.model(
                        f"{general(fqn)} of shape {tuple(shape)} stands beside cut layers and has no rule; say in "
                        f"{PLAN} {{{general(fqn)!r}: 'partial'}} if it acts on what the cut layers give out, "
                        "'replicated' if on what goes in or comes back whole"
                    )
    return found


def _beside(facts: ModelFacts, region: Region, claims: Claims) -> Iterator[ModuleFacts]:
    """The module that calls the layers of a region, and those without a rule directly in it."""
    if facts.by_fqn[region.parent].kind != "attention":
        yield facts.by_fqn[region.parent]
    # Of an attention or a feed-forward, also what lies deeper (a module of two norms, one that holds a scale).
    is_part = region.parent != "" and not holds_norms(facts, region.parent)
    for child in facts.inside(region.parent) if is_part else facts.children(region.parent):
        claimed = claims.modules.get(child.fqn)
        if child.fqn == region.parent or facts.by_fqn[child.parent].kind == "attention" or child.kind == "attention":
            continue
        deep = child.parent != region.parent
        leaf = not facts.children(child.fqn)
        if (not child.is_linear if deep else leaf or is_part) and (claimed is None or claimed.style == "replicated"):
            yield child


def _hidden(region: Region) -> set[int]:
    """Widths outside of the region."""
    return {region.row.sizes[1], *(column.sizes[0] for column in region.columns)}


def _cut_widths(region: Region) -> set[int]:
    return {heads * size for parts in region.parts.values() for heads, size in parts}


def _is_over_cut_width(module: ModuleFacts, shape: tuple[int, ...], region: Region) -> bool:
    cut = len(shape) == 1 and shape[0] in _cut_widths(region)
    return cut and (shape[0] not in _hidden(region) or module.name.startswith(_OF_HEADS))


def _acts_on_heads(module: ModuleFacts, shape: tuple[int, ...], region: Region) -> bool:
    if module.kind != "norm" or region.head_size == 1 or shape != (region.head_size,):
        return False
    return region.head_size not in _hidden(region) or module.name.startswith(_OF_HEADS)


def _is_outside(module: ModuleFacts, shape: tuple[int, ...], region: Region, claim: Claim, facts: ModelFacts) -> bool:
    """Whether a parameter is known to act on whole activations."""
    # Who wrote the plan of a model knows what else stands in its attention.
    if claim.source.startswith("the model's own plan"):
        return True
    hidden = _hidden(region)
    block = holds_norms(facts, region.parent)
    if module.is_linear or module.kind == "embedding":
        return block
    if module.kind == "norm":
        return set(shape) <= hidden
    return len(shape) == 1 and shape[0] in hidden and (block or shape[0] not in _cut_widths(region))


def check_ties(
    facts: ModelFacts,
    rules: Mapping[str, ModuleRule],
    cuts: Mapping[str, tuple[Cut, ...]],
    problems: Problems,
) -> None:
    """All names of one parameter must be cut alike, for it stays one parameter.

    `cuts`: by every name of a parameter that is cut, what each rank holds.
    """
    seen: set[str] = set()
    for module in facts.modules:
        for name, others in module.tied.items():
            fqn = module.parameter_fqn(name)
            if fqn in seen:
                continue
            names = (fqn, *others)
            seen.update(names)
            # A vector in a module that is no layer is only another name: BERT's head has its bias twice. A matrix there
            # is computed with, and that code would find a part of it.
            held = [one for one in names if _is_of_layer(facts, one)]
            if len({cuts.get(one) for one in held}) > 1:
                told = " but ".join(f"{one} is {_told(facts, rules, one)}" for one in held)
                problems.model(
                    f"{listed(names)} are one parameter and must be cut alike: {told}; cut a tied embedding 'vocab' "
                    "and its output layer 'head', or keep all of them 'replicated'"
                )


def _is_of_layer(facts: ModelFacts, fqn: str) -> bool:
    module = facts.by_fqn.get(fqn.rpartition(".")[0])
    if module is None:
        return False
    return module.kind in {"linear", "conv1d", "embedding"} or len(facts.parameters[fqn]) > 1


def _told(facts: ModelFacts, rules: Mapping[str, ModuleRule], fqn: str) -> str:
    rule = rules.get(fqn.rpartition(".")[0])
    return f"{rule.style!r}" if rule is not None else "whole"
