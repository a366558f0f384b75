"""A model that is no chain of layers, as a pipeline: cut by its own forward, as seen with a sample."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hybrid.collectives import ops
from hybrid.contracts.chunk_placement import ChunkPlacement, chunk_rank
from hybrid.errors import BatchError, ModelError
from hybrid.mesh import Mesh
from hybrid.pipeline.flow import assign_chunks
from hybrid.pipeline.holders import Holders
from hybrid.pipeline.plan import OwnForwardPlan, plan_own_forward, signature_of
from hybrid.sharding.units import plan_units
from hybrid.strategy.resolved import PipelineSettings

__all__ = [
    "agree",
    "check_held",
    "check_own_units",
    "draw_seed",
    "inputs_and_labels",
    "keeping_plans",
    "loss_of",
    "plan_own",
]


def plan_own(
    model: nn.Module,
    settings: PipelineSettings,
    *,
    sample: Any,
    balance: Callable[[OwnForwardPlan], OwnForwardPlan] | None = None,
    balanced_for: Hashable = None,
) -> OwnForwardPlan:
    """How a model is cut by its own forward.

    Args:
        balance: what becomes of the plan once it is known what the calls are.
        balanced_for: equal for an equal `balance`.

    Raises:
        ModelError: no sample, or a value that cannot be followed.
        StrategyError: a split that does not fit.
    """
    name = type(model).__name__
    if sample is None:
        raise ModelError(
            f"a pipeline cuts a {name} by its own forward, and needs a sample of its inputs to see what that does: "
            "distributed_model(model, strategy=strategy, sample=...) with a micro-batch as the model is called with it "
            "(a dict of its arguments, a tuple of them, or one; only shapes and types matter). Or write the model as "
            "hybrid.PipelineLayer([LayerDesc(...), ...]), or set pipeline_configs.degree = 1"
        )
    sizes = [(fqn, tuple(parameter.shape), parameter.requires_grad) for fqn, parameter in model.named_parameters()]
    key = (
        type(model),
        model.training,
        settings.num_chunks,
        repr(settings.split),
        signature_of(sample, sizes=True),
        tuple(sizes),
        balanced_for,
    )
    kept = _kept[-1] if _kept else {}
    if key not in kept:
        plan = plan_own_forward(
            model,
            sample,
            num_chunks=settings.num_chunks,
            split=settings.split,
            blocks=lambda model: [unit.name for unit in plan_units(model) if not unit.is_around],
        )
        kept[key] = plan if balance is None else balance(plan)
    found = kept[key]
    if found.flow.returns and isinstance(sample, Mapping) and sample.get("labels") is not None:
        raise ModelError(
            f"called with the sample the {name} returns a {found.flow.returns} (return_dict=False?), which has no "
            ".loss for a dict batch with labels. Leave return_dict out; or train with (inputs, labels) and loss_fn=, "
            "and give a sample without labels"
        )
    return found


_kept: list[dict[Any, OwnForwardPlan]] = []


@contextmanager
def keeping_plans() -> Iterator[None]:
    """Inside, models of one class, with the same parameters and modes, are looked at once: they are the same model."""
    _kept.append({})
    try:
        yield
    finally:
        _kept.pop()


def check_own_units(plan: OwnForwardPlan, names: Iterable[str], *, setting: str) -> None:
    """Raises ModelError: one of these modules lies around units, so that no chunk runs it as a whole."""
    for name in names:
        inside = [unit for unit in plan.units if name == "" or unit.startswith(f"{name}.")]
        if inside:
            raise ModelError(
                f"{setting} chooses {name or 'the model itself'!r}, and a pipeline cuts inside of it ({inside[0]!r} is "
                "a unit): no stage runs it as a whole. Name units, or modules in them"
            )


def check_held(
    model: nn.Module,
    plan: OwnForwardPlan,
    *,
    num_stages: int,
    placement: ChunkPlacement = ChunkPlacement.ROUND,
) -> None:
    """That the stages can hold what the model has.

    Raises:
        ModelError: a unit that writes its buffers (statistics), or counts in an attribute, and is in several chunks;
            two parameters over one memory on different stages.
    """
    holders = Holders(model, plan.units, plan.held_by, plan.chunks)

    def stage_of(chunk: int) -> int:
        return chunk_rank(chunk, num_stages, placement)

    holders.check(plan.flow, plan.chunks, stage_of)
    if plan.in_training is not None:
        holders.check(plan.in_training, assign_chunks(plan.in_training, plan.flow, plan.chunks), stage_of)
    stages_of = {fqn: sorted(set(map(stage_of, holders.of(fqn)))) for fqn, _ in model.named_parameters()}
    first: dict[int, str] = {}
    for fqn, parameter in model.named_parameters():
        if parameter.is_meta or parameter.numel() == 0 or parameter.layout is not torch.strided:
            continue
        known = first.setdefault(parameter.data_ptr(), fqn)
        if stages_of[known] != stages_of[fqn]:
            raise ModelError(
                f"parameters {known!r} on pipeline stages {stages_of[known]} and {fqn!r} on {stages_of[fqn]} are two "
                "nn.Parameters over one memory, which the stages cannot share: make them one nn.Parameter "
                "(b.weight = a.weight), which is kept the same on both"
            )


def agree(model: nn.Module, plan: OwnForwardPlan, mesh: Mesh, placement: ChunkPlacement) -> OwnForwardPlan:
    """The first rank's plan, on all ranks: samples of different sizes may balance differently. *Collective.*

    Raises:
        ModelError: the ranks call other units, or in another order.
    """
    calls = [call.unit for call in plan.flow.calls]
    everyone = ops.all_gather_object((plan.units, calls, plan.chunks), group=mesh.world)
    first_units, first_calls, chunks = everyone[0]
    for rank, (units, theirs, _) in enumerate(everyone):
        if units != first_units or theirs != first_calls:
            pairs = zip(first_calls, theirs, strict=False)
            here, there = next(((a, b) for a, b in pairs if a != b), (f"{len(first_calls)} calls", f"{len(theirs)}"))
            raise ModelError(
                f"the samples or the models of the ranks are not of the same kind: the forward calls {here} on rank 0 "
                f"and {there} on rank {rank} in the same place; give all ranks a sample of the same kind, and let no "
                "random numbers decide which modules the forward calls"
            )
    if chunks != plan.chunks:
        plan = replace(plan, chunks=chunks)
        check_held(model, plan, num_stages=mesh.degree("pp"), placement=placement)
    return plan


def draw_seed(mesh: Mesh) -> int:
    """The first rank of the pipeline draws a number for all of its ranks. *Collective.*"""
    drawn = torch.randint(2**62, (1,), dtype=torch.int64).to(mesh.device)
    group = mesh.group("pp", "tp")
    if group.size > 1:
        ops.broadcast(drawn, source=0, group=group, control=True).wait()
    return int(drawn.item())


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def inputs_and_labels(micro_batch: Any, *, has_loss_fn: bool) -> tuple[Inputs, Any]:
    """(what the model is called with, labels for `loss_fn`), as without a pipeline.

    Raises:
        BatchError: a batch that says neither how the model is called nor how its loss is found.
    """
    if isinstance(micro_batch, Mapping):
        if has_loss_fn:
            raise BatchError(
                "a dict batch calls model(**batch) and takes its .loss, so loss_fn would be ignored; give (inputs, "
                "labels) instead, where inputs may be a dict"
            )
        return ((), dict(micro_batch)), None
    if isinstance(micro_batch, tuple | list) and len(micro_batch) == 2 and has_loss_fn:
        inputs, labels = micro_batch
        if isinstance(inputs, Mapping):
            return ((), dict(inputs)), labels
        return ((tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})), labels
    raise BatchError(
        f"do not know how to get a loss from a batch of type {type(micro_batch).__name__}: give a dict (calls "
        "model(**batch) and takes .loss), or (inputs, labels) with loss_fn="
    )


def loss_of(output: Any) -> Any:
    """The loss that a model found by itself."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise BatchError(
            f"model(**batch) returned a {type(output).__name__} without a loss; put labels into the batch, or give "
            "(inputs, labels) and loss_fn"
        )
    return loss
