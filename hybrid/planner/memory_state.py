"""Bytes of parameters, gradients and optimizer state on one rank, bucket by bucket as the runtime lays them out.

The buckets come from the functions that the runtime cuts by (`plan_buckets` and `partition_bucket`), so padding is that
of a real run: `memory_buckets.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hybrid.contracts.chunk_placement import ChunkPlacement, chunks_on
from hybrid.contracts.schedule_choice import schedule_placement
from hybrid.planner.job import Candidate, Job
from hybrid.planner.memory_buckets import EXACT_PARAMETERS, BucketTable, Entry, Planning, largest_run, num_shards
from hybrid.planner.model_spec import ModelSpec, ParameterSpec, UnitSpec

__all__ = ["EXACT_PARAMETERS", "StateBytes", "StateTable", "num_shards"]

# Optimizers with a step counter (4 bytes) for each parameter.
_COUNTING = frozenset({"Adam", "AdamW", "NAdam", "RAdam"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Of one rank, or of one of its chunks.

    Args:
        parameters: the copy that computes, whole at stages 0 to 2, own shards at stage 3.
        gradients: whole buffers of all that is trained.
        two_buckets: the largest two neighbouring gradient buffers: what stages 2 and 3 hold at a time.
        six_buckets: the largest six: what stages 0 and 1 have under way where they reduce as backward goes.
        gradient_shards: what remains of them after the reduction.
        masters, optimizer_state: as they are.
        gathered: stage 3: the most that is whole at a time.
        gathered_run: stage 3: all of it.
        gathered_again: stage 3: what a forward gathers more than once.
        bookkeeping: an element that stands for each gradient, step counters.
        own_elements: trained elements of the own shards, padding included.
        unmastered: bytes of own parameters that have no master.
        apart: of them those that travel in another way: (tp ranks that sum their gradients, whether they are norms of
            another type) -> elements.
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
    gathered_again: int = 0
    bookkeeping: int = 0
    own_elements: int = 0
    unmastered: int = 0
    apart: tuple[tuple[tuple[int, bool], int], ...] = ()

    @staticmethod
    def of_chunks(chunks: Sequence[tuple[StateBytes, int]]) -> StateBytes:
        """Of a rank with so many of these chunks, which work in turn: what is there for a moment is there for one."""
        if len(chunks) == 1 and chunks[0][1] == 1:
            return chunks[0][0]
        return StateBytes(
            parameters=sum(chunk.parameters * count for chunk, count in chunks),
            gradients=sum(chunk.gradients * count for chunk, count in chunks),
            two_buckets=max(chunk.two_buckets for chunk, _ in chunks),
            six_buckets=max(chunk.six_buckets for chunk, _ in chunks),
            gradient_shards=sum(chunk.gradient_shards * count for chunk, count in chunks),
            masters=sum(chunk.masters * count for chunk, count in chunks),
            optimizer_state=sum(chunk.optimizer_state * count for chunk, count in chunks),
            gathered=max(chunk.gathered for chunk, _ in chunks),
            gathered_run=max(chunk.gathered_run for chunk, _ in chunks),
            gathered_again=sum(chunk.gathered_again * count for chunk, count in chunks),
            bookkeeping=sum(chunk.bookkeeping * count for chunk, count in chunks),
            own_elements=sum(chunk.own_elements * count for chunk, count in chunks),
            unmastered=sum(chunk.unmastered * count for chunk, count in chunks),
            apart=tuple(one for chunk, count in chunks for one in chunk.apart * count),
        )


@dataclass(frozen=True, slots=True)
class _ChunkLook:
    """A chunk, with the tied parameters that it leaves out and those that other ranks hold too.

    `key` is equal for chunks that cost alike.
    """

    key: int
    chunk: range
    skipped: frozenset[tuple[int, int]]
    shared: frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Looks:
    """The different ranks of a pipeline, each with how many chunks of a look it has, and which of them each rank is.

    `chunks` is held so that its id stays its own.
    """

    chunks: tuple[range, ...]
    ranks: tuple[tuple[tuple[_ChunkLook, int], ...], ...]
    places: tuple[int, ...]


class StateTable:
    """Answers for one model under one precision and optimizer; remembers them by what they depend on."""

    def __init__(self, job: Job) -> None:
        self._model: ModelSpec = job.model
        self._precision = job.precision
        self._optimizer = job.optimizer
        self._buckets = BucketTable(job)
        self._known: dict[tuple[object, ...], StateBytes] = {}
        self._ranks: dict[tuple[object, ...], tuple[StateBytes, ...]] = {}
        self._looks: dict[tuple[int, int, ChunkPlacement], _Looks] = {}
        self._plannings: dict[tuple[object, ...], Planning] = {}
        self._chunk_keys: dict[tuple[object, ...], int] = {}

    def of_ranks(self, chunks: tuple[range, ...], candidate: Candidate, shard: int | None) -> tuple[StateBytes, ...]:
        """Bytes on the ranks of each pipeline rank.

        Args:
            chunks: the units of each chunk of the model.
            shard: of one place in the shard group; None: of the largest.
        """
        cutting = (*_cutting(candidate), shard)
        key = (id(chunks), candidate.pp, schedule_placement(candidate.schedule), cutting)
        if key not in self._ranks:
            looks = self._looks_of(chunks, candidate)
            counted = [self._of_rank(rank, candidate, cutting, shard) for rank in looks.ranks]
            self._ranks[key] = tuple(counted[place] for place in looks.places)
        return self._ranks[key]

    def of_chunks(self, chunks: tuple[range, ...], candidate: Candidate) -> tuple[StateBytes, ...]:
        """Bytes of each chunk of the model, on the ranks that have it."""
        pp, placement = candidate.pp, schedule_placement(candidate.schedule)
        found: dict[int, StateBytes] = {}
        for pp_rank in range(pp):
            places = chunks_on(pp_rank, pp, len(chunks), placement)
            skipped, shared = self._tied([chunks[at] for at in places], chunks)
            for at in places:
                look = self._chunk_look(chunks[at], skipped, shared, pp)
                found[at] = self._of_chunk(look, candidate, (*_cutting(candidate), None), None)
        return tuple(found[at] for at in range(len(chunks)))

    def _looks_of(self, chunks: tuple[range, ...], candidate: Candidate) -> _Looks:
        """What each pipeline rank holds; ranks that look alike cost alike."""
        pp, placement = candidate.pp, schedule_placement(candidate.schedule)
        key = (id(chunks), pp, placement)
        if key not in self._looks:
            ranks: dict[tuple[object, ...], tuple[tuple[_ChunkLook, int], ...]] = {}
            order = []
            for pp_rank in range(pp):
                mine = tuple(chunks[at] for at in chunks_on(pp_rank, pp, len(chunks), placement))
                skipped, shared = self._tied(mine, chunks)
                held = tuple(self._chunk_look(chunk, skipped, shared, pp) for chunk in mine)
                alike = tuple(look.key for look in held)
                if alike not in ranks:
                    counts = Counter(alike)
                    ranks[alike] = tuple((look, counts[key]) for key, look in {one.key: one for one in held}.items())
                order.append(alike)
            number = {alike: place for place, alike in enumerate(ranks)}
            self._looks[key] = _Looks(chunks, tuple(ranks.values()), tuple(number[alike] for alike in order))
        return self._looks[key]

    def _chunk_look(
        self, chunk: range, skipped: frozenset[tuple[int, int]], shared: frozenset[tuple[int, int]], pp: int
    ) -> _ChunkLook:
        looks = self._model.look_indices[chunk.start : chunk.stop]
        special = tuple(
            (at - chunk.start, index, (at, index) in skipped) for at, index in (*skipped, *shared) if at in chunk
        )
        key = self._chunk_keys.setdefault((looks, special, pp > 1), len(self._chunk_keys))
        return _ChunkLook(key, chunk, skipped, shared)

    def _of_rank(
        self,
        held: Sequence[tuple[_ChunkLook, int]],
        candidate: Candidate,
        cutting: tuple[object, ...],
        shard: int | None,
    ) -> StateBytes:
        return StateBytes.of_chunks([(self._of_chunk(look, candidate, cutting, shard), count) for look, count in held])

    def _of_chunk(
        self, look: _ChunkLook, candidate: Candidate, cutting: tuple[object, ...], shard: int | None
    ) -> StateBytes:
        key = (look.key, cutting)
        if key not in self._known:
            is_split = candidate.zero_stage == 3
            place = (look.key, *_dividing(candidate), is_split)
            planning = self._plannings.get(place)
            if planning is None:
                entries = list(self._entries(look.chunk, look.skipped, look.shared, candidate))
                planning = self._plannings[place] = self._buckets.plan(entries, is_split=is_split)
            self._known[key] = self._count(planning, candidate, shard)
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

    @cached_property
    def _around_blocks(self) -> frozenset[str]:
        """Modules with blocks inside."""
        paths = [unit.name.split(".") for unit in self._model.blocks]
        return frozenset(".".join(path[:length]) for path in paths for length in range(1, len(path)))

    def _layer_of(self, name: str) -> str:
        """Which module outside the blocks a pipeline takes as a whole: the largest one without blocks inside."""
        path = name.split(".")
        prefixes = (".".join(path[:length]) for length in range(1, len(path)))
        return next((prefix for prefix in prefixes if prefix not in self._around_blocks), "")

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
    ) -> Iterable[Entry]:
        place, was_around = -1, False
        for at in chunk:
            unit = self._model.units[at]
            # Without a pipeline what lies between blocks forms one unit; with one, every layer is a unit.
            is_around = candidate.pp == 1 and unit.kind != "block"
            if not (is_around and was_around):
                place += 1
            was_around = is_around
            layer = ""
            for index, parameter in enumerate(unit.parameters):
                if candidate.pp > 1 and unit.kind != "block":
                    before, layer = layer, self._layer_of(parameter.name)
                    place += before not in {"", layer}
                if (at, index) in skipped:
                    continue
                tp_ranks = _tp_ranks(unit, parameter, candidate)
                is_norm = parameter.is_norm and self._precision.norm > 0
                key = (at, index) if (at, index) in shared else _key(parameter, candidate, tp_ranks)
                yield Entry(
                    place,
                    is_around,
                    parameter.local_elements(candidate.tp, ep=candidate.ep),
                    (*key, is_norm),
                    parameter.is_expert and candidate.ep > 1,
                    parameter.trainable,
                    tp_ranks,
                    is_norm,
                )

    # -- bytes --------------------------------------------------------------------------------------------

    def _count(self, planning: Planning, candidate: Candidate, shard: int | None) -> StateBytes:
        precision, optimizer = self._precision, self._optimizer
        buckets = self._buckets.cut(planning.trained, candidate, shard)
        own = owned = slices = parameters = shards = masters = stands = unmastered = 0
        gradients: list[int] = []
        apart = []
        plain, norm = self._widths(False), self._widths(True)
        for bucket in buckets:
            planned, part = bucket.planned, bucket.own
            width, gradient, master = norm if planned.is_norm else plain
            own += part
            owned += bucket.owned
            slices += bucket.slices
            parameters += bucket.whole * width
            gradients.append(bucket.whole * gradient)
            shards += part * gradient
            masters += part * master
            unmastered += 0 if master else part * width
            stands += len(planned.sizes) * width
            if planned.tp_ranks > 1 or planned.is_norm:
                apart.append(((planned.tp_ranks, planned.is_norm), part))
        parameters += planning.frozen_elements * precision.parameter
        gathered = gathered_run = gathered_again = 0
        if candidate.zero_stage == 3:
            frozen_buckets = self._buckets.cut(planning.frozen, candidate, shard)
            everything = [*buckets, *frozen_buckets]
            # Where nobody shares the state there is nothing to gather, unless from the host, and no shard beside the
            # whole.
            cut = [b for b in everything if b.num_shards > 1 or candidate.offload == "parameters"]
            parameters = sum(
                (b.own if b.num_shards > 1 else b.whole) * self._widths(b.planned.is_norm)[0] for b in everything
            )
            gathered = self._buckets.most_gathered(cut)
            gathered_again = self._buckets.gathered_again(cut)
            gathered_run = sum(bucket.whole * self._widths(bucket.planned.is_norm)[0] for bucket in cut)
        counters = 4 * slices if optimizer.name in _COUNTING else 0
        return StateBytes(
            parameters=parameters,
            gradients=sum(gradients),
            two_buckets=largest_run(gradients, 2),
            six_buckets=largest_run(gradients, 6),
            gradient_shards=shards,
            masters=masters,
            optimizer_state=owned * optimizer.state,
            gathered=gathered,
            gathered_run=gathered_run,
            gathered_again=gathered_again,
            bookkeeping=stands + counters,
            own_elements=own,
            unmastered=unmastered,
            apart=tuple(apart),
        )

    def _widths(self, is_norm: bool) -> tuple[int, int, int]:
        """Bytes of an element of a parameter, its gradient and its master."""
        if is_norm:
            return self._precision.norm, self._precision.norm, 0
        return self._precision.parameter, self._precision.gradient, self._precision.master


def _dividing(candidate: Candidate) -> tuple[object, ...]:
    """All that decides how a chunk's parameters are laid into buckets, but the stage."""
    return (candidate.tp, candidate.ep, candidate.tp > 1 and candidate.sequence_parallel)


def _cutting(candidate: Candidate) -> tuple[object, ...]:
    """All that decides how a chunk's parameters are cut and gathered."""
    is_cut = candidate.zero_stage == 3, candidate.zero_stage > 0, candidate.offload == "parameters"
    return (*_dividing(candidate), num_shards(candidate), *is_cut)


def _key(parameter: ParameterSpec, candidate: Candidate, tp_ranks: int) -> tuple[object, ...]:
    """What parameters of one bucket share: over which ranks their gradients are summed, which ranks hold copies."""
    if parameter.is_expert and candidate.ep > 1:
        return ("expert",)
    if candidate.tp == 1:
        return ()
    return ("whole" if parameter.cut_dim is None else "cut", tp_ranks)


def _tp_ranks(unit: UnitSpec, parameter: ParameterSpec, candidate: Candidate) -> int:
    """Ranks of the tp group that have each a part of a parameter's gradient; 1: all have the same, or their own cut."""
    if candidate.tp == 1 or parameter.is_expert:
        return 1
    if parameter.cut_dim is None:
        is_partial = parameter.is_on_heads or (candidate.sequence_parallel and unit.kind == "block")
        return candidate.tp if is_partial else 1
    return candidate.tp // parameter.min_parts if 0 < parameter.min_parts < candidate.tp else 1
