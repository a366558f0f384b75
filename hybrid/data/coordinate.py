"""Where this process stands among the data-parallel replicas.

The samplers live on a lower floor than the mesh of a running job, so they do not look it up themselves: the
floor that starts a job registers, once, a function that tells the coordinate. Ranks that compute parts of the
same sample (tensor, pipeline and context ranks) share one coordinate and therefore read the same batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hybrid.errors import BatchError

__all__ = ["DataCoordinate", "current_coordinate", "replica", "set_coordinate_provider"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCoordinate:
    """One of `num_replicas` readers of the data set."""

    num_replicas: int
    rank: int


# The one registered function. None (the function or its answer) means that no job has been started here yet.
_provider: Callable[[], DataCoordinate | None] | None = None


def set_coordinate_provider(provider: Callable[[], DataCoordinate | None] | None) -> None:
    """Register the function that tells this process's data-parallel coordinate (None: forget it)."""
    global _provider  # noqa: PLW0603 (one process is in one job)
    _provider = provider


def replica(what: str, num_replicas: int | None, rank: int | None, *, checks_rank: bool = True) -> DataCoordinate:
    """The coordinate that was given to `what`, or that of the running job.

    Raises:
        BatchError: half of one was given, or none and no job runs yet; with `checks_rank`, one that cannot be.
    """
    if num_replicas is None and rank is None:
        return current_coordinate(what=what)
    if num_replicas is None or rank is None:
        raise BatchError(
            f"{what}: num_replicas is {num_replicas} and rank is {rank}; give both, or neither to take them from the "
            "running job"
        )
    if checks_rank and not 0 <= rank < num_replicas:
        raise BatchError(f"{what}: rank is {rank}; expected 0..{num_replicas - 1} of {num_replicas} replicas")
    return DataCoordinate(num_replicas=num_replicas, rank=rank)


def current_coordinate(
    environ: Mapping[str, str] | None = None, *, what: str = "DistributedBatchSampler"
) -> DataCoordinate:
    """The coordinate of the running job; a process that nobody launched is the only replica.

    Raises BatchError in a launched process whose job has not started yet: the number of processes alone does
    not say how many of them read different samples, and a guess would train on repeated data in silence.
    """
    coordinate = _provider() if _provider is not None else None
    if coordinate is not None:
        return coordinate
    world_size = (os.environ if environ is None else environ).get("WORLD_SIZE", "1").strip()
    if world_size == "1":
        return DataCoordinate(num_replicas=1, rank=0)
    raise BatchError(
        f"{what}: WORLD_SIZE is {world_size} but hybrid has not started in this process, so "
        "the number of data-parallel replicas is not known yet; call it after "
        "hybrid.distributed_model(...) or hybrid.init(...), or give num_replicas= and rank="
    )
