"""The process groups made inside a running job, and their end when nobody uses them any more.

Each of gloo's has three threads and a connection per peer, each of NCCL's a communicator with memory of its own. They
end with the default group. Where that goes on, because the caller started it, whoever wraps one model after the other
would gather groups without end: so those whose users are gone end before new ones are made.
"""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybrid.collectives.autograd import forget_groups, held_by_others
from hybrid.collectives.channel import forget_channels
from hybrid.collectives.group import Group
from hybrid.collectives.handle import forget_calls, forget_history
from hybrid.collectives.ops import all_gather_object

__all__ = ["connect", "end_default_group", "end_unused_groups", "forget_ended_groups", "make_process_group"]


class _Made(NamedTuple):
    """One group, on all ranks of the world at the same place in the list, also where it has no part in it."""

    user: weakref.ref[object]
    group: dist.ProcessGroup | None
    of_model: bool
    """Made for one model, which may be gone before the job is."""


TURNS = 4
"""Beginnings of jobs and pipelines for which groups that nobody uses any more may stay."""


class _Job:
    """What was made since the default group was started."""

    def __init__(self, default: dist.ProcessGroup) -> None:
        self.default = weakref.ref(default)
        self.made: list[_Made] = []
        self.turns = 0
        """Jobs and pipelines that began since unused groups were last looked for."""


_job: _Job | None = None


def _current() -> _Job:
    global _job  # noqa: PLW0603 (torch has one default group per process)
    default = dist.group.WORLD
    assert default is not None
    if _job is None or _job.default() is not default:
        _job = _Job(default)
    return _job


def make_process_group(
    ranks: tuple[int, ...], *, backend: str, timeout_seconds: float, user: object, of_model: bool
) -> dist.ProcessGroup | None:
    """A new group of these ranks; torch's mark for "not in it" on the others. *Collective* over the world.

    Args:
        user: as long as it lives on any rank, the group stays.
    """
    group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_seconds), backend=backend)
    _current().made.append(_Made(weakref.ref(user), group, of_model))
    return group


def connect(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Make the communicator of a group of NCCL's. *Collective* over the group.

    It would be made by the first collective, which keeps the host until every rank of the group has come to its own: in
    the middle of a step, where ranks meet in groups over several axes, they may wait for each other in a ring.
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def end_unused_groups(world: Group, *, of_models: bool = False) -> None:
    """End the groups whose users are gone on all ranks, on all of them in one order. *Collective* over the world.

    Called at the beginning of each job and pipeline, and done at each `TURNS`th: a full garbage collection goes through
    all objects of the process, 0.2 s of computing on every rank where some large libraries are imported.

    Args:
        of_models: only if there are any that were made for a model: a job's others live as long as the job.
    """
    job = _current()
    if not any(made.of_model or not of_models for made in job.made):
        return
    job.turns += 1
    if job.turns < TURNS:
        return
    job.turns = 0
    forget_history()  # what it names would live on for a message
    with held_by_others():
        gc.collect()  # a wrapped model is full of cycles
    alive = all_gather_object([made.user() is not None for made in job.made], group=world)
    if len({len(flags) for flags in alive}) > 1:
        return  # a rank failed between two groups: nobody knows any more which are whose
    kept = [any(flags) for flags in zip(*alive, strict=True)]
    ended = [made.group for made, is_kept in zip(job.made, kept, strict=True) if not is_kept]
    job.made = [made for made, is_kept in zip(job.made, kept, strict=True) if is_kept]
    ours = [group for group in ended if isinstance(group, dist.ProcessGroup)]
    for group in ours:
        dist.destroy_process_group(group)
    forget_groups(ours)
    forget_channels(ours)


def forget_ended_groups() -> None:
    """Let go of all groups of a default group that somebody else has ended: held here, their threads would go on."""
    global _job  # noqa: PLW0603
    if _job is not None and (not dist.is_initialized() or _job.default() is not dist.group.WORLD):
        _job = None
        _forget()
        gc.collect()


def end_default_group() -> None:
    """Leave the default group, and with it all that were made from it."""
    dist.destroy_process_group()
    _forget()


def _forget() -> None:
    forget_calls()
    forget_groups()
    forget_channels()
