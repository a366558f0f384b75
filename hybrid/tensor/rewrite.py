"""Cut an ordinary model over the tp ranks, as a `TensorPlan` says.

Two steps, since values come between them: `cut_parameters` gives each parameter object its local shape (and values,
where the model has them), `adopt_modules` gives the modules the forward that works on parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from hybrid import shims
from hybrid.collectives import ops
from hybrid.collectives.group import Group
from hybrid.contracts.placement import Cut
from hybrid.contracts.tensor_facts import ModelFacts
from hybrid.contracts.tensor_plan import ModuleRule, TensorPlan
from hybrid.errors import ModelError
from hybrid.tensor.attention import ParallelMultiheadAttention, disable_fast_paths
from hybrid.tensor.cut_module import CutModule, local_part
from hybrid.tensor.cuts import TensorCuts
from hybrid.tensor.embedding import ColumnParallelEmbedding, VocabParallelEmbedding
from hybrid.tensor.entry import Entry
from hybrid.tensor.head import VocabParallelHead
from hybrid.tensor.linear import ColumnParallelLinear, RowParallelLinear
from hybrid.tensor.region import CutRegion
from hybrid.tensor.sequence import (
    SequenceState,
    expect_cut,
    gather_at_entry,
    gather_at_exit,
    refuse_partial_outputs,
    scatter_at_entry,
)
from hybrid.tensor.side_path import watch_side_path

__all__ = ["adopt_modules", "cut_parameters", "is_cut_by_hand", "planned_cuts", "sequence_dims"]

# Column layers of a cross attention that read its own sequence; the others read the one that comes whole.
_QUERIES = ("q", "query", "q_proj", "q_attn")


def is_cut_by_hand(model: nn.Module) -> bool:
    """Whether the model is built of parallel layers already."""
    return any(isinstance(module, CutModule) for module in model.modules())


def planned_cuts(model: nn.Module, facts: ModelFacts | None, plan: TensorPlan | None, *, group: Group) -> TensorCuts:
    """The cuts of every parameter on every tp rank, by a plan or of layers built by hand (*collective* over tp)."""
    own: dict[str, Cut] = {}
    partial: set[str] = set()
    if plan is not None:
        assert facts is not None
        partial |= set(plan.partial)
        everyone = [_cuts_by_plan(facts, plan, rank=rank, degree=group.size) for rank in range(group.size)]
        own = everyone[group.rank]
    else:
        first = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
        for module in model.modules():
            if isinstance(module, CutModule):
                info = module.tensor_parallel
                own |= {first[id(module.get_parameter(name))]: cut for name, cut in info.cuts.items()}
                partial |= {first[id(module.get_parameter(name))] for name in info.partial}
        everyone = ops.all_gather_object(own, group=group)
    return TensorCuts(
        group=group, cuts={fqn: tuple(cuts[fqn] for cuts in everyone) for fqn in own}, partial=frozenset(partial)
    )


def _cuts_by_plan(facts: ModelFacts, plan: TensorPlan, *, rank: int, degree: int) -> dict[str, Cut]:
    """What a tp rank has of each parameter."""
    cuts: dict[str, Cut] = {}
    for fqn, rule in plan.rules.items():
        known = facts.by_fqn[fqn]
        for name, cut in rule.cuts(known, rank=rank, degree=degree).items():
            fqn_here = known.parameter_fqn(name)
            # By each name: a pipeline stage may know a tied parameter by another one than the first.
            cuts[facts.first_names[fqn_here]] = cuts[fqn_here] = cut
    return cuts


def cut_parameters(model: nn.Module, cuts: TensorCuts) -> None:
    """Each cut parameter, the same object to all who hold it, becomes this rank's part; a tied one is cut once.

    Raises:
        ModelError: a parameter that has a gradient already.
    """
    for fqn, parameter in model.named_parameters():
        cut = cuts.own(fqn)
        if cut is None:
            continue
        if parameter.grad is not None:
            raise ModelError(
                f"parameter {fqn!r} has a gradient, of its whole size, and is to be cut over {cuts.group.size} ranks; "
                "call model.zero_grad() before distributed_model"
            )
        if parameter.is_meta:
            shape = list(parameter.shape)
            shape[cut.dim] = cut.local_size
            shims.give_memory(parameter, torch.empty(shape, dtype=parameter.dtype, device="meta"))
        else:
            parameter.data = local_part(parameter.data, cut)


def adopt_modules(model: nn.Module, plan: TensorPlan, cuts: TensorCuts, *, is_staged: bool = False) -> None:
    """Give every module with a rule its parallel forward, and each rank its head counts.

    `is_staged`: a pipeline calls the blocks chunk by chunk, so that a forward may end between two of them.
    """
    group = cuts.group
    region = CutRegion(group)
    within_side_paths = CutRegion(group, active=False)
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    dims = sequence_dims(modules, plan)
    entries: dict[tuple[str, bool, int], Entry] = {}
    for fqn, rule in plan.rules.items():
        if fqn not in modules:
            continue  # on another pipeline stage
        module = modules[fqn]
        # A plan without sequence parallel, and what lies outside the blocks, works on whole sequences.
        dim = dims.get(fqn) if rule.in_blocks else None
        draws = within_side_paths if _side_path_of(fqn, plan) else region
        match rule.style:
            case "colwise":
                entry = _entry(fqn, plan, group=group, dim=dim, entries=entries)
                ColumnParallelLinear.adopt(
                    module,
                    group=group,
                    cut=_own(cuts, names, module, "weight"),
                    entry=entry,
                    gather_output=rule.gather_output,
                    region=draws,
                )
            case "rowwise":
                RowParallelLinear.adopt(
                    module,
                    group=group,
                    cut=_own(cuts, names, module, "weight"),
                    input_is_parallel=not rule.split_input,
                    sequence_dim=dim,
                    region=draws,
                )
            case "vocab":
                cut = _own(cuts, names, module, "weight")
                VocabParallelEmbedding.adopt(module, group=group, cut=cut, region=region)
            case "embedding_colwise":
                cut = _own(cuts, names, module, "weight")
                ColumnParallelEmbedding.adopt(module, group=group, cut=cut, region=region)
            case "head":
                cut = _own(cuts, names, module, "weight")
                VocabParallelHead.adopt(module, group=group, cut=cut, entry=Entry(group), region=region)
            case "attention":
                ParallelMultiheadAttention.adopt(
                    cast(nn.MultiheadAttention, module),
                    group=group,
                    region=region,
                    sequence_dim=1 if dim == -2 else dim,
                    memory_is_whole=True,
                )
    for fqn, path in plan.side_paths.items():
        if fqn in modules:
            watch_side_path(fqn, path, modules, region)
    for fqn, values in plan.attributes.items():
        for name, value in values.items() if fqn in modules else ():
            if not _set_by_adoption(plan.rules.get(fqn), name):
                setattr(modules[fqn], name, value)
    states: list[SequenceState] = []
    for stack in plan.blocks:
        state = SequenceState()
        here = [fqn for fqn in stack if fqn in modules]  # the rest is on other pipeline stages
        if stack[0] in modules:
            scatter_at_entry(modules[stack[0]], stack[0], group=group, dim=dims[stack[0]], region=region, state=state)
        for fqn in here[1:] if len(here) == len(stack) and not is_staged else ():
            expect_cut(modules[fqn], fqn, state=state)
        if stack[-1] in modules:
            gather_at_exit(modules[stack[-1]], stack[-1], group=group, dim=dims[stack[-1]], region=region, state=state)
        states.append(state)
    for fqn in plan.gather_at:
        if fqn not in plan.rules and fqn in modules:  # a column layer or an attention gathers by itself
            gather_at_entry(modules[fqn], fqn, group=group, dim=dims[fqn])
    refuse_partial_outputs(model, sequence_parallel=plan.sequence_parallel)
    disable_fast_paths(model)
    kept = list(entries.values())

    def start_afresh(module: nn.Module, args: Any) -> None:
        """What a forward that was left by an exception has kept, or left open."""
        if not shims.in_backward():
            region.reset()
            for entry in kept:
                entry.clear()
            for state in states:
                state.is_cut = False

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if not shims.in_backward() and not is_staged:
            for state in states:
                state.check_whole()

    model.register_forward_pre_hook(start_afresh, prepend=True)
    model.register_forward_hook(end)


def _own(cuts: TensorCuts, names: Mapping[int, str], module: nn.Module, name: str) -> Cut:
    """The cut of a module's parameter; `names`: of the model's parameters, by their ids."""
    fqn = names[id(module.get_parameter(name))]
    cut = cuts.own(fqn)
    assert cut is not None, fqn
    return cut


def _set_by_adoption(rule: ModuleRule | None, name: str) -> bool:
    return rule is not None and rule.style == "attention" and name == "num_heads"


def _entry(
    fqn: str, plan: TensorPlan, *, group: Group, dim: int | None, entries: dict[tuple[str, bool, int], Entry]
) -> Entry:
    """Column layers of one parent that one row layer closes share what they read.

    Where the parent gathers, nothing is left to do here.
    """
    parent = plan.caller(fqn)
    if parent in plan.cross_attention:
        if fqn in plan.gather_at:
            return entries.setdefault((fqn, True, 0), Entry(group, sequence_dim=dim))
        if parent in plan.gather_at and fqn.rpartition(".")[2] in _QUERIES:
            return entries.setdefault((parent, False, 0), Entry(group, passes=True))
        # One for all: it tells inputs apart by themselves.
        return entries.setdefault((parent, True, 0), Entry(group))
    if parent in plan.gather_at:
        return entries.setdefault((parent, False, 0), Entry(group, passes=True))
    sequence_dim = dim if fqn in plan.gather_at else None
    return entries.setdefault((parent, True, _pair(fqn, plan)), Entry(group, sequence_dim=sequence_dim))


def _side_path_of(fqn: str, plan: TensorPlan) -> bool:
    return any(fqn.startswith(f"{path}.") for path in plan.side_paths)


def _pair(fqn: str, plan: TensorPlan) -> int:
    """Which of the parent's pairs a column layer belongs to, where attention and feed-forward lie side by side.

    The row layers close the pairs in their order. A wrong guess would cost a collective, and no more.
    """
    parent = plan.caller(fqn)
    siblings = [other for other in plan.rules if plan.caller(other) == parent]
    rows = [other for other in siblings if plan.rules[other].style == "rowwise"]
    before = sum(siblings.index(row) < siblings.index(fqn) for row in rows)
    return max(min(before, len(rows) - 1), 0)


def sequence_dims(modules: Mapping[str, nn.Module], plan: TensorPlan) -> dict[str, int]:
    """Module -> dim of its activations that is the sequence: the last but one, save where torch's modules say first."""
    if not plan.sequence_parallel:
        return {}
    torchs = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer | nn.MultiheadAttention
    first = [name for name, module in modules.items() if isinstance(module, torchs) and not _batch_first(module)]
    return {fqn: 0 if any(fqn == one or fqn.startswith(f"{one}.") for one in first) else -2 for fqn in modules}


def _batch_first(module: nn.Module) -> bool:
    attention = module if isinstance(module, nn.MultiheadAttention) else module.get_submodule("self_attn")
    return bool(cast(nn.MultiheadAttention, attention).batch_first)
