"""Memory of each pipeline rank under one layout, part by part, at named moments of a step.

    after_forward     before the first backward of a step: all micro-batches that the schedule lets wait
    accumulating      between two backwards of a step: parameters, gradients and optimizer state alone ("model state")
    backward          the fullest moment of any backward
    after_backward    gradients reduced, the step not taken yet
    after_step        gradients gone
    peak              the fullest moment

The tensor layer is counted, from the parameters' shapes, the buckets that the runtime makes of them, the schedule's
list of actions and the bytes that each unit keeps for backward. The layers below it are estimates (`memory_layers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from hybrid.planner.job import Candidate, Job
from hybrid.planner.kept import Kept
from hybrid.planner.memory_activations import ActivationTable, RankActivations
from hybrid.planner.memory_layers import (
    FrameworkProfile,
    Interval,
    device_bytes,
    framework_profile,
    num_communicators,
    reserved_bytes,
)
from hybrid.planner.memory_least import LeastElements, LeastTable
from hybrid.planner.memory_state import StateBytes, StateTable, num_shards
from hybrid.planner.stages import stage_ranges

__all__ = ["MemoryPlan", "Point", "StageMemory", "least_bytes", "memory", "worst_bytes"]

# A bound is added up in another order than what it bounds.
_ROUNDED = 1.0 - 1e-9

Point = Literal["after_forward", "accumulating", "backward", "after_backward", "after_step", "peak"]


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """One pipeline rank; figures of the rank of its data-parallel group that holds most.

    Args:
        stage: the pipeline rank.
        state, activations, candidate, profile: what the moments are made of.
        num_communicators: groups that a rank communicates in.
        is_processor: see `DeviceKind`.
        host_bytes: what an offloaded optimizer keeps in the host's memory, per rank.
        context: of the job, see there.
    """

    stage: int
    state: StateBytes
    activations: RankActivations
    candidate: Candidate
    profile: FrameworkProfile
    num_communicators: int
    is_processor: bool
    host_bytes: int = 0
    context: tuple[float, float, float] | None = None

    def at_point(self, point: Point) -> Mapping[str, int]:
        """Part -> bytes at a named moment."""
        return self.points[point]

    @cached_property
    def points(self) -> Mapping[Point, Mapping[str, int]]:
        """Moment -> part -> bytes."""
        return _points(self.state, self.activations, self.candidate, self.profile)

    @cached_property
    def parts(self) -> Mapping[str, int]:
        """At the fullest moment."""
        return _fullest(self.state, self.activations, self.candidate, self.profile)[1]

    @cached_property
    def tensors_bytes(self) -> int:
        """Live bytes of tensors at the fullest moment: the sum of `parts`."""
        return _most_bytes(self.state, self.activations, self.candidate, self.profile)

    @cached_property
    def reserved(self) -> Interval:
        """What the allocator keeps."""
        return reserved_bytes(self.pooled_bytes, is_processor=self.is_processor)

    @cached_property
    def pooled_bytes(self) -> int:
        """Of the fullest moment; of two, where one cannot use the pool of the other."""
        most = self.tensors_bytes
        if self.profile.gathers_apart and self.candidate.zero_stage == 3:
            _, step = _moments(self.state, self.activations, self.candidate, self.profile)
            most = max(most, sum(step.values()) + self.state.gathered)
        return most

    @cached_property
    def device(self) -> Interval:
        """What the device must have, context and communicators included."""
        return device_bytes(self.reserved, self.num_communicators, is_processor=self.is_processor, context=self.context)

    @property
    def model_state_bytes(self) -> int:
        """Parameters, gradients as they accumulate, and optimizer state: what the tables of the ZeRO paper count."""
        return sum(size for part, size in self.points["accumulating"].items() if part != "bookkeeping")

    def chance_of_running_out(self, memory_bytes: float) -> float:
        """Chance that the device needs more than this; see `Interval.chance_above` for the distribution."""
        return self.device.chance_above(memory_bytes)

    def bytes_at_risk(self, risk: float) -> float:
        """The size of a device that is too small with this chance."""
        return self.device.at_risk(risk)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What each pipeline rank holds; `ranks`: its state and its activations."""

    job: Job
    candidate: Candidate
    profile: FrameworkProfile
    ranks: tuple[tuple[StateBytes, RankActivations], ...]

    @cached_property
    def stages(self) -> tuple[StageMemory, ...]:
        """`stages[rank]`: of each pipeline rank."""
        return tuple(map(self._stage, range(len(self.ranks))))

    @cached_property
    def worst(self) -> StageMemory:
        """The pipeline rank that holds most."""
        most = [_most_bytes(*rank, self.candidate, self.profile) for rank in self.ranks]
        return self._stage(most.index(max(most)))

    def _stage(self, rank: int) -> StageMemory:
        state, activations = self.ranks[rank]
        return StageMemory(
            stage=rank,
            state=state,
            activations=activations,
            candidate=self.candidate,
            profile=self.profile,
            num_communicators=num_communicators(self.candidate),
            is_processor=self.job.cluster.device.is_processor,
            host_bytes=_host_bytes(state, self.job) if self.candidate.is_offloaded else 0,
            context=self.job.context_bytes,
        )


def memory(job: Job, candidate: Candidate, *, shard: int | None = None) -> MemoryPlan:
    """What each pipeline rank holds.

    Args:
        shard: count for this place in the shard group; None: for the one with most, with its padding as if it were
            used (at most 128 bytes a parameter).
    """
    table = _table(job)
    chunks = stage_ranges(job, candidate)
    states = table.state.of_ranks(chunks, candidate, shard)
    activations = table.activations.of_ranks(chunks, candidate)
    return MemoryPlan(
        job=job, candidate=candidate, profile=table.profile, ranks=tuple(zip(states, activations, strict=True))
    )


def worst_bytes(job: Job, candidate: Candidate) -> int:
    """`memory(job, candidate).worst.pooled_bytes` alone."""
    plan = memory(job, candidate)
    if plan.profile.gathers_apart:
        return plan.worst.pooled_bytes
    return max(_most_bytes(*rank, candidate, plan.profile) for rank in plan.ranks)


def least_bytes(job: Job, candidate: Candidate) -> float:
    """Not more than `worst_bytes`, much sooner: of the ranks that usually hold most, without buckets and padding."""
    table = _table(job)
    chunks = stage_ranges(job, candidate)
    activations = table.activations.of_ranks(chunks, candidate)
    elements, fullest = table.least.of_ranks(chunks, candidate)
    ranks = {0, fullest, len(elements) - 1}
    return max(_least_of_rank(job, candidate, table.profile, elements[rank], activations[rank]) for rank in ranks)


def _least_of_rank(
    job: Job,
    candidate: Candidate,
    profile: FrameworkProfile,
    elements: LeastElements,
    activations: RankActivations,
) -> float:
    """As `_most_bytes`, of what is counted without laying it out."""
    precision, stage, is_static = job.precision, candidate.zero_stage, profile.has_static_gradients
    shards, expert_shards = num_shards(candidate)
    trained = elements.trained + elements.trained_experts
    own = elements.trained / shards + elements.trained_experts / expert_shards
    whole = trained + elements.frozen + elements.frozen_experts
    held: float = whole
    if stage == 3:
        held = own + elements.frozen / shards + elements.frozen_experts / expert_shards
    state = 0.0 if candidate.is_offloaded else own * (precision.master + job.optimizer.state)
    always = held * precision.parameter + state
    reduced = own * precision.gradient * _keeps_shards(candidate)
    gathered = 0.0
    if candidate.reshard_after == "run" and shards > 1 and expert_shards > 1:
        gathered = whole * precision.parameter / candidate.virtual_stages  # one chunk is whole at a time
    most_whole, kept_shards = float(trained * precision.gradient), 0.0
    if stage and not is_static:
        if stage >= 2 and (candidate.grad_reduce == "every_micro_batch" or candidate.num_micro_batches == 1):
            most_whole, kept_shards = 0.0, reduced
        elif candidate.num_micro_batches == 1:
            most_whole = 0.0
    backward = max(activations.before, activations.after + most_whole + kept_shards)
    backward += gathered + activations.added + activations.boundary
    step = own * (profile.step_bytes_cut if stage == 3 else profile.step_bytes)
    step += trained * precision.gradient if stage == 0 or is_static else reduced
    return (always + round(profile.constant_bytes) + max(backward, step)) * _ROUNDED


def _host_bytes(state: StateBytes, job: Job) -> int:
    """State on the host; parameters without masters have a copy there, which the host updates."""
    copies = 0 if state.masters else round(state.own_elements * job.precision.parameter)
    return state.offloaded + copies


# -- moments ---------------------------------------------------------------------------------------------------


def _points(
    state: StateBytes, activations: RankActivations, candidate: Candidate, profile: FrameworkProfile
) -> Mapping[Point, Mapping[str, int]]:
    always = _always(state, candidate)
    is_static = profile.has_static_gradients
    kept_whole, kept_shards, _ = _gradients(state, candidate, is_static=is_static)
    after_forward = {**always, "gradients": state.gradients * is_static, "activations": activations.before}
    after_forward["gathered_units"] = state.gathered_run if candidate.reshard_after == "run" else 0
    backward, peak = _fullest(state, activations, candidate, profile)
    return MappingProxyType(
        {
            "after_forward": after_forward,
            "accumulating": {**always, "gradients": kept_whole, "gradient_shards": kept_shards},
            "backward": backward,
            "after_backward": _after_backward(always, state, candidate, is_static=is_static),
            "after_step": {**always, "gradients": state.gradients * is_static},
            "peak": peak,
        }
    )


def _fullest(
    state: StateBytes, activations: RankActivations, candidate: Candidate, profile: FrameworkProfile
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """The fullest moment of a backward, and of the whole step."""
    backward, step = _moments(state, activations, candidate, profile)
    return backward, max((backward, step), key=lambda parts: sum(parts.values()))


def _moments(
    state: StateBytes, activations: RankActivations, candidate: Candidate, profile: FrameworkProfile
) -> tuple[dict[str, int], dict[str, int]]:
    """The fullest moment of a backward, and that of the optimizer's step."""
    always = _always(state, candidate)
    is_static = profile.has_static_gradients
    _, kept_shards, most_whole = _gradients(state, candidate, is_static=is_static)
    constant = round(profile.constant_bytes)
    backward = {
        **always,
        "gathered_units": state.gathered_run if candidate.reshard_after == "run" else state.gathered,
        "recomputed": activations.recomputed,
        "working": activations.working + constant,
        "logits": activations.logits,
        "boundary": activations.boundary,
    }
    # In the first backward gradients come as activations go: the beginning and the end are fullest.
    gradients = min(most_whole, state.two_buckets)
    if activations.before + gradients >= activations.after + most_whole + kept_shards:
        backward |= {"activations": activations.before, "gradients": gradients}
    else:
        backward |= {"activations": activations.after, "gradients": most_whole, "gradient_shards": kept_shards}
    step_bytes = profile.step_bytes_cut if candidate.zero_stage == 3 else profile.step_bytes
    if always["masters"]:
        step_bytes += profile.step_bytes_masters
    step = {**_after_backward(always, state, candidate, is_static=is_static), "working": constant}
    step["step"] = round(state.own_elements * step_bytes)
    return backward, step


def _most_bytes(
    state: StateBytes, activations: RankActivations, candidate: Candidate, profile: FrameworkProfile
) -> int:
    """The sum of the second of `_fullest`, which a search asks for of every rank of every layout."""
    is_here = not candidate.is_offloaded
    is_static = profile.has_static_gradients
    _, kept_shards, most_whole = _gradients(state, candidate, is_static=is_static)
    backward = (
        (state.gathered_run if candidate.reshard_after == "run" else state.gathered)
        + activations.added
        + activations.boundary
        + max(activations.before + min(most_whole, state.two_buckets), activations.after + most_whole + kept_shards)
    )
    masters = state.masters * is_here
    step_bytes = profile.step_bytes_cut if candidate.zero_stage == 3 else profile.step_bytes
    if masters:
        step_bytes += profile.step_bytes_masters
    step = round(state.own_elements * step_bytes)
    step += (
        state.gradients if candidate.zero_stage == 0 or is_static else state.gradient_shards * _keeps_shards(candidate)
    )
    always = state.parameters + masters + state.optimizer_state * is_here + state.bookkeeping
    return always + round(profile.constant_bytes) + max(backward, step)


def _always(state: StateBytes, candidate: Candidate) -> dict[str, int]:
    is_here = not candidate.is_offloaded
    return {
        "parameters": state.parameters,
        "masters": state.masters * is_here,
        "optimizer_state": state.optimizer_state * is_here,
        "bookkeeping": state.bookkeeping,
    }


def _after_backward(
    always: Mapping[str, int], state: StateBytes, candidate: Candidate, *, is_static: bool
) -> dict[str, int]:
    if candidate.zero_stage == 0 or is_static:
        return {**always, "gradients": state.gradients, "gradient_shards": 0}
    return {**always, "gradients": 0, "gradient_shards": state.gradient_shards * _keeps_shards(candidate)}


def _keeps_shards(candidate: Candidate) -> bool:
    """Whether reduced gradients stay on the device: with offload those that are yet to be summed over replicas."""
    return not candidate.is_offloaded or candidate.dp_replicate > 1


def _gradients(state: StateBytes, candidate: Candidate, *, is_static: bool) -> tuple[int, int, int]:
    """(whole gradients between two backwards, own shards then, the most that is whole during one)."""
    if candidate.zero_stage == 0 or is_static:
        return state.gradients, 0, state.gradients
    reduces_each_time = candidate.zero_stage >= 2 and candidate.grad_reduce == "every_micro_batch"
    if reduces_each_time or (candidate.zero_stage >= 2 and candidate.num_micro_batches == 1):
        return 0, state.gradient_shards * _keeps_shards(candidate), state.two_buckets
    if candidate.num_micro_batches == 1:  # reduced as they come
        return state.gradients, 0, state.six_buckets
    return state.gradients, 0, state.gradients


# -- tables ----------------------------------------------------------------------------------------------------


class _Table:
    """What is remembered of one job."""

    def __init__(self, job: Job) -> None:
        self.profile = framework_profile(job.software if isinstance(job.software, str) else job.software.name)
        self.state, self.least = StateTable(job), LeastTable(job)
        self.activations = ActivationTable(job, self.profile)


_TABLES: Kept[_Table] = Kept(16)


def _table(job: Job) -> _Table:
    return _TABLES.get(
        job.model,
        *(job.seq, job.precision, job.optimizer, job.is_flash, job.software, job.bucket_bytes, job.prefetch),
        make=lambda: _Table(job),
    )
