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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf

from hybrid.planner.host_memory import fullest_host, host_parts
from hybrid.planner.job import Candidate, Job
from hybrid.planner.kept import Kept
from hybrid.planner.memory_activations import ActivationTable, RankActivations
from hybrid.planner.memory_apart import Meeting, gradients_that_meet, may_be_apart
from hybrid.planner.memory_layers import (
    FrameworkProfile,
    Interval,
    device_bytes,
    framework_profile,
    num_communicators,
    reserved_bytes,
)
from hybrid.planner.memory_least import LeastElements, LeastTable
from hybrid.planner.memory_moments import (
    Point,
    fullest,
    keeps_shards,
    keeps_whole,
    kept_shards,
    moments,
    most_bytes,
    points_of,
    step_element_bytes,
)
from hybrid.planner.memory_state import StateBytes, StateTable, num_shards
from hybrid.planner.stages import stage_ranges

__all__ = [
    "MemoryPlan",
    "Point",
    "StageMemory",
    "gathered_again",
    "least_bytes",
    "least_bytes_of",
    "memory",
    "worst_bytes",
]

# A bound is added up in another order than what it bounds.
_ROUNDED = 1.0 - 1e-9


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """One pipeline rank; figures of the rank of its data-parallel group that holds most.

    Args:
        stage: the pipeline rank.
        state, activations, candidate, profile: what the moments are made of.
        num_communicators: groups that a rank communicates in.
        is_processor: see `DeviceKind`.
        context: of the job, see there.
        meeting: see `gradients_that_meet`.
    """

    stage: int
    state: StateBytes
    activations: RankActivations
    candidate: Candidate
    profile: FrameworkProfile
    num_communicators: int
    is_processor: bool
    context: tuple[float, float, float] | None = None
    meeting: Meeting | None = None

    def at_point(self, point: Point) -> Mapping[str, int]:
        """Part -> bytes at a named moment."""
        return self.points[point]

    @cached_property
    def points(self) -> Mapping[Point, Mapping[str, int]]:
        """Moment -> part -> bytes."""
        return points_of(self.state, self.activations, self.candidate, self.profile, self.meeting)

    @cached_property
    def parts(self) -> Mapping[str, int]:
        """At the fullest moment."""
        return fullest(self.state, self.activations, self.candidate, self.profile, self.meeting)[1]

    @cached_property
    def tensors_bytes(self) -> int:
        """Live bytes of tensors at the fullest moment: the sum of `parts`."""
        return most_bytes(self.state, self.activations, self.candidate, self.profile, self.meeting)

    @cached_property
    def reserved(self) -> Interval:
        """What the allocator keeps."""
        return reserved_bytes(self.pooled_bytes, is_processor=self.is_processor)

    @cached_property
    def pooled_bytes(self) -> int:
        """Of the fullest moment; of two, where one cannot use the pool of the other."""
        most = self.tensors_bytes
        if self.profile.gathers_apart and self.candidate.zero_stage == 3:
            _, step = moments(self.state, self.activations, self.candidate, self.profile)
            most = max(most, sum(step.values()) + self.state.gathered)
        return most

    @cached_property
    def device(self) -> Interval:
        """What the device must have, context and communicators included."""
        return device_bytes(self.reserved, self.num_communicators, is_processor=self.is_processor, context=self.context)

    @property
    def host_parts(self) -> Mapping[str, int]:
        """Part -> bytes in the host's memory, of this rank, when its gradients have come there."""
        return host_parts(self.state, self.candidate)

    @property
    def host_bytes(self) -> int:
        """What offload keeps in the host's memory, of this rank."""
        return sum(self.host_parts.values())

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
    """What each pipeline rank holds; `ranks`: its state and its activations; `shard`: see `memory`."""

    job: Job
    candidate: Candidate
    profile: FrameworkProfile
    ranks: tuple[tuple[StateBytes, RankActivations], ...]
    shard: int | None = None

    @cached_property
    def stages(self) -> tuple[StageMemory, ...]:
        """`stages[rank]`: of each pipeline rank."""
        return tuple(map(self._stage, range(len(self.ranks))))

    @cached_property
    def worst(self) -> StageMemory:
        """The pipeline rank that holds most."""
        most = self.most_bytes
        return self._stage(most.index(max(most)))

    @property
    def most_bytes(self) -> list[int]:
        """Live bytes of tensors at the fullest moment, on each pipeline rank."""
        return [
            most_bytes(*rank, self.candidate, self.profile, self._meeting(at)) for at, rank in enumerate(self.ranks)
        ]

    @cached_property
    def fullest_host_bytes(self) -> int:
        """What offload keeps in the memory of the host whose ranks keep most."""
        of_ranks = [sum(host_parts(state, self.candidate).values()) for state, _ in self.ranks]
        return fullest_host(self.job.cluster, self.candidate, of_ranks)

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
            context=self.job.context_bytes,
            meeting=self._meeting(rank),
        )

    def _meeting(self, rank: int) -> Meeting | None:
        if self.profile.has_static_gradients or not may_be_apart(self.candidate):
            return None
        chunks = stage_ranges(self.job, self.candidate)
        held, lenders = _table(self.job).state.of_chunks_on(rank, chunks, self.candidate, self.shard)
        kept = [kept_shards(chunk, self.candidate) for chunk in held]
        return gradients_that_meet(self.candidate, rank, held, kept=kept, lenders=lenders)


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
    ranks = tuple(zip(states, activations, strict=True))
    return MemoryPlan(job=job, candidate=candidate, profile=table.profile, ranks=ranks, shard=shard)


def gathered_again(job: Job, candidate: Candidate) -> tuple[int, ...]:
    """Bytes of parameters that a forward of each pipeline rank gathers more than once (stage 3): what `axis_bytes`
    counts and `pricer.py` prices."""
    states = _table(job).state.of_ranks(stage_ranges(job, candidate), candidate, None)
    return tuple(state.gathered_again for state in states)


def worst_bytes(job: Job, candidate: Candidate) -> int:
    """`memory(job, candidate).worst.pooled_bytes` alone."""
    plan = memory(job, candidate)
    if plan.profile.gathers_apart:
        return plan.worst.pooled_bytes
    return max(plan.most_bytes)


def least_bytes(job: Job, candidate: Candidate, *, enough: float = inf) -> float:
    """Not more than `worst_bytes`, much sooner: of the ranks that usually hold most, without buckets and padding.

    Where one of them has more than `enough`, of the first that has.
    """
    table = _table(job)
    chunks = stage_ranges(job, candidate)
    elements, fullest = table.least.of_ranks(chunks, candidate)
    most = 0.0
    for rank in dict.fromkeys((0, fullest, candidate.pp - 1)):
        (own,) = table.activations.of(chunks, candidate, (rank,))
        most = max(most, _least_of_rank(job, candidate, table.profile, elements[rank], own))
        if most > enough:
            break
    return most


def least_bytes_of(job: Job, base: Candidate) -> Callable[[Candidate], float]:
    """`least_bytes` of every way to cut the state of one layout."""
    table = _table(job)
    chunks = stage_ranges(job, base)
    elements, fullest = table.least.of_ranks(chunks, base)
    ranks = sorted({0, fullest, base.pp - 1})
    held = [(elements[rank], own) for rank, own in zip(ranks, table.activations.of(chunks, base, ranks), strict=True)]

    def of(candidate: Candidate) -> float:
        return max(_least_of_rank(job, candidate, table.profile, *one) for one in held)

    return of


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
    if candidate.offload == "parameters":
        held = 0.0
    elif stage == 3:
        held = own + elements.frozen / shards + elements.frozen_experts / expert_shards
    state = 0.0 if candidate.is_offloaded else own * (precision.master + job.optimizer.state)
    always = held * precision.parameter + state
    reduced = own * precision.gradient * keeps_shards(candidate)
    gathered = 0.0
    if candidate.reshard_after == "run" and shards > 1 and expert_shards > 1:
        gathered = whole * precision.parameter / candidate.virtual_stages  # one chunk is whole at a time
    most_whole, own_shards = float(trained * precision.gradient), 0.0
    if stage and not is_static:
        reduces_each_time = stage >= 2 and candidate.grad_reduce == "every_micro_batch"
        if reduces_each_time or candidate.num_micro_batches == 1:
            most_whole, own_shards = 0.0, reduced
        elif may_be_apart(candidate):
            most_whole /= candidate.virtual_stages  # of the chunk that has most
    at_first = most_whole if is_static else 0.0
    backward = max(activations.before + at_first, activations.after + most_whole + own_shards)
    backward += gathered + activations.added + activations.boundary
    step = own * step_element_bytes(candidate, profile, has_masters=False)
    if stage == 0 or is_static:
        step += trained * precision.gradient * keeps_whole(candidate, is_static=is_static)
    else:
        step += reduced
    return (always + round(profile.constant_bytes) + max(backward, step)) * _ROUNDED


# -- tables ----------------------------------------------------------------------------------------------------


class _Table:
    """What is remembered of one job."""

    def __init__(self, job: Job) -> None:
        self.profile = framework_profile(job.software if isinstance(job.software, str) else job.software.name)
        self.state, self.least = StateTable(job), LeastTable(job)
        self.activations = ActivationTable(job, self.profile)


_TABLES: Kept[_Table] = Kept(16)
_OF_JOBS: Kept[_Table] = Kept(16)  # the newest by name: to hash what they depend on takes longer than most answers


def _table(job: Job) -> _Table:
    return _OF_JOBS.get(job, make=lambda: _alike(job))


def _alike(job: Job) -> _Table:
    """One for all jobs that have the same of what a table depends on."""
    return _TABLES.get(
        job.model,
        *(job.seq, job.precision, job.optimizer, job.is_flash, job.software, job.bucket_bytes, job.prefetch),
        make=lambda: _Table(job),
    )
