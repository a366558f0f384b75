"""Which element range of which parameter lies in which rank's shard of a bucket.

A bucket is one flat buffer. Each parameter starts at a multiple of `ALIGNMENT_BYTES` (in a small bucket of
`SMALL_ALIGNMENT_BYTES`, else gaps would be most of it and leave ranks without a share); the buffer is cut into one
contiguous range per rank of the shard group. Two kinds of cut exist:

    element     equal ranges, wherever they fall:    |--a--|---b---|-c-|..|
                                                     |  rank 0  |  rank 1 |
    parameter   whole parameters, balanced by size:  |---b---|..|--a--|-c-|.|
                                                     | rank 0   | rank 1    |

Positions count elements in the order in which they lie in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "ALIGNMENT_BYTES",
    "SMALL_ALIGNMENT_BYTES",
    "BucketPartition",
    "Entry",
    "PartitionKind",
    "Slice",
    "alignment_bytes",
    "partition_bucket",
    "plan_buckets",
    "shard_elements",
]

ALIGNMENT_BYTES = 128
SMALL_ALIGNMENT_BYTES = 16

PartitionKind = Literal["element", "parameter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One parameter's place in a bucket."""

    fqn: str
    offset_elements: int
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Part `[start, stop)` of a parameter's elements, found at `offset_elements` of the bucket."""

    fqn: str
    start: int
    stop: int
    offset_elements: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPartition:
    """The layout of one bucket and its cut into shards; equal on all ranks of the shard group."""

    kind: PartitionKind
    entries: tuple[Entry, ...]
    bounds: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Length of the buffer, padding included."""
        return self.bounds[-1]

    @property
    def num_shards(self) -> int:
        return len(self.bounds) - 1

    @property
    def padding_elements(self) -> int:
        return self.num_elements - sum(entry.num_elements for entry in self.entries)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the buffer that belong to no parameter."""
        found = []
        position = 0
        for entry in sorted(self.entries, key=lambda entry: entry.offset_elements):
            if entry.offset_elements > position:
                found.append((position, entry.offset_elements))
            position = max(position, entry.offset_elements + entry.num_elements)
        if position < self.num_elements:
            found.append((position, self.num_elements))
        return tuple(found)

    def slices(self, shard: int) -> tuple[Slice, ...]:
        """What the shard with this index holds, in the order of the buffer, without parameters it does not touch."""
        low, high = self.bounds[shard], self.bounds[shard + 1]
        found = []
        for entry in self.entries:
            begin = max(low, entry.offset_elements)
            end = min(high, entry.offset_elements + entry.num_elements)
            if begin < end:
                found.append(
                    Slice(
                        fqn=entry.fqn,
                        start=begin - entry.offset_elements,
                        stop=end - entry.offset_elements,
                        offset_elements=begin,
                    )
                )
        return tuple(found)


def partition_bucket(
    sizes: Sequence[tuple[str, int]],
    *,
    num_shards: int,
    element_bytes: int,
    kind: PartitionKind = "element",
    loads: list[int] | None = None,
    planned: Sequence[int] | None = None,
) -> BucketPartition:
    """Lay parameters out in one bucket and cut it.

    Args:
        sizes: (fqn, number of elements) in the order in which they should lie in the bucket.
        num_shards: ranks of the shard group.
        element_bytes: bytes of one element; sets the alignment.
        kind: `"element"` or `"parameter"`.
        loads: elements that each shard already owns in other buckets; used by and updated for kind
            `"parameter"`, so that ranks are balanced over all buckets.
        planned: numbers of elements to balance by, where other ranks that sum the same gradients may hold more or less.

    Raises:
        ValueError: num_shards or element_bytes below 1, or an unknown kind.
    """
    if num_shards < 1 or element_bytes < 1:
        raise ValueError(f"num_shards={num_shards} and element_bytes={element_bytes} must be at least 1")
    total_bytes = sum(num_elements for _, num_elements in sizes) * element_bytes
    align = max(1, alignment_bytes(total_bytes, num_shards=num_shards) // element_bytes)
    if kind == "element":
        entries, _ = _lay_out(sizes, start=0, align=align)
        shard = shard_elements([size for _, size in sizes], num_shards=num_shards, element_bytes=element_bytes)
        return BucketPartition(kind=kind, entries=entries, bounds=tuple(shard * i for i in range(num_shards + 1)))
    if kind == "parameter":
        return _partition_whole(sizes, num_shards=num_shards, align=align, loads=loads, planned=planned)
    raise ValueError(f"unknown partition kind {kind!r}; known: 'element', 'parameter'")


def shard_elements(sizes: Sequence[int], *, num_shards: int, element_bytes: int) -> int:
    """Elements of each of the equal shards of a bucket with parameters of these sizes, padding included."""
    align = max(1, alignment_bytes(sum(sizes) * element_bytes, num_shards=num_shards) // element_bytes)
    end = 0
    for num_elements in sizes:
        end = _round_up(end, align) + num_elements
    return _round_up(-(-end // num_shards), align)


def plan_buckets(units: Sequence[tuple[tuple[str, int], ...]], *, bucket_bytes: int) -> tuple[tuple[str, ...], ...]:
    """Merge small units and cut large ones towards `bucket_bytes`.

    Args:
        units: per unit the (fqn, bytes) of its parameters, all of one bucket key, in launch order.
        bucket_bytes: size to aim at; a parameter larger than that has a bucket of its own.

    Returns:
        The fqns of each bucket, in launch order; every fqn once.
    """
    buckets: list[list[str]] = []
    filled_bytes = 0
    for unit in units:
        unit_bytes = sum(size for _, size in unit)
        fits_whole = unit_bytes <= bucket_bytes
        if buckets and fits_whole and filled_bytes + unit_bytes > bucket_bytes:
            buckets.append([])  # start anew: a unit that fits is never cut
            filled_bytes = 0
        for fqn, size in unit:
            if not buckets or filled_bytes + size > bucket_bytes:
                buckets.append([])
                filled_bytes = 0
            buckets[-1].append(fqn)
            filled_bytes += size
    return tuple(tuple(bucket) for bucket in buckets if bucket)


def alignment_bytes(total_bytes: int, *, num_shards: int) -> int:
    """The boundaries in a bucket of so many bytes: wide ones from 2 KiB per shard on."""
    return ALIGNMENT_BYTES if total_bytes >= 16 * ALIGNMENT_BYTES * num_shards else SMALL_ALIGNMENT_BYTES


def _partition_whole(
    sizes: Sequence[tuple[str, int]],
    *,
    num_shards: int,
    align: int,
    loads: list[int] | None,
    planned: Sequence[int] | None,
) -> BucketPartition:
    """Longest first onto the least loaded shard: at most 4/3 of the best balance (Graham 1969, LPT rule)."""
    totals = loads if loads is not None else [0] * num_shards
    weights = [size for _, size in sizes] if planned is None else planned
    owners: list[list[int]] = [[] for _ in range(num_shards)]
    for index in sorted(range(len(sizes)), key=lambda index: -weights[index]):
        shard = min(range(num_shards), key=lambda shard: (totals[shard], shard))
        owners[shard].append(index)
        totals[shard] += weights[index]
    entries: list[Entry] = []
    bounds = [0]
    for owned in owners:
        laid, end = _lay_out([sizes[index] for index in sorted(owned)], start=bounds[-1], align=align)
        entries.extend(laid)
        bounds.append(_round_up(end, align))
    return BucketPartition(kind="parameter", entries=tuple(entries), bounds=tuple(bounds))


def _lay_out(sizes: Sequence[tuple[str, int]], *, start: int, align: int) -> tuple[tuple[Entry, ...], int]:
    entries = []
    position = start
    for fqn, num_elements in sizes:
        position = _round_up(position, align)
        entries.append(Entry(fqn=fqn, offset_elements=position, num_elements=num_elements))
        position += num_elements
    return tuple(entries), position


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
