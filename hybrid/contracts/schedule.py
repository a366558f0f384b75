"""The order in which each pipeline rank works: one list of actions per rank.

This is the only place that knows what a schedule is. The runner executes the lists, `schedule_timing` and the planner
time them, `schedule_check` proves them complete and free of deadlock, `hybrid schedule` draws them.

A model is cut into `num_stages · virtual_stages` chunks, numbered along the model, which lie on the ranks as
`chunk_placement` says: chunk c on rank c mod num_stages, or in a V. An action is one kind of work on one chunk for one
micro-batch, written `F2.0`: kind F, chunk 2, micro-batch 0.

    F  forward                        reads F of the chunk before
    B  whole backward                 reads F of its own chunk and the gradient (B or I) of the chunk after
    I  gradients of the inputs only   as B; frees the rank before from waiting
    W  gradients of the weights       reads I of its own chunk; may run at any time after it

`1f1b`, 4 stages, 5 micro-batches, backward as long as forward (time to the right):

    rank 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 .  B2 .  B3 .  B4     warm-up: num_stages - 1 - rank forwards,
    rank 1  .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4        then one forward, one backward in turn,
    rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4           then the backwards that are left
    rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

Backwards of a chunk run in ascending order of micro-batches in every schedule made here, so that gradients are added up
in the order in which one process that accumulates would add them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from hybrid.contracts.chunk_placement import ChunkPlacement, best_placement, chunk_rank, chunks_on
from hybrid.errors import StrategyError

__all__ = [
    "SCHEDULE_NAMES",
    "Action",
    "ActionKind",
    "Schedule",
    "dependencies",
    "fewer_micro_batches",
    "forward_only",
    "in_flight",
    "make_schedule",
    "max_in_flight",
    "max_in_flight_by_chunk",
    "usual_virtual_stages",
    "v_parts",
]


class ActionKind(Enum):
    """What an action computes. A chunk and micro-batch has F and either B, or I and later W."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"

    @property
    def letter(self) -> str:
        return self.value

    @property
    def gives_input_gradient(self) -> bool:
        """Whether the chunk before waits for it."""
        return self is ActionKind.B or self is ActionKind.I  # no set: hashing an enum member is a call in Python

    @property
    def frees_activations(self) -> bool:
        """Whether nothing of the forward is needed once it has run: W still reads the inputs of the layers."""
        return self is ActionKind.B or self is ActionKind.W


_KINDS = {kind.value: kind for kind in ActionKind}  # to look one up by calling the class takes several times as long


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One kind of work on one chunk (numbered over the whole model) for one micro-batch."""

    kind: ActionKind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.micro_batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`actions[rank]` is what pipeline rank `rank` does, in order. Whether that works: `check_schedule`."""

    name: str
    num_stages: int
    num_micro_batches: int
    virtual_stages: int = 1
    actions: tuple[tuple[Action, ...], ...]
    placement: ChunkPlacement = field(init=False, compare=False)
    """Read from the actions: of those known, the one that fits them best."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(tuple(order) for order in self.actions))
        problems = _size_problems(self.num_stages, self.num_micro_batches, self.virtual_stages)
        if not re.fullmatch(r"[\w.+-]+", self.name):
            problems.append(f"schedule name {self.name!r}: use letters, digits and . _ + - only")
        if not problems and len(self.actions) != self.num_stages:
            problems.append(
                f"schedule {self.name!r}: {len(self.actions)} action lists for {self.num_stages} stages; "
                f"give one per rank"
            )
        if problems:
            raise StrategyError(problems)
        listed = Counter((rank, action.chunk) for rank, order in enumerate(self.actions) for action in order)
        object.__setattr__(self, "placement", best_placement(listed, self.num_stages))

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model."""
        return self.num_stages * self.virtual_stages

    @property
    def splits_backward(self) -> bool:
        """Whether any backward comes in two halves."""
        return any(action.kind is ActionKind.I for order in self.actions for action in order)

    def rank_of(self, chunk: int) -> int:
        """The pipeline rank that holds the chunk."""
        return chunk_rank(chunk, self.num_stages, self.placement)

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The chunks that the rank holds, in the order of the model."""
        return chunks_on(rank, self.num_stages, self.num_chunks, self.placement)


# ---------------------------------------------------------------- making


def make_schedule(name: str, *, num_stages: int, num_micro_batches: int, virtual_stages: int | None = None) -> Schedule:
    """The action lists of a schedule with a name; a StrategyError with all reasons where there are none.

    `virtual_stages` is `usual_virtual_stages(name)` where it is not given.

    - gpipe (arXiv 1811.06965): all forwards, then all backwards. Keeps every micro-batch.
    - 1f1b (arXiv 2006.09503, flushed at the end of the step): keeps at most num_stages - rank micro-batches.
    - interleaved (arXiv 2104.04473 §2.2): `virtual_stages` chunks per rank, run in groups of num_stages micro-batches;
      the bubble shrinks by virtual_stages, at the price of that many times the transfers and more micro-batches kept.
    - zb-h1 (arXiv 2401.10241 §2.1): 1f1b with the backward split; every rank keeps as much as the first of 1f1b, and
      fills with W what a rank of 1f1b waits in the end: a third of the bubble where F, I and W take the same time.
    - zbv (ZB-V, arXiv 2401.10241 §6): two chunks per rank, in a V, and the backward split; every rank keeps as much as
      the first of 1f1b, and a sixth of its bubble is left where F, I and W take the same time.
    """
    virtual_stages = usual_virtual_stages(name) if virtual_stages is None else virtual_stages
    problems = _size_problems(num_stages, num_micro_batches, virtual_stages)
    if name not in SCHEDULE_NAMES:
        problems.append(f"schedule {name!r}: expected one of {', '.join(SCHEDULE_NAMES)}")
    if not problems:
        problems += _chunk_problems(name, num_stages, num_micro_batches, virtual_stages)
    if (num_forwards := num_stages * num_micro_batches * virtual_stages) > _MOST_FORWARDS and not problems:
        problems.append(
            f"a schedule of {num_stages} stages × {virtual_stages} chunks × {num_micro_batches} micro-batches "
            f"(accumulate_steps) has {num_forwards:,} forwards, more than any run has ({_MOST_FORWARDS:,}): lower the "
            "largest of these"
        )
    if problems:
        raise StrategyError(problems)
    make = _ORDERS[name]
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        virtual_stages=virtual_stages,
        actions=tuple(make(rank, num_stages, num_micro_batches, virtual_stages) for rank in range(num_stages)),
    )


def usual_virtual_stages(name: str) -> int:
    """Chunks per rank of a schedule with this name where nobody says how many."""
    return 2 if name == "zbv" else 1


def fewer_micro_batches(schedule: Schedule, num_micro_batches: int) -> Schedule:
    """The same order with the first micro-batches alone.

    It can run wherever the whole one can: what is left out is nothing that the rest waits for.
    """
    actions = tuple(
        tuple(action for action in order if action.micro_batch < num_micro_batches) for order in schedule.actions
    )
    return replace(schedule, num_micro_batches=num_micro_batches, actions=actions)


def forward_only(schedule: Schedule) -> Schedule:
    """The same order with the forwards alone: for evaluation."""
    actions = tuple(tuple(action for action in order if action.kind is ActionKind.F) for order in schedule.actions)
    return replace(schedule, name=f"{schedule.name}-forward", actions=actions)


def _gpipe(rank: int, num_stages: int, num_micro_batches: int, virtual_stages: int) -> tuple[Action, ...]:
    return _alternating(rank, num_stages, num_micro_batches, 1, num_warmup=num_micro_batches)


def _one_forward_one_backward(
    rank: int, num_stages: int, num_micro_batches: int, virtual_stages: int
) -> tuple[Action, ...]:
    return _alternating(rank, num_stages, num_micro_batches, 1, num_warmup=num_stages - 1 - rank)


def _interleaved(rank: int, num_stages: int, num_micro_batches: int, virtual_stages: int) -> tuple[Action, ...]:
    # A result takes one forward and one backward per hop in the steady phase: hence two forwards of lead per rank after
    # this one; and the first backward is of the last chunk: hence a whole group for each chunk before that.
    num_warmup = 2 * (num_stages - 1 - rank) + (virtual_stages - 1) * num_stages
    return _alternating(rank, num_stages, num_micro_batches, virtual_stages, num_warmup=num_warmup)


def _zero_bubble_h1(rank: int, num_stages: int, num_micro_batches: int, virtual_stages: int) -> tuple[Action, ...]:
    def action(kind: ActionKind, micro_batch: int) -> Action:
        return Action(kind=kind, chunk=rank, micro_batch=micro_batch)

    num_warmup = min(num_stages - 1 - rank, num_micro_batches)
    order = [action(ActionKind.F, micro_batch) for micro_batch in range(num_warmup)]
    for micro_batch in range(num_micro_batches):
        if micro_batch + num_warmup < num_micro_batches:
            order.append(action(ActionKind.F, micro_batch + num_warmup))
        order.append(action(ActionKind.I, micro_batch))
        # Later by one micro-batch per rank: so all keep the same number, and the rank before never waits for a W.
        if micro_batch >= rank:
            order.append(action(ActionKind.W, micro_batch - rank))
    num_left = min(rank, num_micro_batches)
    return (*order, *(action(ActionKind.W, num_micro_batches - left) for left in range(num_left, 0, -1)))


def v_parts(rank: int, *, num_stages: int, num_micro_batches: int) -> tuple[tuple[int, str], ...]:
    """What a rank of `zbv` repeats, and how often: F, I or W of its chunk on the way down (`Fd`) or up the V.

    Each stands for the next micro-batch; those that there are none for fall out.
    """
    left = num_stages - rank
    # Fewer than fill all ranks are the first ones of so many: whatever they wait for is there.
    num_filling = max(num_micro_batches, 2 * num_stages - 1)
    return (
        (2 * left - 1, "Fd"),  # until the first one has been down to the last rank and is back
        (rank, "Fu Fd"),
        (left, "Fu Iu Wu"),  # until its gradients have been up
        (num_filling - num_stages - left + 1, "Fd Id Wd Fu Iu Wu"),
        (left - 1, "Id Wd Fu Iu Wu"),
        (rank, "Iu Id"),  # W waits now, so that nobody waits for it
        (left, "Id Wd"),
        (rank, "Wu"),
        (rank, "Wd"),
    )


def _zero_bubble_v(rank: int, num_stages: int, num_micro_batches: int, virtual_stages: int) -> tuple[Action, ...]:
    """Chunk `rank` on the way down the V, chunk 2p-1-rank on the way up."""
    chunks = {"d": rank, "u": 2 * num_stages - 1 - rank}
    parts = v_parts(rank, num_stages=num_stages, num_micro_batches=num_micro_batches)
    done: Counter[str] = Counter()
    order = []
    for repeats, words in parts:
        for word in words.split() * repeats:
            if done[word] < num_micro_batches:
                order.append(Action(kind=_KINDS[word[0]], chunk=chunks[word[1]], micro_batch=done[word]))
            done[word] += 1
    return tuple(order)


def _alternating(
    rank: int, num_stages: int, num_micro_batches: int, virtual_stages: int, *, num_warmup: int
) -> tuple[Action, ...]:
    """`num_warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    places = list(_chunk_order(num_stages, num_micro_batches, virtual_stages))
    forwards = [
        Action(kind=ActionKind.F, chunk=turn * num_stages + rank, micro_batch=micro_batch)
        for turn, micro_batch in places
    ]
    backwards = [
        Action(kind=ActionKind.B, chunk=(virtual_stages - 1 - turn) * num_stages + rank, micro_batch=micro_batch)
        for turn, micro_batch in places
    ]
    num_warmup = min(num_warmup, len(forwards))
    num_pairs = len(forwards) - num_warmup
    order = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[num_pairs:])


def _chunk_order(num_stages: int, num_micro_batches: int, virtual_stages: int) -> Iterator[tuple[int, int]]:
    """(which of a rank's chunks, micro-batch): num_stages micro-batches through one chunk, then through the next."""
    if virtual_stages == 1:
        yield from ((0, micro_batch) for micro_batch in range(num_micro_batches))
        return
    for first in range(0, num_micro_batches, num_stages):
        for turn in range(virtual_stages):
            yield from ((turn, micro_batch) for micro_batch in range(first, first + num_stages))


_ORDERS: Mapping[str, Callable[[int, int, int, int], tuple[Action, ...]]] = MappingProxyType(
    {
        "gpipe": _gpipe,
        "1f1b": _one_forward_one_backward,
        "interleaved": _interleaved,
        "zb-h1": _zero_bubble_h1,
        "zbv": _zero_bubble_v,
    }
)

# A list of so many actions takes seconds to make; a number with some zeros too many would take hours and all memory.
_MOST_FORWARDS = 1 << 20

#: The schedules that `make_schedule` knows; any other comes as a file (`schedule_text`).
SCHEDULE_NAMES: tuple[str, ...] = tuple(_ORDERS)


def _size_problems(num_stages: int, num_micro_batches: int, virtual_stages: int) -> list[str]:
    sizes = {"num_stages": num_stages, "num_micro_batches": num_micro_batches, "virtual_stages": virtual_stages}
    return [
        f"{name} = {size!r}: expected a whole number of at least 1"
        for name, size in sizes.items()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1
    ]


def _chunk_problems(name: str, num_stages: int, num_micro_batches: int, virtual_stages: int) -> list[str]:
    if name == "zbv":
        wrong = [
            f"schedule 'zbv' has two chunks per rank, one on each leg of its V, but virtual_stages = {virtual_stages}; "
            f"leave it out, or use virtual_stages = 2"
        ]
        return wrong if virtual_stages != 2 else []
    if name != "interleaved":
        if virtual_stages == 1:
            return []
        return [
            f"schedule {name!r} has one chunk per rank, but virtual_stages = {virtual_stages}; "
            f"use virtual_stages = 1, or schedule 'interleaved'"
        ]
    problems = []
    if virtual_stages == 1:
        problems.append(
            "schedule 'interleaved' needs at least 2 chunks per rank, but virtual_stages = 1; "
            "use virtual_stages = 2, or schedule '1f1b'"
        )
    if num_micro_batches % num_stages:
        below = num_micro_batches // num_stages * num_stages
        near = " or ".join(str(size) for size in (below, below + num_stages) if size)
        problems.append(
            f"schedule 'interleaved' runs the micro-batches in groups of num_stages = {num_stages}, but "
            f"num_micro_batches (accumulate_steps) = {num_micro_batches}; use {near}, "
            f"or schedule '1f1b', which takes any number"
        )
    return problems


# ---------------------------------------------------------------- reading


def dependencies(schedule: Schedule) -> dict[Action, tuple[Action, ...]]:
    """Each listed action -> the actions whose results it reads, on whatever rank, listed or not."""
    listed = dict.fromkeys(action for order in schedule.actions for action in order)  # in one order, unlike a set
    return {action: tuple(_reads(action, schedule.num_chunks, listed)) for action in listed}


def _reads(action: Action, num_chunks: int, listed: Container[Action]) -> Iterator[Action]:
    match action.kind:
        case ActionKind.F:
            if action.chunk > 0:
                yield replace(action, chunk=action.chunk - 1)
        case ActionKind.W:
            yield replace(action, kind=ActionKind.I)
        case ActionKind.B | ActionKind.I:
            yield replace(action, kind=ActionKind.F)
            if action.chunk < num_chunks - 1:
                split = replace(action, kind=ActionKind.I, chunk=action.chunk + 1)
                yield split if split in listed else replace(split, kind=ActionKind.B)


def in_flight(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """For each action of the rank: how many (chunk, micro-batch) have their activations kept while it runs.

    They are kept from the start of F to the end of B, or of W where backward is split.
    """
    return tuple(sum(held.values()) for held in _held(schedule, rank))


def max_in_flight(schedule: Schedule, rank: int, *, weights: Sequence[float] | None = None) -> float:
    """The most activations that the rank keeps at once: counted, or weighted by `weights[chunk]`.

    `weights` has one value per chunk of the model: bytes of activations give bytes; 1 for one chunk and 0 for the rest
    gives the count of that chunk.
    """
    if weights is None:
        return max(in_flight(schedule, rank), default=0)
    return max(
        (sum(weights[chunk] * count for chunk, count in held.items()) for held in _held(schedule, rank)), default=0
    )


def max_in_flight_by_chunk(schedule: Schedule, rank: int) -> Counter[int]:
    """Chunk of the rank -> the most micro-batches whose activations of it are kept at once."""
    most: Counter[int] = Counter()
    for action, held in zip(schedule.actions[rank], _held(schedule, rank), strict=True):
        most[action.chunk] = max(most[action.chunk], held[action.chunk])
    return most


def _held(schedule: Schedule, rank: int) -> Iterator[Counter[int]]:
    """Chunk -> micro-batches kept, while each action of the rank runs. One counter, changed in place."""
    held: Counter[int] = Counter()
    for action in schedule.actions[rank]:
        if action.kind is ActionKind.F:
            held[action.chunk] += 1
        yield held
        if action.kind.frees_activations:
            held[action.chunk] -= 1
