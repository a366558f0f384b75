"""The pipeline as part of the whole: the plan before anything starts, the stages, the records of what crosses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from hybrid.collectives import ops
from hybrid.compose.losses import LossFunction
from hybrid.compose.own_forward import agree
from hybrid.compose.split_backward import split_backward
from hybrid.compose.stage_plan import PlannedStages, layers_by_name
from hybrid.contracts.chunk_placement import chunk_rank, chunks_on
from hybrid.contracts.schedule import Schedule
from hybrid.mesh import Mesh
from hybrid.pipeline.layers import PipelineLayer
from hybrid.pipeline.loss_scope import free
from hybrid.pipeline.own_forward import OwnForwardModel
from hybrid.pipeline.runner import PipelineRunner
from hybrid.pipeline.stages import StagedModel
from hybrid.pipeline.transport import Lane, Transport
from hybrid.sharding.units import Unit

__all__ = [
    "Stages",
    "WholeModel",
    "known_here",
    "named_once",
    "of_all_stages",
    "share_out",
    "start_pipeline",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """What a rank knows of the parameters of all stages; equal on all ranks.

    Args:
        first: every name of every parameter -> the first name of the same parameter.
        stages_of: first name -> the stages that hold it.
        order: first names of all parameters, in the order of the layers.
        trainable: those of them that are trained.
    """

    first: Mapping[str, str]
    stages_of: Mapping[str, tuple[int, ...]]
    order: tuple[str, ...]
    trainable: tuple[str, ...]

    def axis(self, fqn: str) -> str | None:
        """The places on the pp axis that hold a parameter; None for one."""
        stages = self.stages_of[fqn]
        return f"pp:{','.join(map(str, stages))}" if len(stages) > 1 else None


@dataclass(slots=True, kw_only=True)
class Stages:
    """What a rank does of a pipeline."""

    staged: StagedModel | OwnForwardModel
    whole: WholeModel
    schedule: Schedule
    runner: PipelineRunner
    loss_fn: LossFunction | None
    elsewhere: dict[int, nn.Parameter]
    """Parameters that only other stages train, by id: an optimizer that was built before may hold them."""
    names_elsewhere: dict[int, str]
    stand_in: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.empty(0)))
    """What an optimizer gets on a stage without parameters."""
    names: tuple[str, ...]
    """Keys of the whole model's state dict, in its order."""

    def units(self, model: nn.Module) -> tuple[Unit, ...]:
        """Every layer of this stage is a unit; a tied parameter belongs to its first one. The rest is around them."""
        units: list[Unit] = []
        taken: set[str] = set()
        for name in self.staged.names_here():
            fqns = [self.whole.first[f"{name}.{fqn}"] for fqn, _ in model.get_submodule(name).named_parameters()]
            own = tuple(fqn for fqn in fqns if fqn not in taken)
            taken |= set(own)
            if own:
                units.append(Unit(name=name, fqns=own))
        rest = [fqn for fqn in (self.whole.first[fqn] for fqn, _ in model.named_parameters()) if fqn not in taken]
        return (*units, Unit(name=f"(around {rest[0]})", fqns=tuple(rest))) if rest else tuple(units)

    def chunks_of(self, fqns: Sequence[str]) -> tuple[int, ...]:
        """The chunks of this stage that hold a parameter with these names."""
        return tuple(sorted({chunk for fqn in fqns for chunk in self.staged.own_chunks_of(fqn)}))

    def forget_the_rest(self) -> None:
        """The layers of other stages are not needed any more; parameters that others may hold lose their memory."""
        self.staged.forget_the_rest()
        held = ((self.names_elsewhere[key], parameter) for key, parameter in self.elsewhere.items())
        free({f"parameter {fqn!r} is on pipeline stage {self._places(fqn)}": parameter for fqn, parameter in held})

    def _places(self, fqn: str) -> str:
        return " and ".join(map(str, self.whole.stages_of[self.whole.first[fqn]]))


def share_out(model: nn.Module, planned: PlannedStages, mesh: Mesh) -> tuple[StagedModel | OwnForwardModel, WholeModel]:
    """Decide what this rank holds, build it (`PipelineLayer`), and learn what the others hold. *Collective.*"""
    stage, num_stages = mesh.coordinate("pp"), mesh.degree("pp")
    placement = planned.schedule.placement
    if planned.own_forward is not None:
        plan = agree(model, planned.own_forward, mesh, placement)
        own = OwnForwardModel(model, plan, num_stages=num_stages, stage=stage, placement=placement, device=mesh.device)
        return own, _whole_of(model, own)
    is_whole = not isinstance(model, PipelineLayer) or model.is_built
    # Samples of other sizes, or devices with other memory, may balance otherwise: the first rank's chunks are all's.
    planned = replace(planned, chunks=ops.all_gather_object(planned.chunks, group=mesh.world)[0])
    if isinstance(model, PipelineLayer):
        names = [str(index) for index in range(model.num_layers)]
        call: Callable[[int, Any], Any] = model.run_layer
        if not model.is_built:
            # One base for all random states: what is tied over stages starts equal.
            model.build_settings = ops.all_gather_object(model.build_settings, group=mesh.world)[0]
            here = chunks_on(stage, num_stages, len(planned.chunks), placement)
            model.build([index for chunk in here for index in planned.chunks[chunk]])
    else:
        names = list(layers_by_name(model))

        def call(index: int, value: Any) -> Any:
            return model.get_submodule(names[index])(value)

    staged = StagedModel(
        model, names, planned.chunks, num_stages=num_stages, stage=stage, placement=placement, call=call
    )
    if is_whole:  # each rank sees what the others will hold
        everyone = [_names_on(stage, model, staged) for stage in range(num_stages)]
    else:
        everyone = ops.all_gather_object(_names_on(stage, model, staged), group=mesh.group("pp"))
    return staged, _join(everyone, staged)


def _whole_of(model: nn.Module, staged: OwnForwardModel) -> WholeModel:
    """Of a model that every rank has whole, before anything is taken out."""
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    first = {fqn: names[id(parameter)] for fqn, parameter in model.named_parameters(remove_duplicate=False)}
    stages_of: dict[str, set[int]] = {}
    for fqn, known in first.items():
        stages_of.setdefault(known, set()).update(staged.stages_of(fqn))
    return WholeModel(
        first=first,
        stages_of={fqn: tuple(sorted(stages)) for fqn, stages in stages_of.items()},
        order=tuple(names.values()),
        trainable=tuple(fqn for fqn, parameter in model.named_parameters() if parameter.requires_grad),
    )


@dataclass(frozen=True, slots=True)
class _Known:
    """One parameter of a stage: its names, those that are known of other stages too; whether it is trained."""

    names: tuple[str, ...]
    trainable: bool


def _names_on(stage: int, model: nn.Module, staged: StagedModel) -> list[_Known]:
    """What a stage holds, as far as the model here has it."""
    names: dict[int, list[str]] = {}
    trained: dict[int, bool] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
        trained[id(parameter)] = parameter.requires_grad
    known = [_Known(tuple(fqns), trained[key]) for key, fqns in names.items()]
    if isinstance(model, PipelineLayer):
        tied = [tuple(f"{index}.{attribute}" for index, attribute in uses) for uses in model.shared_keys().values()]
        known = [_Known(tuple(dict.fromkeys([*one.names, *_meeting(one.names, tied)])), one.trainable) for one in known]
    return [one for one in known if any(staged.stage_of(fqn) == stage for fqn in one.names)]


def _meeting(names: Sequence[str], ties: Sequence[Sequence[str]]) -> Iterator[str]:
    """All names of the ties that have one of these."""
    for tie in ties:
        if set(tie) & set(names):
            yield from tie


def _join(everyone: Sequence[Sequence[_Known]], staged: StagedModel) -> WholeModel:
    place = {name: index for index, name in enumerate(staged.names)}
    # Where each name stands among those of its layer, as the stage that has the layer lists them.
    rank = {
        fqn: at
        for stage, known in enumerate(everyone)
        for at, fqn in enumerate(fqn for one in known for fqn in one.names if staged.stage_of(fqn) == stage)
    }
    group_of: dict[str, tuple[str, ...]] = {}
    for one in (one for known in everyone for one in known):
        joined = tuple(dict.fromkeys(name for fqn in one.names for name in group_of.get(fqn, (fqn,))))
        group_of |= dict.fromkeys(joined, joined)
    first = {
        fqn: min(names, key=lambda name: (place[name.partition(".")[0]], rank.get(name, 0)))
        for fqn, names in group_of.items()
    }
    trainable: dict[str, bool] = {}
    for one in (one for known in everyone for one in known):
        name = first[one.names[0]]
        trainable[name] = trainable.get(name, False) or one.trainable
    stages_of: dict[str, set[int]] = {}
    for fqn, name in first.items():
        stages_of.setdefault(name, set()).add(staged.stage_of(fqn))
    order = sorted(trainable, key=lambda fqn: place[fqn.partition(".")[0]])
    return WholeModel(
        first=first,
        stages_of={fqn: tuple(sorted(stages)) for fqn, stages in stages_of.items()},
        order=tuple(order),
        trainable=tuple(fqn for fqn in order if trainable[fqn]),
    )


def start_pipeline(
    model: nn.Module,
    layers: tuple[StagedModel | OwnForwardModel, WholeModel],
    planned: PlannedStages,
    mesh: Mesh,
) -> Stages:
    """Take the layers of other stages out of the model, and make the links to the neighbours. *Collective.*"""
    staged, whole = layers
    names = _all_keys(model, staged, mesh) if isinstance(staged, StagedModel) else tuple(model.state_dict())
    by_id = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    gone = staged.remove_the_rest()
    if planned.schedule.splits_backward:
        split_backward(model, mesh.group("tp"))
    staged.take_over()
    transport = _transport(staged, mesh)
    return Stages(
        staged=staged,
        whole=whole,
        schedule=planned.schedule,
        runner=PipelineRunner(transport, num_chunks=staged.num_chunks, forward=staged.run_chunk),
        loss_fn=getattr(model, "loss_fn", None) if planned.own_forward is None else None,
        elsewhere={id(parameter): parameter for parameter in gone},
        names_elsewhere={id(parameter): by_id[id(parameter)] for parameter in gone},
        names=names,
    )


def _transport(staged: StagedModel | OwnForwardModel, mesh: Mesh) -> Transport:
    """The links to the ranks that hold the neighbours of this rank's chunks. *Collective.*"""
    ranks = [chunk_rank(chunk, staged.num_stages, staged.placement) for chunk in range(staged.num_chunks)]
    cuts = set(pairwise(ranks))
    # NCCL runs what two ranks send each other over one communicator in the order of launches, and neither waits for the
    # other to come to the same place.
    needs_both = mesh.backend != "gloo" and any((target, source) in cuts for source, target in cuts if source != target)

    mesh.end_unused_groups()

    def lane(way: str) -> Lane:
        data = mesh.another_group("pp", label=f"pp_{way}", of_model=staged)
        if mesh.backend == "gloo":
            return Lane(data=data, headers=data)
        return Lane(
            data=data, headers=mesh.another_group("pp", label=f"{data.axis}_headers", on_host=True, of_model=staged)
        )

    lanes = []
    for way in ("forward", "backward"):
        up = lane(way)
        lanes.append((up, lane(way) if needs_both else up))
    return Transport(*lanes, ranks=ranks, device=mesh.device)


def _all_keys(model: nn.Module, staged: StagedModel, mesh: Mesh) -> tuple[str, ...]:
    """Keys of the state dict of all layers, in the order of the layers."""
    everyone = ops.all_gather_object(list(model.state_dict()), group=mesh.group("pp"))
    place = {name: index for index, name in enumerate(staged.names)}
    keys = dict.fromkeys(key for keys in everyone for key in keys)
    return tuple(sorted(keys, key=lambda key: place.get(key.partition(".")[0], len(place))))


def of_all_stages(result_dtype: torch.dtype, mesh: Mesh) -> torch.dtype:
    """The type in which losses and norms are given out: the same on all stages, whatever they hold. *Collective.*"""
    everyone = ops.all_gather_object(result_dtype, group=mesh.group("pp"))
    return torch.float64 if torch.float64 in everyone else result_dtype


def named_once(model: nn.Module, stages: Stages | None) -> dict[str, nn.Parameter]:
    """This rank's parameters by the names under which all stages know them."""
    named = model.named_parameters()
    return {(fqn if stages is None else stages.whole.first[fqn]): parameter for fqn, parameter in named}


def known_here(wanted: Sequence[str], model: nn.Module, stages: Stages | None) -> Sequence[str]:
    """Of names and classes of modules that the whole model has, those that this stage has."""
    if stages is None:
        return wanted
    here = {name for name, _ in model.named_modules()}
    here |= {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return [name for name in wanted if name in here]
