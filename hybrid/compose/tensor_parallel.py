"""Tensor parallel as part of the whole: the plan before anything starts, and the records of all parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hybrid.collectives import ops
from hybrid.compose.context import DATA_AXES
from hybrid.compose.pipeline import Stages
from hybrid.contracts.layout import axis_name
from hybrid.contracts.placement import Placement, placed
from hybrid.contracts.tensor_facts import ModelFacts
from hybrid.contracts.tensor_plan import TensorPlan
from hybrid.contracts.tensor_rules import plan_tensor_parallel
from hybrid.errors import ModelError, StrategyError
from hybrid.mesh import Mesh
from hybrid.strategy import ResolvedStrategy
from hybrid.tensor.cuts import TensorCuts
from hybrid.tensor.facts import read_facts
from hybrid.tensor.rewrite import adopt_modules, cut_parameters, is_cut_by_hand, planned_cuts

__all__ = [
    "Planned",
    "align_random_states",
    "all_group_axes",
    "cut_model",
    "part_of",
    "placements",
    "plan_for",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What is to be cut; `plan` is None for a model that is built of parallel layers by hand."""

    facts: ModelFacts | None
    plan: TensorPlan | None


def plan_for(model: nn.Module, resolved: ResolvedStrategy) -> Planned | None:
    """The rules for this model, checked; None without tensor parallel.

    Raises:
        StrategyError: the plan or the degree does not fit the model.
        ModelError: the model cannot be cut; or its layers are cut by hand, for another number of ranks.
    """
    by_hand = is_cut_by_hand(model)
    settings = resolved.tensor_parallel
    if settings is None:
        if by_hand and any(size > 1 for size in _degrees_by_hand(model)):
            raise ModelError(
                f"the model has layers that are cut over {max(_degrees_by_hand(model))} ranks, and the strategy has no "
                "tensor parallel: set tensor_parallel_configs = {'degree': ...} to the same"
            )
        return None
    if by_hand:
        if settings.plan is not None or settings.sequence_parallel or settings.verify:
            raise StrategyError(
                "tensor_parallel_configs: plan, sequence_parallel and verify are for models that hybrid cuts, and this "
                "one is built of parallel layers already; leave them out (its layers have sequence_dim)"
            )
        return Planned(facts=None, plan=None)
    facts = read_facts(model)
    plan = plan_tensor_parallel(
        facts, degree=settings.degree, plan=settings.plan, sequence_parallel=settings.sequence_parallel
    )
    return Planned(facts=facts, plan=plan)


def _degrees_by_hand(model: nn.Module) -> list[int]:
    return [info.group.size for m in model.modules() if (info := getattr(m, "tensor_parallel", None)) is not None]


def cut_model(model: nn.Module, planned: Planned, mesh: Mesh, *, is_staged: bool) -> TensorCuts:
    """Give each rank its part of the parameters and the modules that work on it. *Collective.*

    `is_staged`: a pipeline runs the model chunk by chunk.
    """
    cuts = planned_cuts(model, planned.facts, planned.plan, group=mesh.group("tp"))
    if planned.plan is not None:
        cut_parameters(model, cuts)
        adopt_modules(model, planned.plan, cuts, is_staged=is_staged)
    return cuts


def part_of(cuts: TensorCuts | None) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """(fqn, values as the module draws them) -> this rank's part; layers that were cut by hand draw their own."""

    def part(fqn: str, value: torch.Tensor) -> torch.Tensor:
        cut = None if cuts is None else cuts.own(fqn)
        if cuts is None or cut is None or value.shape[cut.dim] == cut.local_size:
            return value
        return cuts.part(fqn, value)

    return part


def placements(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], cuts: TensorCuts | None, stages: Stages | None
) -> dict[str, Placement]:
    """The record of each parameter of this rank, its local shape being there already."""
    names: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    records: dict[str, Placement] = {}
    for fqn, parameter in parameters.items():
        cut = None if cuts is None else cuts.own(fqn)
        copies: tuple[str, ...] = ()
        partial: tuple[str, ...] = DATA_AXES
        if cut is not None and cut.copies > 1:
            # Neighbours hold the same kv head for other queries: each has a part of its gradient.
            copies = (f"tp/{cut.copies}",)
            partial = (*DATA_AXES, *copies)
        elif cut is None and cuts is not None:
            copies = ("tp",)
            partial = (*DATA_AXES, "tp") if fqn in cuts.partial else DATA_AXES
        holders = None if stages is None else stages.whole.axis(fqn)
        if holders is not None:  # tied over stages: each has a part of its gradient
            copies, partial = (*copies, holders), (*partial, holders)
        records[fqn] = placed(
            fqn,
            tuple(parameter.shape) if cuts is None else cuts.global_shape(fqn, tuple(parameter.shape)),
            dtype=str(parameter.dtype).removeprefix("torch."),
            partial_axes=partial,
            copy_axes=copies,
            cut=cut,
            chunks=(0,) if stages is None else stages.chunks_of(names[id(parameter)]),
            trainable=parameter.requires_grad,
            tied_fqns=[name for name in names[id(parameter)] if name != fqn],
        )
    return records


def _group_axes(records: Mapping[str, Placement]) -> Iterator[tuple[str, ...]]:
    """The sets of axes over which gradients of these parameters are reduced, in an order that all ranks share."""
    for partial in sorted({record.partial_axes for record in records.values()}):
        late = tuple(axis for axis in partial if axis_name(axis) == "pp")
        soon = tuple(axis for axis in partial if axis not in late)
        for axes in (soon, tuple(axis for axis in soon if axis != "dp_shard")):
            yield axes
            yield (*axes, *late)
        yield late


def all_group_axes(records: Mapping[str, Placement], mesh: Mesh) -> list[tuple[str, ...]]:
    """What `_group_axes` gives on any rank, in one order on all, as making a group asks for. *Collective.*"""
    everyone = ops.all_gather_object(list(_group_axes(records)), group=mesh.world)
    return list(dict.fromkeys(axes for mine in everyone for axes in mine))


def align_random_states(mesh: Mesh) -> None:
    """The tp ranks of a data rank go on with the first one's random state: they drop the same activations."""
    group = mesh.group("tp")
    if group.size == 1:
        return
    state = torch.random.get_rng_state().to(mesh.device)
    ops.broadcast(state, source=0, group=group, control=True).wait()
    torch.random.set_rng_state(state.cpu())
    if mesh.device.type == "cuda":
        seeds = torch.tensor([torch.cuda.initial_seed() % 2**62], device=mesh.device)
        ops.broadcast(seeds, source=0, group=group, control=True).wait()
        torch.cuda.manual_seed(int(seeds.item()))
