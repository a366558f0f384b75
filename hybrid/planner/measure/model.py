"""A live model as a `ModelSpec`: parameters, work and saved bytes of its units, from forwards on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hybrid.errors import ModelError, PlanError, StrategyError
from hybrid.planner.measure.parts import Parts, Setting, units_of
from hybrid.planner.measure.run import Calls, Forward
from hybrid.planner.measure.tensor import TensorFacts, tensor_facts
from hybrid.planner.measure.trace import tensors_in
from hybrid.planner.model_spec import ModelSpec
from hybrid.precision.tree import map_tensors
from hybrid.sharding.units import plan_units

__all__ = ["measure_model"]

_DTYPES = {2: torch.bfloat16, 4: torch.float32}
_NOTES = (
    "measured on fake tensors of the CPU. Counted as GPUs keep them: dropout masks with a byte per element, fused "
    "attention without a mask but with its log-sum-exp (4 bytes per head and token), fused RMS norms, mean and "
    "1/deviation of layer norms in fp32",
    "logits that the caller holds beside the loss are not counted",
)


def measure_model(
    model: nn.Module,
    *,
    sample: Any,
    seq: int | None = None,
    plan: Mapping[str, Any] | None = None,
    activation_bytes: int = 2,
) -> ModelSpec:
    """Measure a model; it is left as it is, and no memory of its size is taken.

    Args:
        model: of any size; the meta device will do.
        sample: a batch: a tensor, a tuple of arguments, or a dict of keyword arguments. With labels, the loss is
            measured too.
        seq: tokens per sample, instead of the sample's; for batches of token ids only.
        plan: the user's tensor-parallel plan, if there is one.
        activation_bytes: 2 measures in bfloat16, 4 in float32.

    Raises:
        PlanError: no sample, one that cannot be resized, or a model that cannot run on fake tensors.
    """
    name = type(model).__name__
    if activation_bytes not in _DTYPES:
        raise PlanError(f"activation_bytes = {activation_bytes}: a module is measured with 2 (bfloat16) or 4 (float32)")
    args, kwargs = _call(name, sample, seq)
    blocks = [unit.name for unit in plan_units(model) if not unit.is_around]
    facts, notes = _tensor_facts(model, plan)
    calls = Calls(
        model=model,
        args=args,
        kwargs=kwargs,
        blocks=blocks,
        styles=facts.styles,
        dtype=_DTYPES[activation_bytes],
    )
    runs = _all_runs(calls)
    parts = Parts(blocks=tuple(blocks), forward=runs["none", True])
    setting = Setting.of(runs["none", True], parts, element_bytes=activation_bytes)
    if not any(one.is_fused for one in runs["none", True].trace.attentions) and runs["none", True].trace.attentions:
        notes += ("attention is written out, or no fused kernel of the CPU takes it: scores are stored in any case",)
    if facts.gathered:
        notes += (f"with tp, what {facts.gathered[0]} and its like give is gathered; memory and time count it as cut",)
    if not blocks:
        notes += ("no repeated blocks were found: nothing can be recomputed",)
    units = units_of(model, facts, parts, setting, runs)
    attentions = [one for one in runs["none", True].trace.attentions if one.part in blocks]
    batch = runs["none", True].batch
    return ModelSpec(
        name=name,
        units=units,
        hidden=setting.hidden,
        num_heads=max((one.rows // batch for one in attentions), default=0),
        num_kv_heads=max((one.num_kv_rows // batch for one in attentions), default=0),
        ffn=facts.ffn,
        vocab=facts.vocab,
        default_seq=setting.seq,
        is_seq_fixed=True,
        num_experts=max((one.num_groups for unit in units for one in unit.matmuls if one.cut == "expert"), default=0),
        tensor_refusal=facts.tensor_refusal,
        sequence_refusal=facts.sequence_refusal,
        source=f"measured: {name} with {setting.tokens} tokens of {batch} samples",
        notes=(*_NOTES, *notes),
    )


def _call(name: str, sample: Any, seq: int | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the forward, at the length that is asked for."""
    first = next(tensors_in(sample), None)
    if first is None or first.dim() == 0:
        raise PlanError(
            f"{name}: a module is measured with a sample: an example batch, as a tensor, a tuple of arguments or a "
            "dict of keyword arguments ({'input_ids': ids, 'labels': ids})"
        )
    if seq is not None and (first.dim() == 1 or first.shape[1] != seq):
        if first.is_floating_point() or first.dim() != 2:
            raise PlanError(
                f"{name}: seq = {seq}, but the sample has the shape {tuple(first.shape)}; only token ids, (samples, "
                "tokens), can be resized: give a sample of the length itself and leave seq out"
            )
        sample = map_tensors(sample, _resizer(first.shape[1], seq))
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample) if isinstance(sample, list | tuple) else (sample,)), {}


def _resizer(length: int, seq: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != length:
            return tensor
        return torch.empty((tensor.shape[0], seq, *tensor.shape[2:]), dtype=tensor.dtype, device="meta")

    return resize


def _tensor_facts(model: nn.Module, plan: Mapping[str, Any] | None) -> tuple[TensorFacts, tuple[str, ...]]:
    try:
        return tensor_facts(model, plan), ()
    except (ModelError, StrategyError) as error:
        reason = str(error).splitlines()[0]
        if reason.endswith(":"):  # a list follows, which is no part of a line of notes
            reason = reason[:-1].rpartition(". ")[0] or reason[:-1]
        return TensorFacts.unknown(model, reason), (f"no layer counts as cut by tensor parallel: {reason}",)


def _all_runs(calls: Calls) -> dict[tuple[str, bool], Forward]:
    """By policy and kernel of attention; what a policy or a kernel cannot change is not run again."""
    runs = {("none", True): calls.run(policy="none", is_flash=True)}
    has_kernel = any(one.is_fused for one in runs["none", True].trace.attentions)
    runs["none", False] = calls.run(policy="none", is_flash=False) if has_kernel else runs["none", True]
    if not calls.blocks:
        same = {(policy, flash): runs["none", flash] for policy in ("selective", "full") for flash in (True, False)}
        return runs | same
    runs["selective", True] = calls.run(policy="selective", is_flash=True)
    runs["selective", False] = runs["selective", True]
    if has_kernel:
        runs["selective", False] = calls.run(policy="selective", is_flash=False)
    runs["full", True] = runs["full", False] = calls.run(policy="full", is_flash=True)
    return runs
