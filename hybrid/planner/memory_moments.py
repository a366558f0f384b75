"""The parts of a rank's memory at each named moment of a step; see `memory.py`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from hybrid.planner.job import Candidate
from hybrid.planner.memory_activations import RankActivations
from hybrid.planner.memory_apart import Meeting
from hybrid.planner.memory_layers import FrameworkProfile
from hybrid.planner.memory_state import StateBytes, num_shards

__all__ = [
    "Point",
    "fullest",
    "keeps_shards",
    "keeps_whole",
    "kept_shards",
    "moments",
    "most_bytes",
    "points_of",
    "step_element_bytes",
]

Point = Literal["after_forward", "accumulating", "backward", "after_backward", "after_step", "peak"]


def points_of(
    state: StateBytes,
    activations: RankActivations,
    candidate: Candidate,
    profile: FrameworkProfile,
    meeting: Meeting | None = None,
) -> Mapping[Point, Mapping[str, int]]:
    """Moment -> part -> bytes; `meeting`: None where all gradients of the rank meet."""
    always = _always(state, candidate)
    is_static = profile.has_static_gradients
    whole, shards, _, _ = _gradients(state, candidate, meeting, is_static=is_static)
    after_forward = {**always, "gradients": state.gradients * is_static, "activations": activations.before}
    if candidate.reshard_after == "run":
        after_forward |= {"gathered_units": state.gathered_run, "arrived_shards": _arrived(state, candidate)}
    else:
        after_forward |= {"gathered_units": 0, "arrived_shards": 0}
    backward, peak = fullest(state, activations, candidate, profile, meeting)
    return MappingProxyType(
        {
            "after_forward": after_forward,
            "accumulating": {**always, "gradients": whole, "gradient_shards": shards},
            "backward": backward,
            "after_backward": _after_backward(always, state, candidate, is_static=is_static),
            "after_step": {**always, "gradients": state.gradients * is_static},
            "peak": peak,
        }
    )


def fullest(
    state: StateBytes,
    activations: RankActivations,
    candidate: Candidate,
    profile: FrameworkProfile,
    meeting: Meeting | None = None,
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """The fullest moment of a backward, and of the whole step."""
    backward, step = moments(state, activations, candidate, profile, meeting)
    return backward, max((backward, step), key=lambda parts: sum(parts.values()))


def moments(
    state: StateBytes,
    activations: RankActivations,
    candidate: Candidate,
    profile: FrameworkProfile,
    meeting: Meeting | None = None,
) -> tuple[dict[str, int], dict[str, int]]:
    """The fullest moment of a backward, and that of the optimizer's step."""
    always = _always(state, candidate)
    is_static = profile.has_static_gradients
    _, _, most_whole, own_shards = _gradients(state, candidate, meeting, is_static=is_static)
    constant = round(profile.constant_bytes)
    backward = {
        **always,
        "gathered_units": state.gathered_run if candidate.reshard_after == "run" else state.gathered,
        "arrived_shards": _arrived(state, candidate),
        "recomputed": activations.recomputed,
        "working": activations.working + constant,
        "logits": activations.logits,
        "boundary": activations.boundary,
    }
    # In the first backward gradients come as activations go: the beginning and the end are fullest.
    gradients = most_whole if is_static else min(most_whole, state.two_buckets)
    if activations.before + gradients >= activations.after + most_whole + own_shards:
        backward |= {"activations": activations.before, "gradients": gradients}
    else:
        backward |= {"activations": activations.after, "gradients": most_whole, "gradient_shards": own_shards}
    step_bytes = step_element_bytes(candidate, profile, has_masters=always["masters"] > 0)
    step = {**_after_backward(always, state, candidate, is_static=is_static), "working": constant}
    step["step"] = round(state.own_elements * step_bytes)
    return backward, step


def most_bytes(
    state: StateBytes,
    activations: RankActivations,
    candidate: Candidate,
    profile: FrameworkProfile,
    meeting: Meeting | None = None,
) -> int:
    """The sum of the second of `fullest`, which a search asks for of every rank of every layout."""
    is_here = not candidate.is_offloaded
    is_static = profile.has_static_gradients
    _, _, most_whole, own_shards = _gradients(state, candidate, meeting, is_static=is_static)
    at_first = most_whole if is_static else min(most_whole, state.two_buckets)
    backward = (
        (state.gathered_run if candidate.reshard_after == "run" else state.gathered)
        + _arrived(state, candidate)
        + activations.added
        + activations.boundary
        + max(activations.before + at_first, activations.after + most_whole + own_shards)
    )
    masters = state.masters * is_here
    step = round(state.own_elements * step_element_bytes(candidate, profile, has_masters=masters > 0))
    if candidate.zero_stage == 0 or is_static:
        step += state.gradients * keeps_whole(candidate, is_static=is_static)
    else:
        step += kept_shards(state, candidate)
    parameters = 0 if candidate.offload == "parameters" else state.parameters
    always = parameters + masters + state.optimizer_state * is_here + state.bookkeeping
    return always + round(profile.constant_bytes) + max(backward, step)


def step_element_bytes(candidate: Candidate, profile: FrameworkProfile, *, has_masters: bool) -> float:
    """Temporary bytes per own element while the optimizer steps; what steps on the host has them there."""
    if candidate.is_offloaded:
        return 0.0
    plain = profile.step_bytes_cut if candidate.zero_stage == 3 else profile.step_bytes
    return plain + (profile.step_bytes_masters if has_masters else 0.0)


def _always(state: StateBytes, candidate: Candidate) -> dict[str, int]:
    is_here = not candidate.is_offloaded
    return {
        "parameters": 0 if candidate.offload == "parameters" else state.parameters,
        "masters": state.masters * is_here,
        "optimizer_state": state.optimizer_state * is_here,
        "bookkeeping": state.bookkeeping,
    }


def _arrived(state: StateBytes, candidate: Candidate) -> int:
    """Beside units that are whole, their own shards as they came from the host."""
    if candidate.offload != "parameters":
        return 0
    whole = state.gathered_run if candidate.reshard_after == "run" else state.gathered
    return whole // num_shards(candidate)[0]


def _after_backward(
    always: Mapping[str, int], state: StateBytes, candidate: Candidate, *, is_static: bool
) -> dict[str, int]:
    if candidate.zero_stage == 0 or is_static:
        gradients = state.gradients * keeps_whole(candidate, is_static=is_static)
        return {**always, "gradients": gradients, "gradient_shards": 0}
    return {**always, "gradients": 0, "gradient_shards": kept_shards(state, candidate)}


def keeps_whole(candidate: Candidate, *, is_static: bool) -> bool:
    """Whether gradients that nobody shares stay on the device once they are reduced."""
    return is_static or not candidate.is_offloaded


def keeps_shards(candidate: Candidate) -> bool:
    """Whether reduced gradients stay on the device: with offload those that are yet to be summed over replicas."""
    return not candidate.is_offloaded or candidate.dp_replicate > 1


def kept_shards(state: StateBytes, candidate: Candidate) -> int:
    """Bytes of reduced gradients that stay on the device until the step."""
    return state.gradient_shards if keeps_shards(candidate) else state.summed_shards


def _gradients(
    state: StateBytes, candidate: Candidate, meeting: Meeting | None, *, is_static: bool
) -> tuple[int, int, int, int]:
    """(whole gradients between two backwards, own shards then, the most that is whole during one, own shards at the end
    of the last one beside them)."""
    if candidate.zero_stage == 0 or is_static:
        return state.gradients, 0, state.gradients, 0
    if meeting is not None:
        return (*meeting.between, *meeting.during)
    reduces_each_time = candidate.zero_stage >= 2 and candidate.grad_reduce == "every_micro_batch"
    if reduces_each_time or (candidate.zero_stage >= 2 and candidate.num_micro_batches == 1):
        most = min(state.gradients, state.two_buckets + state.waiting)
        shards = kept_shards(state, candidate)
        return state.waiting, shards, most, shards
    if candidate.num_micro_batches == 1:  # reduced as they come
        return state.gradients, 0, state.six_buckets, kept_shards(state, candidate)
    return state.gradients, 0, state.gradients, 0
