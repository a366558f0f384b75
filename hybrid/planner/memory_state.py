"""Bytes of parameters, gradients and optimizer state on one rank, bucket by bucket as the runtime lays them out.

The buckets come from the functions that the runtime cuts by (`plan_buckets` and `partition_bucket`), so padding is that
of a real run: `memory_buckets.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hybrid.contracts.chunk_placement import chunks_on
from hybrid.contracts.schedule_choice import schedule_placement
from hybrid.planner.chunk_looks import ChunkLook, ChunkLooks
from hybrid.planner.job import Candidate, Job
from hybrid.planner.memory_buckets import (
    EXACT_PARAMETERS,
    Bucket,
    BucketTable,
    Entry,
    Planning,
    largest_run,
    num_shards,
)
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
        borrowed: stage 3: what is gathered of another chunk of the rank, for a tied weight that lies there.
        waiting: gradient buffers with a weight that another chunk of the rank borrows: none is reduced before both
            chunks have had their backward.
        summed_shards: of `gradient_shards` those that are summed over tp ranks or other stages, too.
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
    borrowed: int = 0
    waiting: int = 0
    summed_shards: int = 0
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
            borrowed=sum(chunk.borrowed * count for chunk, count in chunks),
            waiting=sum(chunk.waiting * count for chunk, count in chunks),
            summed_shards=sum(chunk.summed_shards * count for chunk, count in chunks),
            bookkeeping=sum(chunk.bookkeeping * count for chunk, count in chunks),
            own_elements=sum(chunk.own_elements * count for chunk, count in chunks),
            unmastered=sum(chunk.unmastered * count for chunk, count in chunks),
            apart=tuple(one for chunk, count in chunks for one in chunk.apart * count),
        )


class StateTable:
    """Answers for one model under one precision and optimizer; remembers them by what they depend on."""

    def __init__(self, job: Job) -> None:
        self._model: ModelSpec = job.model
        self._precision = job.precision
        self._optimizer = job.optimizer
        self._buckets = BucketTable(job)
        self._known: dict[tuple[object, ...], StateBytes] = {}
        self._ranks: dict[tuple[object, ...], tuple[StateBytes, ...]] = {}
        self._looks = ChunkLooks(job.model)
        self._plannings: dict[tuple[object, ...], Planning] = {}

    def of_ranks(self, chunks: tuple[range, ...], candidate: Candidate, shard: int | None) -> tuple[StateBytes, ...]:
        """Bytes on the ranks of each pipeline rank.

        Args:
            chunks: the units of each chunk of the model.
            shard: of one place in the shard group; None: of the largest.
        """
        cutting = (*_cutting(candidate), shard)
        key = (id(chunks), candidate.pp, schedule_placement(candidate.schedule), cutting)
        if key not in self._ranks:
            looks = self._looks.of_ranks(chunks, candidate)
            counted = [self._of_rank(rank, candidate, cutting, shard) for rank in looks.ranks]
            self._ranks[key] = tuple(counted[place] for place in looks.places)
        return self._ranks[key]

    def of_chunks(self, chunks: tuple[range, ...], candidate: Candidate) -> tuple[StateBytes, ...]:
        """Bytes of each chunk of the model, on the ranks that have it."""
        pp, placement = candidate.pp, schedule_placement(candidate.schedule)
        found: dict[int, StateBytes] = {}
        for rank in range(pp):
            places = chunks_on(rank, pp, len(chunks), placement)
            found |= zip(places, self.of_chunks_on(rank, chunks, candidate, None)[0], strict=True)
        return tuple(found[at] for at in range(len(chunks)))

    def of_chunks_on(
        self, rank: int, chunks: tuple[range, ...], candidate: Candidate, shard: int | None
    ) -> tuple[tuple[StateBytes, ...], tuple[frozenset[int], ...]]:
        """(Bytes of each chunk that a pipeline rank has, in its order; places of those that each borrows a weight of).

        `shard` as in `of_ranks`.
        """
        places = chunks_on(rank, candidate.pp, len(chunks), schedule_placement(candidate.schedule))
        looks = self._looks.of_rank([chunks[at] for at in places], chunks, candidate.pp)
        cutting = (*_cutting(candidate), shard)
        lenders = tuple(
            frozenset(at for at, look in enumerate(looks) if any(look is one for one in mine.lenders)) for mine in looks
        )
        return tuple(self._of_chunk(look, candidate, cutting, shard) for look in looks), lenders

    def _of_rank(
        self,
        held: Sequence[tuple[ChunkLook, int]],
        candidate: Candidate,
        cutting: tuple[object, ...],
        shard: int | None,
    ) -> StateBytes:
        return StateBytes.of_chunks([(self._of_chunk(look, candidate, cutting, shard), count) for look, count in held])

    def _of_chunk(
        self, look: ChunkLook, candidate: Candidate, cutting: tuple[object, ...], shard: int | None
    ) -> StateBytes:
        key = (look.key, cutting)
        if key not in self._known:
            lent = [
                bucket
                for lender in look.lenders
                for planned in self._planning(lender, candidate).of_all
                if planned.is_lent
                for bucket in self._buckets.cut([planned], candidate, shard)
            ]
            planning = self._planning(look, candidate)
            self._known[key] = self._count(planning, candidate, shard, lent, borrows=self._borrows(look))
        return self._known[key]

    def _borrows(self, look: ChunkLook) -> int:
        """How often in a forward and a backward what a chunk borrows is gathered.

        A layer without anything else reads it once, and it stays whole; one with parameters of its own is a unit.
        """
        units = self._model.units
        borrowing = {self._owner(at, units[at].parameters[index], is_cut=True) for at, index in look.borrowed}
        own = {
            self._owner(at, parameter, is_cut=True)
            for at in {at for at, _ in look.borrowed}
            for index, parameter in enumerate(units[at].parameters)
            if (at, index) not in look.borrowed
        }
        return 2 if borrowing & own else 1

    def _planning(self, look: ChunkLook, candidate: Candidate) -> Planning:
        is_split = candidate.zero_stage == 3
        place = (look.key, *_dividing(candidate), is_split)
        planning = self._plannings.get(place)
        if planning is None:
            entries = list(self._entries(look, candidate))
            planning = self._plannings[place] = self._buckets.plan(entries, is_split=is_split)
        return planning

    # -- which parameters --------------------------------------------------------------------------------

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

    def _entries(self, look: ChunkLook, candidate: Candidate) -> Iterable[Entry]:
        """In the order of registration: buckets are laid out in it."""
        units = self._model.units
        # Without a pipeline what lies between blocks forms one unit; with one, every layer is a unit.
        is_cut = candidate.pp > 1
        is_repeated = len(self._model.blocks) > 1  # a block of which there is one is no unit of its own
        turns: dict[tuple[int, str], int] = {}
        for at in look.chunk:
            for parameter in units[at].parameters:
                turns.setdefault(self._owner(at, parameter, is_cut=is_cut), len(turns))
        place, before = -1, None
        for at, index in self._model.registered(look.chunk):
            unit, parameter = units[at], units[at].parameters[index]
            owner = self._owner(at, parameter, is_cut=is_cut)
            is_around = not is_cut and (unit.kind != "block" or not is_repeated)
            here = None if is_around else owner
            place += place < 0 or here != before
            before = here
            if (at, index) in look.borrowed:
                continue
            tp_ranks = _tp_ranks(unit, parameter, candidate)
            is_norm = parameter.is_norm and self._precision.norm > 0
            key = (at, index) if (at, index) in look.shared else _key(parameter, candidate, tp_ranks)
            yield Entry(
                place,
                turns[owner],
                is_around,
                parameter.local_elements(candidate.tp, ep=candidate.ep),
                (*key, is_norm),
                parameter.is_expert and candidate.ep > 1,
                parameter.trainable,
                tp_ranks,
                is_norm,
                (at, index) in look.lent,
                tp_ranks > 1 or (at, index) in look.shared,
            )

    def _owner(self, at: int, parameter: ParameterSpec, *, is_cut: bool) -> tuple[int, str]:
        """What is gathered and freed as a whole: a unit of the model, or a layer of one where a pipeline has cut it."""
        is_taken_apart = is_cut and self._model.units[at].kind != "block"
        return at, self._layer_of(parameter.name) if is_taken_apart else ""

    # -- bytes --------------------------------------------------------------------------------------------

    def _count(
        self, planning: Planning, candidate: Candidate, shard: int | None, borrowed: Sequence[Bucket], *, borrows: int
    ) -> StateBytes:
        precision, optimizer = self._precision, self._optimizer
        buckets = self._buckets.cut(planning.trained, candidate, shard)
        own = owned = slices = parameters = shards = masters = stands = unmastered = waiting = summed = 0
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
            if planned.is_lent:
                waiting += bucket.whole * gradient
            shards += part * gradient
            if planned.is_summed:
                summed += part * gradient
            masters += part * master
            unmastered += 0 if master else part * width
            stands += len(planned.sizes) * width
            if planned.tp_ranks > 1 or planned.is_norm:
                apart.append(((planned.tp_ranks, planned.is_norm), part))
        parameters += planning.frozen_elements * precision.parameter
        gathered = gathered_run = gathered_again = lent = 0
        if candidate.zero_stage == 3:
            frozen_buckets = self._buckets.cut(planning.frozen, candidate, shard)
            everything = [*buckets, *frozen_buckets]
            # Where nobody shares the state there is nothing to gather, unless from the host, and no shard beside the
            # whole.
            cut = [b for b in everything if b.num_shards > 1 or candidate.offload == "parameters"]
            parameters = sum(
                (b.own if b.num_shards > 1 else b.whole) * self._widths(b.planned.is_norm)[0] for b in everything
            )
            # What is borrowed is gathered by a forward, and stays whole to the end of the backward.
            is_cut = any(b.num_shards > 1 for b in borrowed) or candidate.offload == "parameters"
            lent = is_cut * sum(bucket.whole * self._widths(bucket.planned.is_norm)[0] for bucket in borrowed)
            gathered = self._buckets.most_gathered(cut) + lent
            gathered_again = self._buckets.gathered_again(cut) + lent * borrows
            gathered_run = sum(bucket.whole * self._widths(bucket.planned.is_norm)[0] for bucket in cut) + lent
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
            borrowed=lent,
            waiting=waiting,
            summed_shards=summed,
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
