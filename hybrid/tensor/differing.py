"""What to say of the first place at which a cut model differs from the plain one."""

from __future__ import annotations

from hybrid.contracts.tensor_facts import parent_of
from hybrid.contracts.tensor_plan import TensorPlan
from hybrid.tensor.comparison import INPUT, OTHER_INPUTS, Difference

__all__ = ["sequence_hint", "told"]

_MOST_RULES = 4


def told(first: Difference, rank: int, plan: TensorPlan, *, unit: str | None) -> str:
    """The difference in words, with what to look at.

    Args:
        unit: the module that was compared by itself; None: the whole model was.
    """
    module = parent_of(first.fqn) if first.kind == "gradient" else first.fqn
    if first.fqn in {INPUT, OTHER_INPUTS}:
        module = unit or ""
        what = f"the gradient of what {module or 'the model'} is called with"
    else:
        what = {
            "output": f"the output of {module or 'the model'}",
            "gradient of its output": f"the gradient of the output of {module or 'the model'}",
            "gradient": f"the gradient of parameter {first.fqn}",
        }[first.kind]
    order = "forward" if first.kind == "output" else "backward; forward agrees"
    compared = "" if unit is None else f" Compared was {unit or 'the model'} by itself, with noise for its weights."
    return (
        f"tensor parallel is not right for this model: {what} is the first to differ from the plain model's "
        f"(in {order}), by {first.largest:.3g} at most on rank {rank}, where {first.tolerated:.3g} is tolerated."
        f"{compared}\n  {_hint(first, module, plan)}{sequence_hint(plan, unit)}"
    )


def sequence_hint(plan: TensorPlan, unit: str | None) -> str:
    """What else may be wrong where a block sees a part of the sequence."""
    is_in_blocks = unit is None or any(unit in stack for stack in plan.blocks)
    if not plan.sequence_parallel or not is_in_blocks:
        return ""
    return (
        f"\n  Under sequence_parallel the code of a block sees 1/{plan.degree} of the sequence: positions (arange, "
        "cumsum), a mask made of a length, a mean over the sequence or a shift along it are those of the part. Compute "
        "them outside the blocks and hand them in, or inside the attention, which sees all of it; or set "
        "tensor_parallel_configs.sequence_parallel to False"
    )


def _hint(first: Difference, module: str, plan: TensorPlan) -> str:
    if first.kind == "gradient":
        why = plan.partial.get(first.fqn)
        if first.summing == "superfluous":
            return (
                f"It is summed over the ranks ({why}: {_source(module, plan)}), and each rank has the whole of it "
                "already: take 'partial' out of the plan."
            )
        if first.summing == "missing":
            return (
                "The sum over the ranks would be right: it acts on cut activations, so say "
                f"{{{first.fqn!r}: 'partial'}} in the plan."
            )
    rules = _rules_around(module, plan)
    listed = "".join(f"\n    {name}: {plan.rules[name].describe()} ({_source(name, plan)})" for name in rules)
    around = f" Rules around it:{listed}" if rules else " No rule is near it."
    if first.kind == "output":
        return (
            "What it reads, or how it is cut itself, is wrong. Look at the code before it: one weight that holds "
            "several parts (q, k, v; gate, up) needs 'fused' in the plan; an attribute that counts heads or widths "
            f"needs 'divide'; a norm or a softmax over cut features needs 'gather_output'.{around}"
        )
    if first.fqn == INPUT:
        return (
            "Code between column and row layers that reads it besides them, or a number that it makes of it, has a "
            f"part of its gradient on each rank: let what it computes go through a cut layer, too.{around}"
        )
    return f"What is computed of it is cut in a way that backward does not know; see the layers after it.{around}"


def _source(module: str, plan: TensorPlan) -> str:
    rule = plan.rules.get(module)
    return rule.source if rule is not None else "by its place"


def _rules_around(module: str, plan: TensorPlan) -> list[str]:
    """Of the module, of what is in it and beside it."""
    own = [module] if module in plan.rules else []
    inside = [name for name in plan.rules if name.startswith(f"{module}.")] if module else []
    beside = [name for name in plan.rules if parent_of(name) == parent_of(module) and name != module]
    if not own and not inside and not beside:
        around = parent_of(module)
        beside = [name for name in plan.rules if around and name.startswith(f"{around}.")]
    return [*own, *inside, *beside][:_MOST_RULES]
