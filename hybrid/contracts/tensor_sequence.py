"""Where the sequence is cut under sequence parallel: stacks of blocks, and the entries at which it is gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hybrid.contracts.tensor_checks import holds_norms
from hybrid.contracts.tensor_claims import PLAN, Problems, general
from hybrid.contracts.tensor_facts import ModelFacts, ModuleFacts
from hybrid.contracts.tensor_plan import ModuleRule

__all__ = ["SequenceLayout", "cross_attention", "find_blocks", "sequence_layout"]

_CONTAINERS = ("ModuleList", "Sequential", "PipelineLayer")
_CUTTING = ("colwise", "rowwise", "attention")
_CROSS = (
    "EncDecAttention",
    "cross_attention",
    "cross_attn",
    "crossattention",
    "enc_dec_attention",
    "encdec_attn",
    "encoder_attn",
    "multihead_attn",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """Fields of the plan of the same names; `inside` are all modules of the blocks."""

    blocks: tuple[tuple[str, ...], ...]
    gather_at: tuple[str, ...] = ()
    partial: Mapping[str, str] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()


def find_blocks(facts: ModelFacts, rules: Mapping[str, ModuleRule]) -> tuple[tuple[str, ...], ...]:
    """The outermost lists of modules that hold cut layers, each from the first such module to the last.

    Lists in a list are no modules that anybody calls: what they hold counts instead. Without any such list, the
    layers of a `Sequential` that holds cut layers itself.
    """
    cut = [fqn for fqn, rule in rules.items() if rule.style in _CUTTING]
    stacks: list[tuple[str, ...]] = []
    for module in facts.modules:
        listed = module.class_name == "ModuleList" and facts.by_fqn[module.parent].class_name == "ModuleList"
        if module.class_name not in _CONTAINERS or listed or any(_below(module.fqn, stack) for stack in stacks):
            continue
        held = list(_called(facts, module.fqn))
        holding = [i for i, child in enumerate(held) if any(one.startswith(f"{child.fqn}.") for one in cut)]
        if holding:
            stacks.append(tuple(child.fqn for child in held[holding[0] : holding[-1] + 1]))
    if stacks:
        return tuple(stacks)
    for module in facts.modules:
        children = facts.children(module.fqn)
        if module.class_name != "Sequential" or not any(child.fqn in cut for child in children):
            continue
        used = [i for i, child in enumerate(children) if child.fqn in cut or child.kind == "norm"]
        return (tuple(child.fqn for child in children[used[0] : used[-1] + 1]),)
    return ()


def _called(facts: ModelFacts, container: str) -> Iterator[ModuleFacts]:
    for child in facts.children(container):
        if child.class_name == "ModuleList":
            yield from _called(facts, child.fqn)
        else:
            yield child


def _below(fqn: str, stack: Sequence[str]) -> bool:
    return any(fqn == block or fqn.startswith(f"{block}.") for block in stack)


def sequence_layout(
    facts: ModelFacts, rules: Mapping[str, ModuleRule], whole: Mapping[str, str], problems: Problems
) -> SequenceLayout:
    """Where the sequence is cut and gathered, and whose gradients are then parts of a sum.

    `whole`: modules that have a rule by which they stay whole or that are left whole -> why.
    """
    blocks = find_blocks(facts, rules)
    if not blocks:
        problems.setting(
            f"tensor_parallel_configs.sequence_parallel: {facts.class_name} has no stack of blocks between which the "
            "sequence could be cut; hold the blocks in an nn.ModuleList or nn.Sequential, or set it to False"
        )
        return SequenceLayout(blocks=())
    spans = [block for stack in blocks for block in stack]
    inside = [module for module in facts.modules if _below(module.fqn, spans)]
    gather_at = tuple(dict.fromkeys(_entries(facts, rules, inside, spans)))
    partial: dict[str, str] = {}
    odd: dict[str, str] = {}
    for module in inside:
        rule = rules.get(module.fqn)
        if rule is None and facts.by_fqn[module.parent].kind == "attention":
            continue  # its out_proj goes with it
        if module.kind == "norm" and not any(module.fqn.startswith(f"{entry}.") for entry in gather_at):
            partial |= {module.parameter_fqn(name): "works on a part of the sequence" for name in module.parameters}
        elif rule is None and module.kind != "norm" and module.parameters:
            odd.setdefault(general(module.fqn), whole.get(module.fqn, "no rule"))
        elif rule is not None and rule.style == "rowwise" and module.has_bias:
            partial[module.parameter_fqn("bias")] = "added to a part of the sequence"
        elif rule is not None and rule.style == "attention" and module.has_bias:
            partial[module.parameter_fqn("out_proj.bias")] = "added to a part of the sequence"
    if odd:
        problems.setting(
            "tensor_parallel_configs.sequence_parallel: layers that stay whole would see only a part of the sequence: "
            f"{', '.join(f'{pattern} ({reason})' for pattern, reason in odd.items())}; give them rules in {PLAN}, or "
            "set sequence_parallel to False"
        )
    return SequenceLayout(
        blocks=blocks, gather_at=gather_at, partial=partial, inside=frozenset(module.fqn for module in inside)
    )


def _entries(
    facts: ModelFacts, rules: Mapping[str, ModuleRule], inside: Sequence[ModuleFacts], spans: Sequence[str]
) -> Iterator[str]:
    for module in inside:
        rule = rules.get(module.fqn)
        if rule is None or rule.style not in {"colwise", "attention"}:
            continue
        if rule.style == "attention":
            yield module.fqn
        elif module.parent in spans or not _below(module.parent, spans) or holds_norms(facts, module.parent):
            # The norms of a block work on the cut sequence: only the column layer itself sees it whole.
            yield module.fqn
        else:
            yield module.parent


def cross_attention(facts: ModelFacts, rules: Mapping[str, ModuleRule]) -> tuple[str, ...]:
    """Modules that take their queries from one sequence and keys and values from another."""
    callers = dict.fromkeys(
        fqn if rule.style == "attention" else facts.by_fqn[fqn].parent
        for fqn, rule in rules.items()
        if rule.style in {"colwise", "attention"}
    )
    return tuple(fqn for fqn in callers if any(part in _CROSS for part in fqn.split(".")))
