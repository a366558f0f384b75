"""What tensor parallel would cut of a live model, by the rules that the runtime follows; degree 2 or the least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hybrid.contracts.tensor_facts import ModelFacts
from hybrid.contracts.tensor_plan import ModuleRule, TensorPlan
from hybrid.contracts.tensor_rules import plan_tensor_parallel, working_degrees
from hybrid.errors import ModelError, StrategyError
from hybrid.tensor.facts import read_facts

__all__ = ["TensorFacts", "tensor_facts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """By the name of a parameter.

    Args:
        styles: of the layer that multiplies with it: `colwise`, `rowwise`, `head`, or `vocab` of a table.
        dims: the dimension that is cut.
        min_parts: more ranks than this hold copies.
        experts: those of a mixture's experts.
        first_names: every name -> the first one of the same parameter.
        tensor_refusal, sequence_refusal: why nothing is cut, and why not along the sequence; empty where it is.
        gathered: layers whose results are gathered over tp again.
        vocab, ffn: rows of the token table, width between column and row layers without heads; 0 if not known.
    """

    styles: Mapping[str, str] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    min_parts: Mapping[str, int] = field(default_factory=dict)
    experts: frozenset[str] = frozenset()
    first_names: Mapping[str, str] = field(default_factory=dict)
    tensor_refusal: str = ""
    sequence_refusal: str = ""
    gathered: tuple[str, ...] = ()
    vocab: int = 0
    ffn: int = 0

    @classmethod
    def unknown(cls, model: nn.Module, reason: str) -> TensorFacts:
        """Of a model without rules."""
        facts = read_facts(model)
        return cls(experts=_experts(facts), first_names=facts.first_names, tensor_refusal=reason)


def tensor_facts(model: nn.Module, plan: Mapping[str, Any] | None) -> TensorFacts:
    """Read the plan of the least degree above 1 that works.

    Raises:
        StrategyError, ModelError: no degree works, or the user's plan is wrong.
    """
    facts = read_facts(model)
    degree = next((degree for degree in working_degrees(facts, plan) if degree > 1), 2)
    planned = plan_tensor_parallel(facts, degree=degree, plan=plan)
    styles: dict[str, str] = {}
    dims: dict[str, int] = {}
    min_parts: dict[str, int] = {}
    for fqn, rule in planned.rules.items():
        for name, cut in rule.cuts(facts.by_fqn[fqn], rank=0, degree=degree).items():
            # `out_proj.weight` of torch's attention belongs to the module in there; it multiplies as a row layer.
            full = f"{fqn}.{name}" if fqn else name
            style = "rowwise" if name == "out_proj.weight" else {"attention": "colwise"}.get(rule.style, rule.style)
            for known in {full, facts.first_names.get(full, full)}:
                dims.setdefault(known, cut.dim)
                if not name.endswith("bias") and styles.get(known) != "vocab":
                    styles[known] = style
                heads = _fewest_heads(rule, planned)
                if heads:
                    min_parts[known] = heads
    return TensorFacts(
        styles=styles,
        dims=dims,
        min_parts=min_parts,
        experts=_experts(facts),
        first_names=facts.first_names,
        sequence_refusal=_sequence_refusal(facts, plan, degree),
        gathered=tuple(fqn for fqn, rule in planned.rules.items() if rule.style == "colwise" and rule.gather_output),
        vocab=max(
            (facts.by_fqn[fqn].sizes[0] for fqn, rule in planned.rules.items() if rule.style == "vocab"), default=0
        ),
        ffn=max(
            (sum(heads for heads, _ in rule.parts) for rule in planned.rules.values() if _has_no_heads(rule)), default=0
        ),
    )


def _sequence_refusal(facts: ModelFacts, plan: Mapping[str, Any] | None, degree: int) -> str:
    try:
        plan_tensor_parallel(facts, degree=degree, plan=plan, sequence_parallel=True)
    except (ModelError, StrategyError) as error:
        return str(error).splitlines()[0].removeprefix("tensor_parallel_configs.sequence_parallel: ")
    return ""


def _has_no_heads(rule: ModuleRule) -> bool:
    return rule.style == "rowwise" and all(size == 1 for _, size in rule.parts)


def _fewest_heads(rule: ModuleRule, planned: TensorPlan) -> int:
    """Heads of keys or values in a layer of their own, where there are fewer than of queries."""
    if rule.style != "colwise" or len(rule.parts) != 1 or rule.parts[0][1] == 1:
        return 0
    parent = rule.fqn.rpartition(".")[0]
    beside = [one.parts[0][0] for fqn, one in planned.rules.items() if fqn.rpartition(".")[0] == parent and one.parts]
    return rule.parts[0][0] if rule.parts[0][0] < max(beside) else 0


def _experts(facts: ModelFacts) -> frozenset[str]:
    return frozenset(fqn for fqn in facts.parameters if ".experts." in fqn)
