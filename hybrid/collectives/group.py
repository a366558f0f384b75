"""The ranks that meet in a collective."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from hybrid.collectives.shared_memory import Neighbour

__all__ = ["Group"]


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Group:
    """Some ranks of the world, in the order in which sums are taken, as one of them sees it.

    A group of one rank has no process group: every collective on it is a no-op. Nor has one of a dry run (`dry.py`).
    """

    process_group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    rank: int
    """Index of this process in `ranks`."""
    axis: str
    """Label for traces and messages: "dp_shard", "dp_replicate+dp_shard", "world"."""
    backend: str = "gloo"
    timeout_seconds: float = 1800.0
    near: Mapping[int, Neighbour] = field(default_factory=dict, repr=False, compare=False)
    """The memory of all others by group index, where all ranks of the group share a host (see `shared_memory`)."""
    sequence: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)
    """Numbers the collectives launched on this group; the ranks compare it (see `exchange`)."""
    number: int = field(default_factory=itertools.count(1).__next__, repr=False, compare=False)
    """By which operations of torch's registry know this group; of this process alone."""
    keeps: object = field(default=None, repr=False, compare=False)
    """The user of its process group, which lives as long as this: logits that are not gathered yet outlive a model."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < len(self.ranks), (self.rank, self.ranks)
        assert (self.process_group is None) == (len(self.ranks) == 1 or self.backend == "dry"), self

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def peers(self) -> tuple[int, ...]:
        """Group indices of the others, nearest successor first, so that no rank is everybody's first target."""
        return tuple((self.rank + distance) % self.size for distance in range(1, self.size))
