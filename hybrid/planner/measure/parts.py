"""From traces of forwards to the units of a model."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import nn

from hybrid.planner.measure.records import Attention, Made, Product, Work
from hybrid.planner.measure.run import Forward, around
from hybrid.planner.measure.tensor import TensorFacts
from hybrid.planner.model_spec import (
    ActivationBytes,
    AttentionSpec,
    Cut,
    MatmulSpec,
    ParameterSpec,
    Recompute,
    UnitKind,
    UnitSpec,
)
from hybrid.precision.casting import NORM_LAYERS

__all__ = ["Parts", "Setting", "units_of"]

_CUTS: Mapping[str, Cut] = {"colwise": "column", "head": "column", "vocab": "column", "rowwise": "row"}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Which unit each part of a forward belongs to: a block is its own; what lies around blocks is a unit where it has
    parameters, else it joins the block after it, the last one the block before.
    """

    blocks: tuple[str, ...]
    forward: Forward

    @cached_property
    def unit_of(self) -> Mapping[str, str]:
        used = {part for parts in self.forward.trace.used_in.values() for part in parts}
        found: dict[str, str] = {"": ""}
        last = len(self.blocks)
        for number in range(last + 1):
            part = around(number)
            if part in used or not self.blocks:
                found[part] = "model" if not self.blocks else {0: "embedding", last: "head"}.get(number, part)
            else:
                found[part] = self.blocks[number if number < last else last - 1]
            if number < last:
                found[self.blocks[number]] = self.blocks[number]
        return found

    @cached_property
    def units(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(unit for unit in self.unit_of.values() if unit))

    def kind(self, unit: str) -> UnitKind:
        if unit in self.blocks:
            return "block"
        return {"embedding": "embedding", "head": "head"}.get(unit, "other")  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Sizes of what was measured: tokens in all, tokens per sample, width between blocks, bytes of a value."""

    tokens: int
    seq: int
    hidden: int
    element_bytes: int

    @classmethod
    def of(cls, forward: Forward, parts: Parts, *, element_bytes: int) -> Setting:
        """By the input of the first block; images with channels in front are one token each."""
        size = element_bytes
        shape = next((shape for shape in forward.inputs.values() if len(shape) > 1), None)
        queries = max((one.queries for one in forward.trace.attentions if one.part in parts.blocks), default=0)
        if shape is None or len(shape) == 4:
            seq = queries or 1
            hidden = prod(shape[1:]) if shape else 0
            return cls(tokens=forward.batch * seq, seq=seq, hidden=hidden, element_bytes=size)
        tokens = prod(shape[:-1])
        seq = queries or max(1, tokens // forward.batch)
        return cls(tokens=tokens, seq=seq, hidden=shape[-1], element_bytes=size)


def units_of(
    model: nn.Module,
    facts: TensorFacts,
    parts: Parts,
    setting: Setting,
    runs: Mapping[tuple[str, bool], Forward],
) -> tuple[UnitSpec, ...]:
    """The units in the order of the forward.

    Args:
        model: whose parameters they share.
        facts: what tensor parallel cuts.
        parts, setting: of the plain forward.
        runs: (policy, whether attention may run fused) -> the forward.
    """
    plain = runs["none", True]
    parameters = _parameters(model, facts, parts)
    activations = _activations(parts, setting, runs)
    work, scores = _work(plain, parts), _work(runs["none", False], parts)
    frozen = {facts.first_names.get(name, name) for name, one in model.named_parameters() if not one.requires_grad}
    found = []
    for unit in parts.units:
        kind = parts.kind(unit)
        matmuls = _matmuls(plain, parts, unit, facts, setting, frozen)
        own = work[unit]
        logits = [one.out_features for one in matmuls if facts.vocab and one.out_features == facts.vocab]
        found.append(
            UnitSpec(
                name=unit,
                kind=kind,
                parameters=parameters.get(unit, ()),
                matmuls=matmuls,
                attentions=_attentions(plain, parts, unit),
                activations=activations[unit],
                traffic_whole=own.whole / setting.tokens,
                traffic_cut=own.cut / setting.tokens,
                traffic_pairs=scores[unit].pairs / setting.tokens / setting.seq,
                num_kernels=own.kernels,
                input_bytes=0 if kind == "embedding" else setting.hidden * setting.element_bytes,
                num_tp_reductions=own.reductions,
                expert_rows=max((one.tokens_share for one in matmuls if one.cut == "expert"), default=0.0),
                logits_per_token=logits[-1] if kind == "head" and logits else 0,
            )
        )
    return tuple(found)


def _parameters(model: nn.Module, facts: TensorFacts, parts: Parts) -> dict[str, tuple[ParameterSpec, ...]]:
    """By unit, in registration order: where the forward uses them; the others beside their neighbour."""
    used = {
        facts.first_names.get(name, name): list(dict.fromkeys(parts.unit_of[part] for part in where))
        for name, where in parts.forward.trace.used_in.items()
    }
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    head_dims = {(one.head_dim,) for one in parts.forward.trace.attentions}
    found: dict[str, list[ParameterSpec]] = {}
    homes: dict[str, tuple[str, str]] = {}  # first name -> its unit, and its name there
    last = parts.units[0]
    for name, shape in _shapes(model).items():
        first = facts.first_names.get(name, name)
        held = next((block for block in parts.blocks if name.startswith(f"{block}.")), None)
        units = used.get(first, [])
        if first != name:  # another name of one that has its place: what else uses it has it tied
            unit = held or next((one for one in units if one != homes[first][0]), homes[first][0])
            if unit == homes[first][0]:
                continue
        else:
            unit = held or (units[0] if units else last)
        last = unit
        short = name.removeprefix(f"{unit}.") if held == unit else name
        owner = model.get_submodule(name.rpartition(".")[0])
        is_norm = "norm" in type(owner).__name__.lower()
        found.setdefault(unit, []).append(
            ParameterSpec(
                name=short,
                shape=shape,
                cut_dim=facts.dims.get(name, facts.dims.get(first)),
                min_parts=facts.min_parts.get(first, 0),
                is_expert=first in facts.experts,
                tied_to=".".join(homes[first]) if first != name else None,
                trainable=trained[first],
                is_on_heads=held is not None and is_norm and shape in head_dims,
                is_norm=isinstance(owner, NORM_LAYERS),
            )
        )
        homes.setdefault(first, (unit, short))
    return {unit: tuple(held) for unit, held in found.items()}


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Every name of every parameter -> shape."""
    return {name: tuple(one.shape) for name, one in model.named_parameters(remove_duplicate=False)}


def _work(forward: Forward, parts: Parts) -> dict[str, Work]:
    found = {unit: Work() for unit in ("", *parts.units)}
    for part, work in forward.trace.work.items():
        total = found[parts.unit_of.get(part, "")]
        total.whole += work.whole
        total.cut += work.cut
        total.pairs += work.pairs
        total.kernels += work.kernels
        total.reductions += work.reductions
    return found


def _matmuls(
    forward: Forward, parts: Parts, unit: str, facts: TensorFacts, setting: Setting, frozen: Set[str]
) -> tuple[MatmulSpec, ...]:
    """Products with the same weight are one; without a weight each is for itself."""
    sums: dict[tuple[object, ...], tuple[Product, int]] = {}
    own = [one for one in forward.trace.products if parts.unit_of.get(one.part) == unit]
    for number, one in enumerate(own):
        key = (one.weight or number, one.in_features, one.out_features)
        rows = sums[key][1] if key in sums else 0
        sums[key] = (one, rows + one.rows)
    return tuple(
        MatmulSpec(
            name=_short(one.weight, unit) or "product",
            in_features=one.in_features,
            out_features=one.out_features,
            cut="expert" if one.weight in facts.experts else _CUTS.get(facts.styles.get(one.weight, ""), "none"),
            tokens_share=rows / setting.tokens,
            num_groups=one.num_groups if one.weight in facts.experts else 1,
            min_parts=facts.min_parts.get(one.weight, 0),
            has_input_gradient=one.has_input_gradient,
            has_weight_gradient=one.weight not in frozen,
        )
        for one, rows in sums.values()
    )


def _short(weight: str, unit: str) -> str:
    return weight.removeprefix(f"{unit}.").removesuffix(".weight")


def _attentions(forward: Forward, parts: Parts, unit: str) -> tuple[AttentionSpec, ...]:
    def described(one: Attention) -> AttentionSpec:
        return AttentionSpec(
            num_heads=max(1, one.rows // forward.batch),
            num_kv_heads=max(1, one.num_kv_rows // forward.batch),
            head_dim=one.head_dim,
            value_dim=one.value_dim,
            is_causal=one.is_causal,
        )

    return tuple(described(one) for one in forward.trace.attentions if parts.unit_of.get(one.part) == unit)


def _activations(
    parts: Parts,
    setting: Setting,
    runs: Mapping[tuple[str, bool], Forward],
) -> dict[str, dict[tuple[Recompute, bool], ActivationBytes]]:
    found: dict[str, dict[tuple[Recompute, bool], ActivationBytes]] = {unit: {} for unit in parts.units}
    policies: tuple[Recompute, ...] = ("none", "selective", "full")
    for is_flash in (False, True):
        for policy in policies:
            for unit, kept in _kept(runs[policy, is_flash], parts).items():
                found[unit][policy, is_flash] = _sum(kept, setting, policy if unit in parts.blocks else "none")
        # Core attention again: what the fused kernel keeps but for its statistics, whichever kernel runs.
        for unit, kept in _kept(runs["none", True], parts).items():
            if unit in parts.blocks:
                kept = [made for made in kept if not made.is_pairs and not made.is_statistics]
                found[unit]["core_attention", is_flash] = _sum(kept, setting, "core_attention")
            else:
                found[unit]["core_attention", is_flash] = found[unit]["none", is_flash]
    return found


def _kept(forward: Forward, parts: Parts) -> dict[str, list[Made]]:
    """By unit: storages that forward left."""
    found: dict[str, list[Made]] = {unit: [] for unit in parts.units}
    for made in forward.trace.order:
        unit = parts.unit_of.get(made.owner, "")
        if made.is_kept and unit:  # the sample itself is the caller's, until somebody saves it
            found[unit].append(made)
    return found


def _sum(kept: list[Made], setting: Setting, policy: Recompute) -> ActivationBytes:
    sums = dict.fromkeys(("whole", "cut", "pairs", "fixed", "gathered", "collective"), 0.0)
    for made in kept:
        if made.is_fixed:
            sums["fixed"] += made.num_bytes
        elif made.is_pairs:
            sums["pairs"] += made.num_bytes / setting.tokens / setting.seq
        elif made.is_cut:
            sums["cut"] += made.num_bytes / setting.tokens
        else:
            size = made.num_bytes / setting.tokens
            sums["whole"] += size
            if policy == "selective" and made.is_row_result:
                sums["collective"] += size
            elif policy in {"none", "core_attention"} and made.is_column_input:
                sums["gathered"] += size
    return ActivationBytes(**sums)
