"""What to tell a user whose model has no rules: its linear layers, and a plan to start from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from hybrid.contracts.tensor_claims import PLAN, general
from hybrid.contracts.tensor_facts import ModelFacts, ModuleFacts
from hybrid.contracts.tensor_families import HEADS

__all__ = ["guessed_plan", "no_rule"]


def no_rule(facts: ModelFacts, outputs: Iterable[str]) -> str:
    """The refusal of a model for whose layers no rule is known."""
    linear = [module for module in facts.modules if module.is_linear and not _in_attention(facts, module)]
    start = f"no rule is known for cutting the layers of {facts.class_name}"
    if not linear:
        return (
            f"{start}, and it has no linear layers that a plan could name; tensor parallel cuts linear layers, "
            "embeddings and torch.nn.MultiheadAttention: use degree 1"
        )
    shapes: dict[str, list[ModuleFacts]] = {}
    for module in linear:
        shapes.setdefault(general(module.fqn), []).append(module)
    layers = "".join(
        f"\n    {pattern}: {held[0].sizes[0]} -> {held[0].sizes[1]}" + (f", {len(held)} times" if len(held) > 1 else "")
        for pattern, held in shapes.items()
    )
    side_paths = list(dict.fromkeys(general(fqn) for fqn in _with_side_paths(facts)))
    if side_paths:
        layers += (
            f"\n  {', '.join(side_paths)}: a low-rank side path (LoRA, DoRA) is cut with its layer where it is "
            "base_layer(x) plus a multiple of lora_B(lora_A(x)), linear layers all three, and no other parameter is "
            "there. Merge this one into its layer, bring it into that form, or use degree 1."
        )
    plan = guessed_plan(facts, outputs)
    if not plan:
        return f"{start}. Its linear layers:{layers}\n  Say in {PLAN} which of them are cut, and how."
    entries = "".join(f"\n        {pattern!r}: {entry!r}," for pattern, entry in plan.items())
    return (
        f"{start}. Its linear layers:{layers}\n  Say how to cut them. By their sizes this may be right (check it with "
        f'"verify": True):\n    tensor_parallel_configs["plan"] = {{{entries}\n    }}'
    )


def _with_side_paths(facts: ModelFacts) -> Iterator[str]:
    """Modules with thin layers or parameters beside a layer, by their names, that no rule has taken over."""
    for module in facts.modules:
        if module.name.lower().startswith("lora_"):
            yield module.parent
        elif any(name.lower().startswith("lora_") for name in module.parameters):
            yield module.fqn


def _in_attention(facts: ModelFacts, module: ModuleFacts) -> bool:
    return bool(module.fqn) and facts.by_fqn[module.parent].kind == "attention"


def guessed_plan(facts: ModelFacts, outputs: Iterable[str]) -> dict[str, str | dict[str, object]]:
    """A plan by sizes alone: in each module, the layers that widen (or make q, k, v) and the one that comes back."""
    outputs = set(outputs)
    odd = set(_with_side_paths(facts))
    plan: dict[str, str | dict[str, object]] = {}
    for parent in facts.modules:
        layers = [
            child
            for child in facts.children(parent.fqn)
            if child.is_linear
            and child.exact
            and child.fqn not in outputs
            and parent.kind != "attention"
            and parent.fqn not in odd
        ]
        while len(layers) >= 2:
            taken = _first_pair(layers, one_by_one=parent.class_name == "Sequential")
            if taken is None:
                break
            columns, row = taken
            for column in columns:
                plan.setdefault(general(column.fqn), _column_entry(facts.attributes.get(parent.fqn, {}), column, row))
            plan.setdefault(general(row.fqn), "rowwise")
            layers = layers[layers.index(row) + 1 :]
    return plan


def _first_pair(layers: list[ModuleFacts], *, one_by_one: bool) -> tuple[list[ModuleFacts], ModuleFacts] | None:
    """The first layer that comes back to the width that those before it started from.

    Of several square layers in a row (q, k, v, o) the last comes back, unless they are called `one_by_one`.
    """
    hidden = layers[0].sizes[0]
    for index, row in enumerate(layers[1:], 1):
        columns = [layer for layer in layers[:index] if layer.sizes[0] == hidden]
        width, out = row.sizes
        following = layers[index + 1 :]
        goes_on = bool(following) and following[0].sizes == row.sizes and width == hidden and not one_by_one
        fits = all(column.sizes[1] % width == 0 or width % column.sizes[1] == 0 for column in columns)
        if out == hidden and fits and not goes_on:
            return columns, row
    return None


def _column_entry(attributes: Mapping[str, int], column: ModuleFacts, row: ModuleFacts) -> str | dict[str, object]:
    """The style, with what the sizes and the attributes beside the layer say."""
    entry: dict[str, object] = {"style": "colwise"}
    fused = column.sizes[1] // row.sizes[0]
    if fused > 1:
        entry["fused"] = fused
    heads = next((name for name in HEADS if name in attributes), None)
    if heads is not None and row.sizes[0] % max(attributes[heads], 1) == 0:
        entry |= {"heads": heads, "divide": [heads]}
    return entry if len(entry) > 1 else "colwise"
