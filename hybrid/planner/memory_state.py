"""Bytes of parameters, gradients and optimizer state on one rank, bucket by bucket as the runtime lays them out.

The buckets come from the functions that the runtime cuts by (`plan_buckets` and `partition_bucket`), so padding is that
of a real run. A chunk with more than `EXACT_PARAMETERS` parameters is one bucket of each kind instead: then padding is
low by at most 128 bytes for each rank of the shard group and bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from hybrid.contracts.partition import BucketPartition, partition_bucket, plan_buckets, shard_elements
from hybrid.planner.job import Candidate, Job
from hybrid.planner.model_spec import ModelSpec, ParameterSpec

__all__ = ["EXACT_PARAMETERS", "StateBytes", "StateTable", "num_shards"]

EXACT_PARAMETERS = 4096

# Optimizers with a step counter (4 bytes) for each parameter.
_COUNTING = frozenset({"Adam", "AdamW", "NAdam", "RAdam"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Of one rank, or of one of its chunks; `+` joins the chunks of a rank.

    Args:
        parameters: the copy that computes, whole at stages 0 to 2, own shards at stage 3.
        gradients: whole buffers of all that is trained.
        two_buckets: the largest two neighbouring gradient buffers: what stages 2 and 3 hold at a time.
        six_buckets: the largest six: what stages 0 and 1 have under way where they reduce as backward goes.
        gradient_shards: what remains of them after the reduction.
        masters, optimizer_state: as they are.
        gathered: stage 3: the most that is whole at a time.
        gathered_run: stage 3: all of it.
        bookkeeping: positions of padding (8 bytes each), an element that stands for each gradient, step counters.
        own_elements: trained elements of the own shards, padding included.
    """

    parameters: int = 0
    gradients: int = 0
    two_buckets: int = 0
    six_buckets: int = 0
    gradient_shards: int = 0
    masters: int = 0
    optimizer_state: int = 0
    gathered: int = 0
    gathered_run: int = 0
    bookkeeping: int = 0
    own_elements: int = 0

    @property
    def offloaded(self) -> int:
        """What an offloaded optimizer takes off the device."""
        return self.masters + self.optimizer_state + self.gradient_shards

    def __add__(self, other: StateBytes) -> StateBytes:
        # Chunks of a rank work in turn: what is there for a moment is there for one of them.
        values = {}
        for one in fields(self):
            mine, its = getattr(self, one.name), getattr(other, one.name)
            values[one.name] = max(mine, its) if one.name in _IN_TURN else mine + its
        return StateBytes(**values)


_IN_TURN = frozenset({"two_buckets", "six_buckets", "gathered", "gathered_run"})


def num_shards(candidate: Candidate) -> tuple[int, int]:
    """Ranks over which the state of (ordinary parameters, experts) is cut; 1 at stage 0."""
    if candidate.zero_stage == 0:
        return 1, 1
    ranks = candidate.dp_shard * candidate.cp
    return ranks, max(1, ranks // candidate.ep)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One parameter of a chunk: in which unit, under which key of a bucket, how much of it is here."""

    unit: int
    is_around: bool
    elements: int
    key: tuple[object, ...]
    is_expert: bool
    trainable: bool


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Elements: of its parameters, of the whole buffer, of the own shard, of the parameters' parts in that shard."""

    entries: tuple[_Entry, ...]
    num_shards: int
    whole: int
    own: int
    owned: int
    slices: int

    @property
    def padding(self) -> int:
        return self.whole - sum(entry.elements for entry in self.entries)


class StateTable:
    """Answers for one model under one precision and optimizer; remembers them by what they depend on."""

    def __init__(self, job: Job) -> None:
        self._model: ModelSpec = job.model
        self._precision = job.precision
        self._optimizer = job.optimizer
        self._bucket_bytes = job.bucket_bytes
        self._prefetch = job.prefetch
        self._known: dict[tuple[object, ...], StateBytes] = {}
        self._ranks: dict[tuple[object, ...], tuple[StateBytes, ...]] = {}

    def of_ranks(self, chunks: tuple[range, ...], candidate: Candidate, shard: int | None) -> tuple[StateBytes, ...]:
        """Bytes on the ranks of each pipeline rank.

        Args:
            chunks: the units of each chunk of the model.
            shard: of one place in the shard group; None: of the largest.
        """
        key = (chunks, candidate.pp, *_cutting(candidate), shard)
        if key not in self._ranks:
            self._ranks[key] = tuple(self._of_rank(chunks, rank, candidate, shard) for rank in range(candidate.pp))
        return self._ranks[key]

    def _of_rank(self, chunks: Sequence[range], pp_rank: int, candidate: Candidate, shard: int | None) -> StateBytes:
        mine = chunks[pp_rank :: candidate.pp]
        skipped, shared = self._tied(mine, chunks)
        total = None
        for chunk in mine:
            one = self._of_chunk(chunk, skipped, shared, candidate, shard)
            total = one if total is None else total + one
        assert total is not None
        return total

    def _of_chunk(
        self,
        chunk: range,
        skipped: frozenset[tuple[int, int]],
        shared: frozenset[tuple[int, int]],
        candidate: Candidate,
        shard: int | None,
    ) -> StateBytes:
        # Chunks that look alike cost alike, wherever they are.
        looks = self._model.look_indices[chunk.start : chunk.stop]
        special = tuple(
            (at - chunk.start, index, (at, index) in skipped) for at, index in (*skipped, *shared) if at in chunk
        )
        key = (looks, special, candidate.pp > 1, *_cutting(candidate), shard)
        if key not in self._known:
            entries = list(self._entries(chunk, skipped, shared, candidate))
            self._known[key] = self._count(entries, candidate, shard)
        return self._known[key]

    # -- which parameters --------------------------------------------------------------------------------

    @cached_property
    def _ties(self) -> Mapping[tuple[int, int], tuple[tuple[int, int], ...]]:
        """(unit, parameter) of an owner -> all that hold the same parameter, the owner first."""
        places = {
            f"{unit.name}.{parameter.name}": (at, index)
            for at, unit in enumerate(self._model.units)
            for index, parameter in enumerate(unit.parameters)
        }
        ties: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for at, unit in enumerate(self._model.units):
            for index, parameter in enumerate(unit.parameters):
                owner = places.get(parameter.tied_to or "")
                if owner is not None:
                    ties.setdefault(owner, [owner]).append((at, index))
        return {owner: tuple(sorted(holders)) for owner, holders in ties.items()}

    def _tied(
        self, mine: Sequence[range], chunks: Sequence[range]
    ) -> tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]:
        """Of the tied parameters of a rank: those that it holds at another place already, those that others hold."""
        skipped: set[tuple[int, int]] = set()
        shared: set[tuple[int, int]] = set()
        for holders in self._ties.values():
            here = [place for place in holders if any(place[0] in chunk for chunk in mine)]
            skipped.update(here[1:])
            if here and len(here) < len(holders):
                shared.add(here[0])
        return frozenset(skipped), frozenset(shared)

    def _entries(
        self,
        chunk: range,
        skipped: frozenset[tuple[int, int]],
        shared: frozenset[tuple[int, int]],
        candidate: Candidate,
    ) -> Iterable[_Entry]:
        place, was_around = -1, False
        for at in chunk:
            unit = self._model.units[at]
            # Without a pipeline what lies between blocks forms one unit; with one, every layer is a unit.
            is_around = candidate.pp == 1 and unit.kind != "block"
            if not (is_around and was_around):
                place += 1
            was_around = is_around
            for index, parameter in enumerate(unit.parameters):
                if (at, index) in skipped:
                    continue
                yield _Entry(
                    place,
                    is_around,
                    parameter.local_elements(candidate.tp, ep=candidate.ep),
                    (at, index) if (at, index) in shared else _key(parameter, candidate),
                    parameter.is_expert,
                    parameter.trainable,
                )

    # -- bytes --------------------------------------------------------------------------------------------

    def _count(self, entries: Sequence[_Entry], candidate: Candidate, shard: int | None) -> StateBytes:
        precision, optimizer = self._precision, self._optimizer
        trained = [entry for entry in entries if entry.trainable]
        frozen = [entry for entry in entries if not entry.trainable]
        buckets = self._buckets(trained, candidate, shard)
        own = sum(bucket.own for bucket in buckets)
        padding = sum(bucket.padding for bucket in buckets)
        whole = sum(bucket.whole for bucket in buckets)
        parameters = (whole + sum(entry.elements for entry in frozen)) * precision.parameter
        gathered = gathered_run = 0
        if candidate.zero_stage == 3:
            frozen_buckets = self._buckets(frozen, candidate, shard)
            padding += sum(bucket.padding for bucket in frozen_buckets)
            everything = [*buckets, *frozen_buckets]
            cut = [bucket for bucket in everything if bucket.num_shards > 1]
            # Where nobody shares the state there is nothing to gather, and no shard beside the whole.
            parameters = sum(b.own if b.num_shards > 1 else b.whole for b in everything) * precision.parameter
            gathered = self._most_gathered(cut) * precision.parameter
            gathered_run = sum(bucket.whole for bucket in cut) * precision.parameter
        slices = sum(bucket.slices for bucket in buckets)
        counters = 4 * slices if optimizer.name in _COUNTING else 0
        gradients = [bucket.whole * precision.gradient for bucket in buckets]
        return StateBytes(
            parameters=parameters,
            gradients=sum(gradients),
            two_buckets=_largest_run(gradients, 2),
            six_buckets=_largest_run(gradients, 6),
            gradient_shards=own * precision.gradient,
            masters=own * precision.master,
            optimizer_state=sum(bucket.owned for bucket in buckets) * optimizer.state,
            gathered=gathered,
            gathered_run=gathered_run,
            bookkeeping=8 * padding + precision.parameter * len(trained) + counters,
            own_elements=own,
        )

    def _buckets(self, entries: Sequence[_Entry], candidate: Candidate, shard: int | None) -> list[_Bucket]:
        """In launch order, as `sharding/plan.py` makes them."""
        precision = self._precision
        shards, expert_shards = num_shards(candidate)
        is_split = candidate.zero_stage == 3
        groups: dict[tuple[object, ...], list[tuple[int, _Entry]]] = {}
        for index, entry in enumerate(entries):
            groups.setdefault((entry.key, is_split and entry.is_around), []).append((index, entry))
        planned: list[list[tuple[int, _Entry]]] = []
        is_exact = len(entries) <= EXACT_PARAMETERS
        for members in groups.values():
            if not is_exact:
                planned.append(members[::-1])
                continue
            by_unit: dict[int, list[tuple[str, int]]] = {}
            for index, entry in reversed(members):
                by_unit.setdefault(entry.unit, []).append((str(index), entry.elements * precision.parameter))
            units = [tuple(sizes) for sizes in by_unit.values()]
            for names in plan_buckets(units, bucket_bytes=self._bucket_bytes):
                planned.append([(int(name), entries[int(name)]) for name in names])
        planned.sort(key=lambda members: -min(index for index, _ in members))
        is_whole = not self._optimizer.is_element_wise and candidate.zero_stage in {1, 2}
        loads: dict[int, list[int]] = {}
        element_bytes = min(precision.parameter, precision.gradient)
        buckets = []
        for members in planned:
            ranks = expert_shards if members[0][1].is_expert else shards
            there = tuple(entry for _, entry in members)
            if shard is None and not is_whole:
                sizes = [entry.elements for entry in there]
                own = shard_elements(sizes, num_shards=ranks, element_bytes=element_bytes)
                buckets.append(_Bucket(there, ranks, own * ranks, own, own, len(there)))
                continue
            partition = partition_bucket(
                [(str(index), entry.elements) for index, entry in members],
                num_shards=ranks,
                element_bytes=element_bytes,
                kind="parameter" if is_whole else "element",
                loads=loads.setdefault(ranks, [0] * ranks) if is_whole else None,
            )
            place = _fullest(partition) if shard is None else shard % ranks
            own = partition.bounds[place + 1] - partition.bounds[place]
            parts = partition.slices(place)
            owned = sum(part.num_elements for part in parts)
            buckets.append(_Bucket(there, ranks, partition.num_elements, own, owned, len(parts)))
        return buckets

    def _most_gathered(self, buckets: Sequence[_Bucket]) -> int:
        """Elements: what lies around the units, and units in a row: one that computes, those fetched ahead of it.

        The unit before is freed when the next one has come, so two are whole even where nothing is fetched ahead.
        """
        around = sum(bucket.whole for bucket in buckets if bucket.entries[0].is_around)
        inside = [bucket for bucket in buckets if not bucket.entries[0].is_around]
        units = sorted({entry.unit for bucket in inside for entry in bucket.entries})
        holds: dict[int, list[int]] = {unit: [] for unit in units}
        for index, bucket in enumerate(inside):
            for unit in {entry.unit for entry in bucket.entries}:
                holds[unit].append(index)
        window = max(2, 1 + self._prefetch)
        most = 0
        for start in range(max(1, len(units) - window + 1)):
            there = {index for unit in units[start : start + window] for index in holds[unit]}
            most = max(most, sum(inside[index].whole for index in there))
        return around + most


def _cutting(candidate: Candidate) -> tuple[object, ...]:
    """All that decides how a chunk's parameters are cut and gathered."""
    return (
        candidate.tp, candidate.ep, candidate.tp > 1 and candidate.sequence_parallel, num_shards(candidate),
        candidate.zero_stage == 3, candidate.zero_stage > 0,
    )  # fmt: skip


def _key(parameter: ParameterSpec, candidate: Candidate) -> tuple[object, ...]:
    """What parameters of one bucket share: over which ranks their gradients are summed, which ranks hold copies."""
    if parameter.is_expert:
        return ("expert",)
    if candidate.tp == 1:
        return ()
    if parameter.cut_dim is None:
        return ("whole", candidate.sequence_parallel)
    copies = candidate.tp // parameter.min_parts if 0 < parameter.min_parts < candidate.tp else 1
    return ("cut", copies)


def _fullest(partition: BucketPartition) -> int:
    """The shard with most elements."""
    bounds = partition.bounds
    return max(range(partition.num_shards), key=lambda place: bounds[place + 1] - bounds[place])


def _largest_run(sizes: Sequence[int], length: int) -> int:
    """The largest sum of so many neighbours."""
    return max((sum(sizes[start : start + length]) for start in range(len(sizes))), default=0)
