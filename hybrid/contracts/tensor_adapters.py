"""Low-rank side paths (LoRA) beside a linear layer, under tensor parallelism.

Libraries for fine-tuning put a module in the place of a linear layer, which holds that layer and, beside it, a product
of two thin ones. The rules of a model know the layer by its place, so they are worked out with the layer back in it,
and what they say of it is carried over to all three:

    layer       base        lora_A (width -> rank)                      lora_B (rank -> width)
    colwise     colwise     whole: it reads what the layer reads        colwise, with the layer's heads
    rowwise     rowwise     rowwise: it reads the cut input too         whole: it reads a sum
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from hybrid.contracts.tensor_claims import Problems, general
from hybrid.contracts.tensor_facts import ModelFacts, ModuleFacts, parent_of
from hybrid.contracts.tensor_plan import ModuleRule, ParameterRow, SidePathRule, TensorPlan

__all__ = ["SidePath", "check_side_paths", "with_side_paths", "without_side_paths"]

_BASES = ("base_layer", "base", "linear", "original_layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class SidePath:
    """A module with a linear layer and thin ones beside it.

    `pairs`: of each product, the layer that narrows and the one that widens again.
    """

    fqn: str
    base: ModuleFacts
    pairs: tuple[tuple[ModuleFacts, ModuleFacts], ...]


def without_side_paths(facts: ModelFacts, named: Iterable[str] = ()) -> tuple[ModelFacts, dict[str, SidePath]]:
    """The model with every base layer in the place of the module around it, and those modules by name.

    Args:
        named: modules that a plan has words for; where one lies in a side path, the plan rules there.
    """
    known = {parent for fqn in named for parent in _around(fqn)}
    found = {
        path.fqn: path
        for module in facts.modules
        if module.fqn not in known and (path := _side_path(facts, module)) is not None
    }
    if not found:
        return facts, found
    modules = []
    hidden = tuple(f"{fqn}." for fqn in found)
    for module in facts.modules:
        if module.fqn in found:
            is_known = all(part.is_known for part in facts.inside(module.fqn))
            modules.append(replace(found[module.fqn].base, fqn=module.fqn, aliases=(), is_known=is_known))
        elif not module.fqn.startswith(hidden):
            modules.append(module)
    return replace(facts, modules=tuple(modules)), found


def _around(fqn: str) -> Iterator[str]:
    while fqn := parent_of(fqn):
        yield fqn


def _side_path(facts: ModelFacts, module: ModuleFacts) -> SidePath | None:
    bases = [child for child in facts.children(module.fqn) if child.name in _BASES and child.is_linear]
    if len(bases) != 1 or module.parameters or not module.fqn or not bases[0].exact or any(bases[0].tied.values()):
        return None
    narrow, widen = [], []
    for one in facts.inside(module.fqn):
        if not one.parameters or one.fqn == bases[0].fqn:
            continue
        place = one.fqn[len(module.fqn) :].lower().split(".")
        if one.kind != "linear" or not one.exact or any(one.tied.values()):
            return None
        if "lora_a" in place:
            narrow.append(one)
        elif "lora_b" in place:
            widen.append(one)
        else:
            return None
    if not narrow or len(narrow) != len(widen):
        return None
    (width_in, width_out), pairs = bases[0].sizes, tuple(zip(narrow, widen, strict=True))
    if any(a.sizes[0] != width_in or b.sizes[1] != width_out or a.sizes[1] != b.sizes[0] for a, b in pairs):
        return None
    return SidePath(fqn=module.fqn, base=bases[0], pairs=pairs)


def check_side_paths(plan: TensorPlan, paths: Mapping[str, SidePath], problems: Problems) -> None:
    """What these rules have no answer for."""
    cut = {general(fqn): plan.rules[fqn] for fqn in paths if fqn in plan.rules}
    for name, rule in cut.items():
        if rule.style not in {"colwise", "rowwise"}:
            problems.model(
                f"{name} is cut as {rule.style!r} ({rule.source}) and has a low-rank side path (LoRA), which is "
                "available beside 'colwise' and 'rowwise' layers; leave the path away there, or say "
                f"{{{name!r}: 'replicated'}} in tensor_parallel_configs.plan"
            )
    inside = [name for name, rule in cut.items() if rule.in_blocks]
    if inside:
        problems.setting(
            f"tensor_parallel_configs.sequence_parallel: low-rank side paths (LoRA) beside {', '.join(inside)} read "
            "whole sequences; set sequence_parallel to False"
        )


def with_side_paths(plan: TensorPlan, facts: ModelFacts, paths: Mapping[str, SidePath]) -> TensorPlan:
    """The plan of `without_side_paths(facts)` for the model as it is."""
    if not paths:
        return plan
    rules: dict[str, ModuleRule] = {}
    for fqn, rule in plan.rules.items():
        if fqn in paths:
            rules |= {one.fqn: one for one in _carried_over(rule, paths[fqn])}
        else:
            rules[fqn] = rule
    names = {
        f"{fqn}.{name}": path.base.parameter_fqn(name) for fqn, path in paths.items() for name in path.base.parameters
    }
    replicated = {names.get(fqn, fqn): why for fqn, why in plan.replicated.items()}
    rows = {names.get(row.fqn, row.fqn): replace(row, fqn=names.get(row.fqn, row.fqn)) for row in plan.rows}
    for path in paths.values():
        for row in _rows(path, rules, plan.degree):
            rows[row.fqn] = row
            if row.local_shape == row.global_shape:
                replicated[row.fqn] = row.rule.removeprefix("whole: ")
    return replace(
        plan,
        rules={module.fqn: rules[module.fqn] for module in facts.modules if module.fqn in rules},
        replicated=replicated,
        partial={names.get(fqn, fqn): why for fqn, why in plan.partial.items()},
        rows=tuple(rows[fqn] for fqn in facts.parameters if fqn in rows),
        side_paths={fqn: _facts_of_use(plan.rules[fqn], path) for fqn, path in paths.items() if fqn in plan.rules},
    )


def _facts_of_use(rule: ModuleRule, path: SidePath) -> SidePathRule:
    return SidePathRule(
        reads_whole=rule.style == "colwise" or rule.split_input,
        leaves_whole=rule.style == "rowwise" or rule.gather_output,
        base=path.base.fqn,
        narrow=tuple(narrow.fqn for narrow, _ in path.pairs),
        widen=tuple(widen.fqn for _, widen in path.pairs),
    )


def _carried_over(rule: ModuleRule, path: SidePath) -> Iterator[ModuleRule]:
    yield replace(rule, fqn=path.base.fqn)
    for narrow, widen in path.pairs:
        cut = widen if rule.style == "colwise" else narrow
        yield replace(rule, fqn=cut.fqn, source=f"side path of a {rule.style} layer")


def _rows(path: SidePath, rules: Mapping[str, ModuleRule], degree: int) -> Iterator[ParameterRow]:
    for module in (one for pair in path.pairs for one in pair):
        rule = rules.get(module.fqn)
        cuts = rule.cuts(module, rank=0, degree=degree) if rule is not None else {}
        for name, shape in module.parameters.items():
            fqn = module.parameter_fqn(name)
            if rule is not None and name in cuts:
                cut = cuts[name]
                local = tuple(cut.local_size if dim == cut.dim else size for dim, size in enumerate(shape))
                yield ParameterRow(
                    fqn=fqn, global_shape=shape, local_shape=local, rule=rule.describe(), source=rule.source
                )
            else:
                why = (
                    "bias of a row layer, added once to the sum" if name == "bias" and rule else _why_whole(path, rules)
                )
                yield ParameterRow(fqn=fqn, global_shape=shape, local_shape=shape, rule=f"whole: {why}", source="")


def _why_whole(path: SidePath, rules: Mapping[str, ModuleRule]) -> str:
    return "side path of a layer that is not cut" if path.base.fqn not in rules else "side path, on whole activations"
