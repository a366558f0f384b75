"""Whether the ranks that gather parameters together gathered the same ones, in the same order (stage 3).

On gloo each message says what it belongs to, and a wrong pair is an error at once. NCCL pairs whatever is launched:
two gathers of one size from different blocks would mix weights without a word. So each rank keeps a digest of what it
gathered since the last agreement, and the all-reduce that agrees on gradients before each step carries it along.
"""

from __future__ import annotations

import zlib
from collections import deque

from hybrid.collectives import ops

__all__ = ["GatherOrder"]

_BITS = 20  # digest × weight × ranks stays below 2^53, where float64 is exact, up to 8192 ranks
_KEPT = 4096


class GatherOrder:
    """What one rank has gathered. `group`: the ranks that gather together."""

    def __init__(self, group: ops.Group) -> None:
        self._group = group
        self._digest = 0
        self._count = 0
        self._last: deque[int] = deque(maxlen=_KEPT)

    def note(self, index: int) -> None:
        """A gather of the bucket of this index begins."""
        self._digest = zlib.crc32(b"%d," % index, self._digest)
        self._count += 1
        self._last.append(index)

    def term(self) -> float:
        """A whole number; those of all ranks add up to 0 if the ranks of every group gathered alike.

        The weights of a group's ranks add up to 0, and so do the terms if their digests are one number. Unequal ones
        do so by an accident of one in a million. In a dry run nobody else is there to gather otherwise.
        """
        if self._group.backend == "dry":
            return 0.0
        weights = [zlib.crc32(b"%d" % rank) >> 32 - _BITS for rank in self._group.ranks]
        weights[-1] = -sum(weights[:-1])
        return float(weights[self._group.rank] * (self._digest >> 32 - _BITS))

    def forget(self) -> None:
        """The ranks have agreed, or begin anew."""
        self._digest = self._count = 0
        self._last.clear()

    def difference(self) -> tuple[int, dict[int, int | None]] | None:
        """Where the ranks of this group part. *Collective* over the group.

        Returns:
            (number of gathers that are alike before, rank -> bucket index or None for no more gathers), or None where
            this group is alike, or parted longer ago than is kept.
        """
        everyone = ops.all_gather_object((self._count, list(self._last)), group=self._group)
        first_kept = max(count - len(last) for count, last in everyone)
        for number in range(first_kept, max(count for count, _ in everyone)):
            found: dict[int, int | None] = {}
            for rank, (count, last) in zip(self._group.ranks, everyone, strict=True):
                place = number - (count - len(last))
                found[rank] = last[place] if place < len(last) else None
            if len(set(found.values())) > 1:
                return number, found
        return None
