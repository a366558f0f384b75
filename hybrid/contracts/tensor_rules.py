"""The rule for each weight of a model under tensor parallelism, and all that speaks against a degree.

Sources, the first that knows a layer wins: the plan in the strategy, the plan that the model brings along, names of
known families. Works on facts (`contracts/tensor_facts.py`), before anything has started.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from hybrid.contracts.placement import Cut
from hybrid.contracts.tensor_adapters import SidePath, check_side_paths, with_side_paths, without_side_paths
from hybrid.contracts.tensor_advice import no_rule
from hybrid.contracts.tensor_attributes import local_attributes
from hybrid.contracts.tensor_checks import check_classes, check_groups, check_ties, partial_between
from hybrid.contracts.tensor_claims import Claim, Claims, Problems, general, matching, read_model_plan, read_user_plan
from hybrid.contracts.tensor_facts import ModelFacts, ModuleFacts
from hybrid.contracts.tensor_families import HEADS, experts, family_claims, output_layers, token_embeddings
from hybrid.contracts.tensor_plan import ModuleRule, ParameterRow, Style, TensorPlan
from hybrid.contracts.tensor_regions import Parts, Region, Requirement, find_regions, requirements, resolve_heads
from hybrid.contracts.tensor_sequence import cross_attention, sequence_layout
from hybrid.contracts.tensor_units import cut_units

__all__ = ["plan_tensor_parallel", "working_degrees"]

_DEGREE = "tensor_parallel_configs.degree"
_MOST_DEGREES = 12


@dataclass(slots=True)
class _Draft:
    """All that does not depend on the degree."""

    claims: Claims
    by_user: set[str] = field(default_factory=set)
    regions: list[Region] = field(default_factory=list)
    parts: dict[str, Parts] = field(default_factory=dict)
    requirements: list[Requirement] = field(default_factory=list)
    partial: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)


def plan_tensor_parallel(
    facts: ModelFacts,
    *,
    degree: int,
    plan: Mapping[str, Any] | None = None,
    sequence_parallel: bool = False,
) -> TensorPlan:
    """What becomes of each module and parameter on `degree` tp ranks.

    Args:
        facts: the model.
        degree: number of tp ranks.
        plan: the user's: pattern of module names -> style, or {"style", "fused", "heads", "divide", "gather_output"}.
        sequence_parallel: also cut the activations between the layers.

    Raises:
        StrategyError: the plan or the degree does not fit the model; all problems in one message.
        ModelError: nothing is wrong with the settings, but this model cannot be cut.
    """
    problems = Problems()
    bare, side_paths = _without_side_paths(facts, plan)
    found = _plan_layers(bare, problems, degree=degree, plan=plan, sequence_parallel=sequence_parallel)
    check_side_paths(found, side_paths, problems)
    problems.raise_all()
    return with_side_paths(found, facts, side_paths)


def _without_side_paths(facts: ModelFacts, plan: Mapping[str, Any] | None) -> tuple[ModelFacts, Mapping[str, SidePath]]:
    """But for those in which the user's plan has words for the parts."""
    return without_side_paths(facts, [one.fqn for pattern in plan or {} for one in matching(pattern, facts)[0]])


def _plan_layers(
    facts: ModelFacts,
    problems: Problems,
    *,
    degree: int,
    plan: Mapping[str, Any] | None,
    sequence_parallel: bool,
) -> TensorPlan:
    if degree == 1:
        # Nothing is cut, so only what is wrong with the plan itself counts.
        read_user_plan(facts, plan or {}, problems)
        problems.raise_all()
        return TensorPlan(degree=1, replicated=_all_whole(facts), rows=_rows(facts, {}, _all_whole(facts)))
    mixture = experts(facts)
    if mixture is not None:
        problems.model(
            f"{mixture.fqn or 'the model'} ({mixture.class_name}) is a mixture of experts: expert parallel is not "
            f"available, and tensor parallel does not cut experts; use {_DEGREE} = 1"
        )
        problems.raise_all()
    draft = _draft(facts, plan or {}, problems)
    _check_degree(draft.requirements, degree, problems)
    if any(text.startswith(_DEGREE) for text in problems.texts):
        problems.raise_all()
    rules = _rules(facts, draft, degree)
    check_classes(facts, rules, problems)
    attributes = local_attributes(facts, draft.regions, draft.claims, degree=degree, problems=problems)
    problems.raise_all()
    cuts = _cuts(facts, rules, degree)
    check_ties(facts, rules, cuts, problems)
    whole = {fqn: claim.source for fqn, claim in draft.claims.modules.items() if claim.style == "replicated"}
    partial = dict(draft.partial)
    layout = None
    if sequence_parallel:
        layout = sequence_layout(facts, rules, whole | draft.left, problems)
        partial = dict(layout.partial) | partial
        rules = {fqn: replace(rule, in_blocks=fqn in layout.inside) for fqn, rule in rules.items()}
        split = dict.fromkeys(general(f) for f, r in rules.items() if r.in_blocks and r.split_input)
        if split:
            problems.setting(
                "tensor_parallel_configs.sequence_parallel: between the blocks each rank has a part of the sequence, "
                f"and {', '.join(split)} takes a whole input to split by features; set sequence_parallel to False"
            )
    problems.raise_all()
    replicated = dict(_reasons(facts, rules, draft, cuts, partial))
    return TensorPlan(
        degree=degree,
        sequence_parallel=sequence_parallel,
        rules=rules,
        attributes=attributes,
        replicated=replicated,
        partial={facts.first_names[fqn]: why for fqn, why in partial.items()},
        gather_at=layout.gather_at if layout is not None else (),
        cross_attention=cross_attention(facts, rules),
        blocks=layout.blocks if layout is not None else (),
        rows=_rows(facts, _cut_rows(facts, rules, cuts), replicated),
        units=cut_units(facts, rules, regions=draft.regions, attributes=attributes, by_user=draft.by_user),
    )


def working_degrees(facts: ModelFacts, plan: Mapping[str, Any] | None = None) -> list[int]:
    """Tensor parallel degrees that the sizes of this model allow; [1] if it cannot be cut at all."""
    problems = Problems()
    facts, _ = _without_side_paths(facts, plan)
    if experts(facts) is not None:
        return [1]
    draft = _draft(facts, plan or {}, problems)
    return _working(draft.requirements) if not problems.texts else [1]


def _working(required: Iterable[Requirement]) -> list[int]:
    required = list(required)
    limits = [one.number for one in required if not one.may_copy]
    return [degree for degree in range(1, min(limits, default=1) + 1) if all(one.allows(degree) for one in required)]


def _check_degree(required: Iterable[Requirement], degree: int, problems: Problems) -> None:
    required = list(dict.fromkeys(required))
    working = _working(required)
    shown = ", ".join(map(str, working[:_MOST_DEGREES])) + (", ..." if len(working) > _MOST_DEGREES else "")
    for one in required:
        if one.allows(degree):
            continue
        if one.at_least:
            verdict = "is more than"
        elif one.may_copy:
            verdict = "neither divides nor is a multiple of"
        else:
            verdict = "does not divide"
        problems.setting(f"{_DEGREE} = {degree} {verdict} {one.words}; degrees that work for this model: {shown}")


def _draft(facts: ModelFacts, plan: Mapping[str, Any], problems: Problems) -> _Draft:
    """Claims from all sources, pairs, heads and requirements."""
    claims = read_user_plan(facts, plan, problems)
    by_user = {*claims.modules, *claims.parameters, *claims.divided}
    from_model = read_model_plan(facts, by_user, problems)
    families = family_claims(facts)
    tokens = token_embeddings(facts)
    outputs = output_layers(facts, tokens)
    found = dict(from_model.modules)
    odd = _odd_embeddings(facts, tokens, outputs)
    left = families.left | odd
    for fqn, claim in families.claims.items():
        found.setdefault(fqn, claim)
    whole = [facts.by_fqn[fqn] for fqn, claim in claims.modules.items() if claim.style == "replicated"]
    kept = {fqn for fqn in facts.by_fqn if any(facts.is_tied_to(facts.by_fqn[fqn], one) for one in whole)} | odd.keys()
    for fqn in kept:
        found.pop(fqn, None)
    for fqn, why in tokens.items():
        if fqn not in kept:
            found.setdefault(fqn, Claim(style="vocab", source=why))
    for fqn, why in outputs.items():
        if fqn in kept:
            continue
        # A plan says 'colwise, gathered' of an output layer; here its loss can be computed on cut logits.
        if found.get(fqn, Claim(style="", source="")).style in {"", "colwise"}:
            found[fqn] = Claim(style="head", source=found[fqn].source if fqn in found else why)
    claims.modules = found | claims.modules
    claims.parameters = from_model.parameters | claims.parameters
    order = {module.fqn: None for module in facts.modules if module.fqn in claims.modules}
    claims.modules = {fqn: claims.modules[fqn] for fqn in order}
    draft = _Draft(claims=claims, by_user=by_user, left=left, outputs=outputs)
    if not problems.texts and not _cuts_layers(facts, claims, outputs):
        problems.model(no_rule(facts, outputs))
        return draft
    check_groups(families.groups, claims.modules, problems)
    draft.regions = find_regions(facts, claims.modules, problems)
    for region in draft.regions:
        resolve_heads(facts, region, claims.modules, problems)
        draft.parts |= region.parts
        draft.requirements += requirements(region, problems)
    draft.requirements += _other_requirements(facts, draft)
    draft.requirements = list(dict.fromkeys(draft.requirements))
    draft.partial = partial_between(facts, draft.regions, claims, problems)
    return draft


def _odd_embeddings(facts: ModelFacts, tokens: Iterable[str], outputs: Iterable[str]) -> dict[str, str]:
    """Layers over the vocabulary that cannot be cut, and those tied to them -> why; only a user's plan cuts them."""
    over_vocabulary = [facts.by_fqn[fqn] for fqn in (*tokens, *outputs)]
    odd: dict[str, str] = {}
    for module in over_vocabulary:
        if module.exact and not module.options:
            continue
        reason = f"{module.fqn} has {' and '.join(module.options) or 'a forward or a weight of its own'}"
        odd.setdefault(module.fqn, reason)
        for other in over_vocabulary:
            if facts.is_tied_to(module, other):
                odd.setdefault(other.fqn, reason)
    return odd


def _cuts_layers(facts: ModelFacts, claims: Claims, outputs: Mapping[str, str]) -> bool:
    """Whether they cut more than embeddings and output layers, where there is more, or the user wants just that."""
    cutting = [claim for claim in claims.modules.values() if claim.style not in {"replicated", "partial"}]
    if any(claim.explicit or claim.style in {"colwise", "rowwise", "attention"} for claim in cutting):
        return True
    return bool(cutting) and not any(module.is_linear and module.fqn not in outputs for module in facts.modules)


def _other_requirements(facts: ModelFacts, draft: _Draft) -> Iterator[Requirement]:
    """Those of layers outside of regions; also sets their parts."""
    for fqn, claim in draft.claims.modules.items():
        module, where = facts.by_fqn[fqn], general(fqn)
        if claim.style in {"vocab", "head"}:
            size = module.sizes[0] if claim.style == "vocab" else module.sizes[1]
            yield Requirement(number=size, words=f"vocabulary {size} of {where}", at_least=True)
        elif claim.style == "attention":
            heads = facts.attribute(fqn, *HEADS) or 1
            size = facts.attribute(fqn, "head_dim") or 1
            draft.parts[fqn] = ((heads, size),) * 3
            yield Requirement(number=heads, words=f"num_heads={heads} of {where}")
        elif claim.style == "embedding_colwise":
            draft.parts[fqn] = ((module.sizes[1], 1),)
            yield Requirement(number=module.sizes[1], words=f"{module.sizes[1]} columns of {where}")
        elif claim.gather_output or claim.split_input:
            size = module.sizes[1] if claim.gather_output else module.sizes[0]
            draft.parts[fqn] = ((size, 1),)
            yield Requirement(number=size, words=f"width {size} of {where}")


def _rules(facts: ModelFacts, draft: _Draft, degree: int) -> dict[str, ModuleRule]:
    rules: dict[str, ModuleRule] = {}
    copied = {
        column.fqn: degree // heads
        for region in draft.regions
        for column in region.columns
        for heads, size in region.parts[column.fqn][:1]
        if heads < region.heads and heads < degree and region.head_size > 1
    }
    for module in facts.modules:
        fqn, claim = module.fqn, draft.claims.modules.get(module.fqn)
        if claim is None or claim.style in {"replicated", "partial"}:
            # A norm of heads need not be in any plan.
            if any(module.parameter_fqn(name) in draft.partial for name in module.parameters):
                source = claim.source if claim is not None else "acts on cut heads"
                rules[fqn] = ModuleRule(fqn=fqn, style="partial", source=source)
            continue
        rules[fqn] = ModuleRule(
            fqn=fqn,
            style=cast(Style, claim.style),
            source=claim.source,
            parts=draft.parts.get(fqn, ()),
            copies=copied.get(fqn, 1),
            gather_output=claim.gather_output,
            split_input=claim.split_input,
        )
    return rules


def _cuts(facts: ModelFacts, rules: Mapping[str, ModuleRule], degree: int) -> dict[str, tuple[Cut, ...]]:
    """By each name of a parameter that a rule cuts: what each rank holds."""
    found: dict[str, tuple[Cut, ...]] = {}
    for fqn, rule in rules.items():
        module = facts.by_fqn[fqn]
        for rank in range(degree):
            for name, cut in rule.cuts(module, rank=rank, degree=degree).items():
                parameter = module.parameter_fqn(name)
                found[parameter] = (*found.get(parameter, ()), cut)
    return found


def _cut_rows(
    facts: ModelFacts, rules: Mapping[str, ModuleRule], cuts: Mapping[str, tuple[Cut, ...]]
) -> dict[str, tuple[Cut, ModuleRule]]:
    """By the first name of each cut parameter: what rank 0 holds, and the rule."""
    found: dict[str, tuple[Cut, ModuleRule]] = {}
    for fqn, per_rank in cuts.items():
        holder = fqn.rpartition(".")[0]
        rule = rules[holder] if holder in rules else rules[holder.rpartition(".")[0]]
        found.setdefault(facts.first_names[fqn], (per_rank[0], rule))
    return found


def _all_whole(facts: ModelFacts) -> dict[str, str]:
    return dict.fromkeys(facts.first_names.values(), "one tensor-parallel rank")


def _reasons(
    facts: ModelFacts,
    rules: Mapping[str, ModuleRule],
    draft: _Draft,
    cuts: Mapping[str, tuple[Cut, ...]],
    partial: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """Why each parameter that is not cut stays whole."""
    cut = {facts.first_names[fqn] for fqn in cuts}
    for module in facts.modules:
        for name in module.parameters:
            fqn = module.parameter_fqn(name)
            if facts.first_names[fqn] == fqn and fqn not in cut:
                reason = _reason(module, name, rules, draft)
                yield fqn, f"{reason}; its gradient is summed: {partial[fqn]}" if fqn in partial else reason


def _reason(module: ModuleFacts, name: str, rules: Mapping[str, ModuleRule], draft: _Draft) -> str:
    claim = draft.claims.parameters.get(module.parameter_fqn(name)) or draft.claims.modules.get(module.fqn)
    if claim is not None and claim.style in {"replicated", "partial"}:
        return claim.source
    row = rules.get(module.fqn)
    if name == "bias" and (module.name == "out_proj" or (row is not None and row.style == "rowwise")):
        return "bias of a row layer, added once to the sum"
    if module.fqn in draft.left:
        return draft.left[module.fqn]
    match module.kind:
        case "norm":
            return "norm"
        case "embedding":
            return "embedding, not over the vocabulary"
        case "linear" | "conv1d":
            return f"no rule for this linear layer ({module.sizes[0]} -> {module.sizes[1]})"
    return f"no rule for a {module.class_name}"


def _rows(
    facts: ModelFacts, cuts: Mapping[str, tuple[Cut, ModuleRule]], replicated: Mapping[str, str]
) -> tuple[ParameterRow, ...]:
    rows = []
    for fqn, shape in facts.parameters.items():
        if facts.first_names[fqn] != fqn:
            continue
        if fqn in cuts:
            cut, rule = cuts[fqn]
            local = tuple(cut.local_size if dim == cut.dim else size for dim, size in enumerate(shape))
            words, source = rule.describe(), rule.source
        else:
            local, words, source = shape, f"whole: {replicated[fqn]}", ""
        rows.append(ParameterRow(fqn=fqn, global_shape=shape, local_shape=local, rule=words, source=source))
    return tuple(rows)
