"""Proof that a schedule is complete, in a possible order, and free of deadlock.

Complete: each (chunk, micro-batch) has one F and one B, or one F, one I and one W, on the rank of the chunk.
Order: what an action reads from its own rank stands before it.
Free of deadlock: the ranks are played through with blocking receives, each posted when its rank comes to the action
that needs it. How long a send holds up what comes after it is the transport's doing:

    BUFFERED    never: a message lies ready once it has been sent
    CHANNEL     a message is delivered when its receiver asks for it; messages with the same source, target and payload
                are delivered in the order in which they were sent; the sender computes on
    PAIR        as CHANNEL, but both ways of a pair of ranks share one queue per payload
    DIRECTION   as CHANNEL, but all messages of a rank, sent and received, share one queue per payload
    BLOCKING    as CHANNEL, and a rank waits for the sends of an action before it starts the next one
                (the receive of the next action is posted beside them)

What is free of deadlock under any of them is so under BUFFERED, and under all but BUFFERED it is so under CHANNEL.
`gpipe`, `1f1b` and `zb-h1` are free under all five. `interleaved` is under BUFFERED and CHANNEL only: with PAIR it
stops on two stages, with DIRECTION on any number, with BLOCKING as soon as there are more micro-batches than stages.
So is `zbv`, which stops with those three from two micro-batches on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator
from enum import Enum

from hybrid.contracts.schedule import Action, ActionKind, Schedule, dependencies
from hybrid.contracts.schedule_transfers import Payload, Transfer, transfers
from hybrid.errors import StrategyError

__all__ = ["Transport", "check_schedule", "find_deadlock"]

_SHOWN = 6  # actions named in one problem


class Transport(Enum):
    """How messages hold each other up; see the top of the file."""

    BUFFERED = "sends that never wait"
    CHANNEL = "one queue for each source, target and payload"
    PAIR = "one queue for each pair of ranks and payload"
    DIRECTION = "one queue for each rank and payload"
    BLOCKING = "ranks that wait for their sends"

    def queue(self, transfer: Transfer) -> Hashable:
        """The queue, at each of its two ends, in which the message waits for its turn."""
        if self is Transport.DIRECTION:
            return transfer.payload
        ends = (transfer.source_rank, transfer.target_rank)
        return transfer.payload, (tuple(sorted(ends)) if self is Transport.PAIR else ends)


def check_schedule(schedule: Schedule, *, transport: Transport = Transport.CHANNEL, is_training: bool = True) -> None:
    """Raise a StrategyError that lists every problem; `is_training=False` expects forwards alone.

    Whether it can deadlock is asked once everything else is right.
    """
    problems = [*_completeness_problems(schedule, is_training=is_training), *_order_problems(schedule)]
    if not problems:
        stuck = find_deadlock(schedule, transport=transport)
        if stuck is not None and transport is not Transport.BUFFERED:
            stuck = find_deadlock(schedule, transport=Transport.BUFFERED) or stuck  # the plainer reason
        problems += [] if stuck is None else [stuck]
    if problems:
        raise StrategyError([f"schedule {schedule.name!r}: {problem}" for problem in problems])


# ---------------------------------------------------------------- complete, and in a possible order


def _completeness_problems(schedule: Schedule, *, is_training: bool) -> Iterator[str]:
    places: dict[Action, list[tuple[int, int]]] = defaultdict(list)
    for rank, order in enumerate(schedule.actions):
        for position, action in enumerate(order):
            places[action].append((rank, position))
    for action, found in places.items():
        if not 0 <= action.chunk < schedule.num_chunks:
            yield f"{action} on rank {found[0][0]}: there are chunks 0..{schedule.num_chunks - 1} only"
        elif not 0 <= action.micro_batch < schedule.num_micro_batches:
            yield f"{action} on rank {found[0][0]}: there are micro-batches 0..{schedule.num_micro_batches - 1} only"
        else:
            if len(found) > 1:
                where = ", ".join(f"action {position} of rank {rank}" for rank, position in found)
                yield f"{action} is listed {len(found)} times ({where}); leave one"
            home = schedule.rank_of(action.chunk)
            for rank in sorted({rank for rank, _ in found} - {home}):
                yield (
                    f"{action} stands on rank {rank}, but chunk {action.chunk} belongs to rank {home} "
                    f"({schedule.placement.rule(schedule.num_stages)})"
                )
        if not is_training and action.kind is not ActionKind.F:
            yield f"{action} is a backward in a schedule of forwards"
    num_wanted = schedule.num_chunks * schedule.num_micro_batches * (2 if is_training else 1)
    if num_wanted > 2 * len(places) + _SHOWN:  # a stray large number, or the wrong file: not worth one line per gap
        yield (
            f"{len(places)} different actions are listed, but {schedule.num_chunks} chunks × "
            f"{schedule.num_micro_batches} micro-batches need at least {num_wanted}"
        )
        return
    missing: dict[tuple[int, str], list[Action]] = defaultdict(list)
    for chunk in range(schedule.num_chunks):
        for micro_batch in range(schedule.num_micro_batches):
            kinds = {kind for kind in ActionKind if Action(kind=kind, chunk=chunk, micro_batch=micro_batch) in places}
            whole, split = kinds & {ActionKind.B}, kinds & {ActionKind.I, ActionKind.W}
            if whole and split:
                letters = " and ".join(sorted(kind.letter for kind in split))
                yield f"micro-batch {micro_batch} of chunk {chunk} has B and also {letters}; give B, or I and W"
            wanted = {ActionKind.F}
            if is_training and not whole:
                wanted |= {ActionKind.I, ActionKind.W} if split else {ActionKind.B}
            for kind in ActionKind:
                if kind in wanted - kinds:
                    action = Action(kind=kind, chunk=chunk, micro_batch=micro_batch)
                    missing[schedule.rank_of(chunk), kind.letter].append(action)
    for (rank, _), actions in sorted(missing.items()):
        yield f"rank {rank} lacks {_listed(actions)}"


def _order_problems(schedule: Schedule) -> Iterator[str]:
    reads = dependencies(schedule)
    for rank, order in enumerate(schedule.actions):
        first: dict[Action, int] = {}
        for position, action in enumerate(order):
            first.setdefault(action, position)
        for action, position in first.items():
            for source in reads[action]:
                if first.get(source, -1) > position:
                    yield (
                        f"rank {rank}: {action} (action {position}) stands before {source} "
                        f"(action {first[source]}), whose result it needs"
                    )


def _listed(actions: Iterable[Action]) -> str:
    names = [str(action) for action in actions]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# ---------------------------------------------------------------- deadlock


def find_deadlock(schedule: Schedule, *, transport: Transport) -> str | None:
    """None if all ranks come to their end; else one sentence with the actions that wait for each other.

    The schedule is complete and in a possible order (`check_schedule` sees to it).
    """
    play = _Play(schedule, transport)
    play.run()
    return None if play.is_finished else f"deadlock with {transport.value}: {play.explain()}"


class _Play:
    """All ranks, played until none can go on. What can run next never stops what else could: the order is free."""

    def __init__(self, schedule: Schedule, transport: Transport) -> None:
        self._transport = transport
        self._steps = transfers(schedule)
        self._position = [0] * schedule.num_stages
        self._has_posted_receive = [False] * schedule.num_stages
        self._queues: defaultdict[tuple[int, Hashable], deque[Transfer]] = defaultdict(deque)
        self._posted: set[tuple[int, Transfer]] = set()
        self._delivered: set[Transfer] = set()
        self._senders = {step.send: step.action for steps in self._steps for step in steps if step.send}

    @property
    def is_finished(self) -> bool:
        return all(position == len(steps) for position, steps in zip(self._position, self._steps, strict=True))

    def run(self) -> None:
        ranks = range(len(self._steps))
        while sum(self._advance(rank) for rank in ranks):
            pass

    def _advance(self, rank: int) -> bool:
        """Run this rank's actions as far as they go; whether anything has happened."""
        has_moved = False
        while (position := self._position[rank]) < len(self._steps[rank]):
            step = self._steps[rank][position]
            if not self._has_posted_receive[rank]:
                self._has_posted_receive[rank] = has_moved = True
                if step.receive:
                    self._post(rank, step.receive)
            if self._awaited(rank) is not None:
                break
            self._position[rank], self._has_posted_receive[rank], has_moved = position + 1, False, True
            if step.send:
                self._post(rank, step.send)
        return has_moved

    def _post(self, rank: int, transfer: Transfer) -> None:
        self._posted.add((rank, transfer))
        if self._transport is Transport.BUFFERED:
            if rank == transfer.source_rank:
                self._delivered.add(transfer)
            return
        self._queues[rank, self._transport.queue(transfer)].append(transfer)
        self._deliver(transfer)

    def _deliver(self, transfer: Transfer) -> None:
        """Deliver the message if it is first at both of its ends, and then what stood behind it."""
        waiting = [transfer]
        while waiting:
            candidate = waiting.pop()
            key = self._transport.queue(candidate)
            ends = [self._queues[rank, key] for rank in (candidate.source_rank, candidate.target_rank)]
            if all(queue and queue[0] == candidate for queue in ends):
                self._delivered.add(candidate)
                for queue in ends:
                    queue.popleft()
                    waiting += [queue[0]] if queue else []

    def _awaited(self, rank: int) -> Transfer | None:
        """The message that the rank waits for before its next action."""
        position, steps = self._position[rank], self._steps[rank]
        awaited = [steps[position].receive]
        if self._transport is Transport.BLOCKING and position:
            awaited.append(steps[position - 1].send)
        return next((transfer for transfer in awaited if transfer and transfer not in self._delivered), None)

    def explain(self) -> str:
        """Follow from a rank that stands still to what it waits for, until the circle closes; then tell the circle."""
        node: int | Transfer = next(rank for rank, steps in enumerate(self._steps) if self._position[rank] < len(steps))
        path: list[int | Transfer] = []
        sentences: list[str] = []
        while node not in path:
            path.append(node)
            node, sentence = self._reason(node)
            sentences.append(sentence)
        return "; ".join(filter(None, sentences[path.index(node) :]))

    def _reason(self, node: int | Transfer) -> tuple[int | Transfer, str]:
        """What this rank or message waits for, in words; the words are empty where the next reason says it all."""
        if isinstance(node, int):
            return self._reason_of_rank(node)
        for rank in (node.source_rank, node.target_rank):
            if (rank, node) not in self._posted:
                return rank, ""
            if self._transport is not Transport.BUFFERED:
                first = self._queues[rank, self._transport.queue(node)][0]
                if first != node:
                    return first, f"on rank {rank} {self._name(node)} stands behind {self._name(first)}"
        raise AssertionError(f"nothing holds up {node}")

    def _reason_of_rank(self, rank: int) -> tuple[Transfer, str]:
        transfer = self._awaited(rank)
        assert transfer is not None
        action = self._steps[rank][self._position[rank]].action
        if transfer.source_rank == rank:
            return transfer, (
                f"rank {rank} waits before {action} until rank {transfer.target_rank} takes {self._name(transfer)}"
            )
        return transfer, f"rank {rank} waits before {action} for {self._name(transfer)} on rank {transfer.source_rank}"

    def _name(self, transfer: Transfer) -> str:
        what = "the output" if transfer.payload is Payload.ACTIVATION else "the gradient"
        return f"{what} of {self._senders[transfer]}"
