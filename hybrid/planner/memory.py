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
from dataclasses import dataclass, replace
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
from hybrid.planner.memory_state import StateBytes, StateTable
from hybrid.planner.stages import stage_units

__all__ = ["MemoryPlan", "Point", "StageMemory", "memory"]

Point = Literal["after_forward", "accumulating", "backward", "after_backward", "after_step", "peak"]


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """One pipeline rank; figures of the rank of its data-parallel group that holds most.

    Args:
        stage: the pipeline rank.
        points: moment -> part -> bytes.
        num_communicators: groups that a rank communicates in.
        device_name: kind of the device.
        host_bytes: what an offloaded optimizer keeps in the host's memory, per rank.
    """

    stage: int
    points: Mapping[Point, Mapping[str, int]]
    num_communicators: int
    device_name: str
    host_bytes: int = 0

    def at_point(self, point: Point) -> Mapping[str, int]:
        """Part -> bytes at a named moment."""
        return self.points[point]

    @property
    def parts(self) -> Mapping[str, int]:
        """At the fullest moment."""
        return self.points["peak"]

    @cached_property
    def tensors_bytes(self) -> int:
        """Live bytes of tensors at the fullest moment."""
        return sum(self.parts.values())

    @cached_property
    def reserved(self) -> Interval:
        """What the allocator keeps at the fullest moment."""
        return reserved_bytes(self.tensors_bytes, self.device_name)

    @cached_property
    def device(self) -> Interval:
        """What the device must have, context and communicators included."""
        return device_bytes(self.reserved, self.num_communicators, self.device_name)

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
    """`stages[rank]`: of each pipeline rank."""

    stages: tuple[StageMemory, ...]

    @cached_property
    def worst(self) -> StageMemory:
        """The pipeline rank that holds most."""
        return max(self.stages, key=lambda stage: stage.tensors_bytes)


def memory(job: Job, candidate: Candidate, *, shard: int | None = None) -> MemoryPlan:
    """What each pipeline rank holds.

    Args:
        shard: count for this place in the shard group; None: for the one with most, with its padding as if it were
            used (at most 128 bytes a parameter).
    """
    table = _table(job)
    chunks = _chunks(job, candidate)
    states = table.state.of_ranks(chunks, candidate, shard)
    activations = table.activations.of_ranks(chunks, candidate)
    return MemoryPlan(
        stages=tuple(
            StageMemory(
                stage=rank,
                points=_points(state, acts, candidate, table.profile),
                num_communicators=num_communicators(candidate),
                device_name=job.cluster.device.name,
                host_bytes=state.masters + state.optimizer_state + state.gradient_shards
                if candidate.is_offloaded
                else 0,
            )
            for rank, (state, acts) in enumerate(zip(states, activations, strict=True))
        )
    )


# -- moments ---------------------------------------------------------------------------------------------------


def _points(
    state: StateBytes, activations: RankActivations, candidate: Candidate, profile: FrameworkProfile
) -> Mapping[Point, Mapping[str, int]]:
    if candidate.is_offloaded:
        state = replace(state, masters=0, optimizer_state=0, gradient_shards=0)
    always = {
        "parameters": state.parameters,
        "masters": state.masters,
        "optimizer_state": state.optimizer_state,
        "bookkeeping": state.bookkeeping,
    }
    is_static = profile.has_static_gradients
    kept_whole, kept_shards, most_whole = _gradients(state, candidate, is_static=is_static)
    is_run = candidate.reshard_after == "run"
    after_forward = {**always, "gradients": state.gradients * is_static, "activations": activations.before}
    after_forward["gathered_units"] = state.gathered_run if is_run else 0
    accumulating = {**always, "gradients": kept_whole, "gradient_shards": kept_shards}
    after_backward = {**always, "gradients": 0, "gradient_shards": state.gradient_shards}
    if candidate.zero_stage == 0 or is_static:
        after_backward.update(gradients=state.gradients, gradient_shards=0)
    after_step = {**always, "gradients": state.gradients * is_static}
    backward = {
        **always,
        "gathered_units": state.gathered_run if is_run else state.gathered,
        "recomputed": activations.recomputed,
        "working": activations.working + round(profile.constant_bytes),
        "logits": activations.logits,
        "boundary": activations.boundary,
    }
    # In the first backward gradients come as activations go: the beginning and the end are fullest.
    first = {**backward, "activations": activations.before, "gradients": min(most_whole, state.two_buckets)}
    later = {**backward, "activations": activations.after, "gradients": most_whole, "gradient_shards": kept_shards}
    step_bytes = profile.step_bytes_cut if candidate.zero_stage == 3 else profile.step_bytes
    step = {**after_backward, "working": round(profile.constant_bytes)}
    if state.masters:
        step_bytes += profile.step_bytes_masters
    step["step"] = round(state.own_elements * step_bytes)
    fuller = max((first, later), key=lambda parts: sum(parts.values()))
    peak = max((fuller, step), key=lambda parts: sum(parts.values()))
    return MappingProxyType(
        {
            "after_forward": after_forward,
            "accumulating": accumulating,
            "backward": fuller,
            "after_backward": after_backward,
            "after_step": after_step,
            "peak": peak,
        }
    )


def _gradients(state: StateBytes, candidate: Candidate, *, is_static: bool) -> tuple[int, int, int]:
    """(whole gradients between two backwards, own shards then, the most that is whole during one)."""
    if candidate.zero_stage == 0 or is_static:
        return state.gradients, 0, state.gradients
    reduces_each_time = candidate.zero_stage >= 2 and candidate.grad_reduce == "every_micro_batch"
    if reduces_each_time or (candidate.zero_stage >= 2 and candidate.num_micro_batches == 1):
        return 0, state.gradient_shards, state.two_buckets
    if candidate.num_micro_batches == 1:  # reduced as they come
        return state.gradients, 0, state.six_buckets
    return state.gradients, 0, state.gradients


# -- tables ----------------------------------------------------------------------------------------------------


class _Table:
    """What is remembered of one job."""

    def __init__(self, job: Job) -> None:
        self.profile = framework_profile(job.software if isinstance(job.software, str) else job.software.name)
        self.state = StateTable(job)
        self.activations = ActivationTable(job, self.profile)


_TABLES: Kept[_Table] = Kept(16)


def _table(job: Job) -> _Table:
    return _TABLES.get(
        job.model,
        *(job.seq, job.precision, job.optimizer, job.is_flash, job.software, job.bucket_bytes, job.prefetch),
        make=lambda: _Table(job),
    )


def _chunks(job: Job, candidate: Candidate) -> tuple[range, ...]:
    chunks = []
    start = 0
    for units in stage_units(job, candidate):
        chunks.append(range(start, start + len(units)))
        start += len(units)
    return tuple(chunks)
