"""Whether a layout fits into a device's memory, at the risk that a request accepts."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.planner.job import Candidate
from hybrid.planner.memory import MemoryPlan
from hybrid.planner.memory_layers import Interval, device_bytes, num_communicators, reserved_bytes
from hybrid.planner.request import Request

__all__ = ["Fit", "Room", "fit_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a candidate fits into a device.

    Args:
        needed_bytes: what it takes at the accepted risk.
        limit_bytes: what there is.
        chance_of_running_out: between 0 and 1.
    """

    needed_bytes: float
    limit_bytes: float
    chance_of_running_out: float
    fits: bool

    @property
    def over_bytes(self) -> float:
        """Beyond the limit; negative where there is room."""
        return self.needed_bytes - self.limit_bytes


def fit_of(request: Request, plan: MemoryPlan) -> Fit:
    """Of the worst pipeline rank, at the risk that the request accepts."""
    limit, worst = request.limit_bytes, plan.worst
    chance = worst.chance_of_running_out(limit)
    needed = worst.bytes_at_risk(request.risk)  # the device of which the chance is the accepted one
    return Fit(needed_bytes=needed, limit_bytes=limit, chance_of_running_out=chance, fits=chance <= request.risk)


class Room:
    """What `fit_of` says, from the bytes of live tensors alone: a search asks it of every layout."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._most: dict[int, int] = {}

    def most_bytes(self, candidate: Candidate) -> int:
        """The most bytes of tensors with which the candidate fits; -1 where none do."""
        groups = num_communicators(candidate)
        if groups not in self._most:
            fitting, too_many = -1, 1
            while self._fits(too_many, groups):
                fitting, too_many = too_many, 2 * too_many
            while too_many - fitting > 1:
                middle = (fitting + too_many) // 2
                fitting, too_many = (middle, too_many) if self._fits(middle, groups) else (fitting, middle)
            self._most[groups] = fitting
        return self._most[groups]

    def over_bytes(self, tensors_bytes: float, candidate: Candidate) -> float:
        """What is missing for so many bytes of tensors, as `Fit.over_bytes`."""
        needed = self._device(tensors_bytes, num_communicators(candidate))
        return needed.at_risk(self._request.risk) - self._request.limit_bytes

    def _fits(self, tensors_bytes: float, groups: int) -> bool:
        return self._device(tensors_bytes, groups).chance_above(self._request.limit_bytes) <= self._request.risk

    def _device(self, tensors_bytes: float, groups: int) -> Interval:
        job = self._request.job
        is_processor = job.cluster.device.is_processor
        reserved = reserved_bytes(tensors_bytes, is_processor=is_processor)
        return device_bytes(reserved, groups, is_processor=is_processor, context=job.context_bytes)
