"""The buckets of a chunk, as the runtime lays them out: planned once, cut for any number of ranks that share them.

A chunk with more than `EXACT_PARAMETERS` parameters is one bucket of each kind instead: then padding is low by at most
128 bytes for each rank of the shard group and bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import sub
from typing import NamedTuple

from hybrid.contracts.partition import BucketPartition, partition_bucket, plan_buckets, shard_elements
from hybrid.planner.job import Candidate, Job

__all__ = ["EXACT_PARAMETERS", "Bucket", "BucketTable", "Entry", "Planning", "largest_run", "num_shards"]

EXACT_PARAMETERS = 4096


def num_shards(candidate: Candidate) -> tuple[int, int]:
    """Ranks over which the state of (ordinary parameters, experts) is cut; 1 at stage 0."""
    if candidate.zero_stage == 0:
        return 1, 1
    ranks = candidate.dp_shard * candidate.cp
    return ranks, max(1, ranks // candidate.ep)


class Entry(NamedTuple):
    """One parameter of a chunk: in which unit, under which key of a bucket, how much of it is here.

    `unit`: place of its unit in the order of registration; `turn`: in the order of the calls in a forward.
    `tp_ranks`: that have each a part of its gradient; `is_norm`: see `ParameterSpec`, where `Precision.norm` is given;
    `is_lent`: another chunk of the rank uses it too; `is_summed`: not only the ranks that cut it have parts of its
    gradient, tp ranks or other stages do.
    """

    unit: int
    turn: int
    is_around: bool
    elements: int
    key: tuple[object, ...]
    is_expert: bool
    trainable: bool
    tp_ranks: int = 1
    is_norm: bool = False
    is_lent: bool = False
    is_summed: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class PlannedBucket:
    """A bucket before it is cut: all that does not depend on how many ranks share it.

    Args:
        sizes: elements of each parameter, in the order of the buffer.
        shape: number of the first bucket of the table with the same sizes.
        turns: of the units in which its parameters are, in the order of the calls.
    """

    sizes: tuple[int, ...]
    shape: int
    elements: int
    turns: tuple[int, ...]
    is_around: bool
    is_expert: bool
    tp_ranks: int = 1
    is_norm: bool = False
    is_lent: bool = False
    is_summed: bool = False


@dataclass(frozen=True, slots=True)
class Planning:
    """The buckets of a chunk, trained and frozen ones apart, in launch order."""

    trained: tuple[PlannedBucket, ...]
    frozen: tuple[PlannedBucket, ...]
    num_trained: int
    frozen_elements: int

    @property
    def of_all(self) -> tuple[PlannedBucket, ...]:
        return self.trained + self.frozen


@dataclass(slots=True)  # frozen ones take three times as long to make, and a search makes hundreds of thousands
class Bucket:
    """Elements: of the whole buffer, of the own shard, of the parameters' parts in that shard."""

    planned: PlannedBucket
    num_shards: int
    whole: int
    own: int
    owned: int
    slices: int


class BucketTable:
    """Of one model under one precision and optimizer; remembers what the shards of equal buckets have."""

    def __init__(self, job: Job) -> None:
        self._precision = job.precision
        self._is_element_wise = job.optimizer.is_element_wise
        self._bucket_bytes = job.bucket_bytes
        self._prefetch = job.prefetch
        self._shapes: dict[tuple[int, ...], int] = {}
        self._own: dict[tuple[int, int, int], int] = {}

    def plan(self, entries: Sequence[Entry], *, is_split: bool) -> Planning:
        trained = [entry for entry in entries if entry.trainable]
        frozen = [entry for entry in entries if not entry.trainable]
        return Planning(
            trained=self._planned(trained, is_split=is_split),
            frozen=self._planned(frozen, is_split=is_split) if is_split else (),
            num_trained=len(trained),
            frozen_elements=sum(entry.elements for entry in frozen),
        )

    def _planned(self, entries: Sequence[Entry], *, is_split: bool) -> tuple[PlannedBucket, ...]:
        """In launch order, as `sharding/plan.py` makes them."""
        groups: dict[tuple[object, ...], list[tuple[int, Entry]]] = {}
        for index, entry in enumerate(entries):
            groups.setdefault((entry.key, is_split and entry.is_around), []).append((index, entry))
        found: list[list[tuple[int, Entry]]] = []
        is_exact = len(entries) <= EXACT_PARAMETERS
        for members in groups.values():
            if not is_exact:
                found.append(members[::-1])
                continue
            by_unit: dict[int, list[tuple[str, int]]] = {}
            for index, entry in reversed(members):
                width = self._precision.norm if entry.is_norm else self._precision.parameter
                by_unit.setdefault(entry.unit, []).append((str(index), entry.elements * width))
            units = [tuple(sizes) for sizes in by_unit.values()]
            for names in plan_buckets(units, bucket_bytes=self._bucket_bytes):
                found.append([(int(name), entries[int(name)]) for name in names])
        found.sort(key=lambda members: -min(index for index, _ in members))
        return tuple(self._bucket_of([entry for _, entry in members]) for members in found)

    def _bucket_of(self, members: Sequence[Entry]) -> PlannedBucket:
        sizes = tuple(entry.elements for entry in members)
        return PlannedBucket(
            sizes=sizes,
            shape=self._shapes.setdefault(sizes, len(self._shapes)),
            elements=sum(sizes),
            turns=tuple(sorted({entry.turn for entry in members})),
            is_around=members[0].is_around,
            is_expert=members[0].is_expert,
            tp_ranks=members[0].tp_ranks,
            is_norm=members[0].is_norm,
            is_lent=any(entry.is_lent for entry in members),
            is_summed=members[0].is_summed,
        )

    def cut(self, planned: Sequence[PlannedBucket], candidate: Candidate, shard: int | None) -> list[Bucket]:
        """Each bucket with the part of one rank."""
        precision = self._precision
        shards, expert_shards = num_shards(candidate)
        is_whole = not self._is_element_wise and candidate.zero_stage in {1, 2}
        loads: dict[int, list[int]] = {}
        ordinary_bytes = min(precision.parameter, precision.gradient)
        buckets = []
        for one in planned:
            ranks = expert_shards if one.is_expert else shards
            element_bytes = precision.norm if one.is_norm else ordinary_bytes
            if shard is None and not is_whole:
                own = self._own.get((one.shape, ranks, element_bytes))
                if own is None:
                    own = shard_elements(one.sizes, num_shards=ranks, element_bytes=element_bytes)
                    self._own[one.shape, ranks, element_bytes] = own
                buckets.append(Bucket(one, ranks, own * ranks, own, own, len(one.sizes)))
                continue
            partition = partition_bucket(
                [(str(place), size) for place, size in enumerate(one.sizes)],
                num_shards=ranks,
                element_bytes=element_bytes,
                kind="parameter" if is_whole else "element",
                loads=loads.setdefault(ranks, [0] * ranks) if is_whole else None,
            )
            place = _fullest(partition) if shard is None else shard % ranks
            own = partition.bounds[place + 1] - partition.bounds[place]
            parts = partition.slices(place)
            owned = sum(part.num_elements for part in parts)
            buckets.append(Bucket(one, ranks, partition.num_elements, own, owned, len(parts)))
        return buckets

    def most_gathered(self, buckets: Sequence[Bucket]) -> int:
        """Bytes: what lies around the units, and units in a row: one that computes, those fetched ahead of it.

        The unit before is freed when the next one has come, so two are whole even where nothing is fetched ahead. A
        backward keeps a bucket until the first of the units in it has come, and one that another chunk borrows to its
        end.
        """
        around = sum(self._bytes(bucket) for bucket in buckets if bucket.planned.is_around or bucket.planned.is_lent)
        inside = [bucket for bucket in buckets if not (bucket.planned.is_around or bucket.planned.is_lent)]
        place = _places(inside)
        ahead = max(1, self._prefetch)
        if all(len(bucket.planned.turns) == 1 for bucket in inside):
            sizes = [0] * len(place)
            for bucket in inside:
                sizes[place[bucket.planned.turns[0]]] += self._bytes(bucket)
            return around + largest_run(sizes, 1 + ahead)
        changes = [0] * (len(place) + 1)
        for bucket in inside:
            first, last = place[bucket.planned.turns[0]], place[bucket.planned.turns[-1]]
            changes[first] += self._bytes(bucket)
            changes[min(last + ahead + 1, len(place))] -= self._bytes(bucket)
        return around + max(accumulate(changes))

    def gathered_again(self, buckets: Sequence[Bucket]) -> int:
        """Bytes that a forward gathers more than once: of buckets with units that do not stand in a row.

        Such a bucket is freed by a unit between them, unless it is fetched ahead already for the next one in it.
        """
        inside = [bucket for bucket in buckets if not bucket.planned.is_around]
        shared = [bucket for bucket in inside if len(bucket.planned.turns) > 1]
        if not shared:
            return 0
        place = _places(inside)
        ahead = max(1, self._prefetch)
        found = 0
        for bucket in shared:
            places = [place[turn] for turn in bucket.planned.turns]
            found += self._bytes(bucket) * sum(after - before > ahead for before, after in pairwise(places))
        return found

    def _bytes(self, bucket: Bucket) -> int:
        return bucket.whole * (self._precision.norm if bucket.planned.is_norm else self._precision.parameter)


def _places(buckets: Sequence[Bucket]) -> dict[int, int]:
    """Turn -> its place among those of units that have something in these buckets."""
    return {turn: at for at, turn in enumerate(sorted({turn for one in buckets for turn in one.planned.turns}))}


def _fullest(partition: BucketPartition) -> int:
    """The shard with most elements."""
    bounds = partition.bounds
    return max(range(partition.num_shards), key=lambda place: bounds[place + 1] - bounds[place])


def largest_run(sizes: Sequence[int], length: int) -> int:
    """The largest sum of so many neighbours."""
    sums = list(accumulate(sizes, initial=0))
    return max(map(sub, sums[length:], sums), default=sums[-1])
