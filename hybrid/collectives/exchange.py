"""Collectives on gloo as direct messages between every two ranks.

Gloo's own reduce-scatter is an all-reduce of a copy. Here each call is one round of messages: receives are
posted first, then all sends, and gloo's threads carry them while Python goes on. What arrived is added in
rank order when the caller waits.

Every two ranks first exchange a header in a message of fixed size. Headers go through one stream per process
group, in launch order (`channel`), so each rank sees at once when its peer launched something else, or the
same with another size. The data of large calls travel under tags made from the header: messages of unequal
calls never meet. (Gloo ends the process when a message is longer than its buffer, and delivers a shorter one
without a word.) A payload that fits travels inside the header's message, and nothing else is sent.

    operation                 to peer p                       from peer p
    reduce_scatter            p's range                       own range, into scratch (one peer's: where the
                                                              sum is wanted, if that is elsewhere), then added
    all_gather                own range                       p's range, in place
    broadcast                 all of it (source only)         all of it (from the source only)
    all_reduce, small         all of it                       all of it, into scratch, then added
    all_reduce, large         p's range of equal ones, then   own range, into scratch, added; then
                              the sum of the own range        the sum of p's range, in place

Large messages are cut into segments: one is added, and in an all-reduce sent on, while the next arrives. The
sum of an element is the same in all of these ways. Between ranks of one host only the headers take this way
(`shared_exchange`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybrid.collectives.call import Call, first_sentence
from hybrid.collectives.channel import channel_of, receive, send
from hybrid.collectives.group import Group
from hybrid.collectives.header import Header
from hybrid.collectives.ordered_sum import combine
from hybrid.collectives.scratch import INLINE_BYTES, SCRATCH, Slot
from hybrid.collectives.shared_memory import NOWHERE, Place
from hybrid.errors import CollectiveError

__all__ = ["Exchange", "PeerError", "even_bounds"]

# From this size on an all-reduce takes two rounds and half the traffic (at 4 ranks). A constant, not a
# measurement at start: on a busy machine that would cost more than it could win, as the two ways differ by
# less than the noise around the crossover, and all ranks would have to agree on the result.
_TWO_ROUNDS_BYTES = 1 << 19
# Two ranks send the same bytes either way: two rounds only halve what each adds, which is worth a second wait from
# some megabytes on (1 MB takes 1.36 and 1.14 ms, 16 MB 12.3 and 11.4).
_TWO_ROUNDS_FACTOR_OF_TWO = 16
# Of 256 KB, 1 MB, 4 MB and no segments, 4 MB was fastest on 2 and 4 ranks: smaller ones wake gloo's threads too
# often. A constant as well, for all ranks must cut alike.
_SEGMENT_BYTES = 4 << 20
_PROBE_SECONDS = 0.02


def even_bounds(num_elements: int, parts: int) -> tuple[int, ...]:
    """Boundaries of `parts` ranges that differ by at most one element."""
    return tuple(num_elements * index // parts for index in range(parts + 1))


class PeerError(RuntimeError):
    """A message to or from a peer did not get through. The text has gloo's words: nothing is chained to it."""

    def __init__(self, text: str, *, peer: int) -> None:
        super().__init__(text)
        self.peer = peer


class _Message(NamedTuple):
    """A message under way."""

    peer: int
    segment: int
    work: dist.Work


class Exchange:
    """A launched call. `finish` completes it; until then it holds the buffers that gloo reads and writes."""

    def __init__(self, call: Call) -> None:
        assert call.buffer is not None and call.group.process_group is not None
        self._call = call
        self._buffer = call.buffer
        self._group = call.group
        self._process_group = call.group.process_group
        self._peers = self._find_peers()
        self._bounds = call.bounds or even_bounds(call.num_elements, call.group.size)
        self._whole = call.op == "broadcast" or (
            call.op == "all_reduce" and self.takes_one_round(call.num_bytes, call.group)
        )
        self._two_rounds = call.op == "all_reduce" and not self._whole
        self._inline = self._largest_message_elements() * call.dtype.itemsize <= INLINE_BYTES
        self._header = Header.of(call)
        self._header_slots: dict[int, Slot] = {}
        self._places: dict[int, Place] = {}
        self._sent_slots: list[Slot] = []
        self._landing: dict[int, torch.Tensor] = {}
        self._scratch: list[torch.Tensor] = []
        self._header_receives: list[_Message] = []
        self._receives: list[_Message] = []
        self._second_receives: list[_Message] = []
        self._sends: list[_Message] = []
        self._deadline = 0.0
        self._refused: PeerError | None = None
        self._post_receives()
        self._post_sends()
        if self._refused is not None:
            raise self._refused

    # -- what goes where ------------------------------------------------------------------------------------

    def _find_peers(self) -> Sequence[int]:
        if self._call.op == "broadcast" and self._group.rank != self._call.source:
            return (self._call.source,)
        return self._group.peers

    @classmethod
    def takes_one_round(cls, num_bytes: int, group: Group) -> bool:
        """Whether every rank of an all-reduce sends all it has."""
        two_rounds_bytes = _TWO_ROUNDS_BYTES * (_TWO_ROUNDS_FACTOR_OF_TWO if group.size == 2 else 1)
        return num_bytes < two_rounds_bytes

    def _largest_message_elements(self) -> int:
        if self._whole:
            return self._call.num_elements
        return max(end - start for start, end in zip(self._bounds, self._bounds[1:], strict=False))

    def _shard(self, index: int) -> torch.Tensor:
        return self._buffer if self._whole else self._buffer[self._bounds[index] : self._bounds[index + 1]]

    def _own(self) -> torch.Tensor:
        """The part that this rank sums up, or gives to the others."""
        return self._shard(self._group.rank)

    def _target(self) -> torch.Tensor:
        """Where the sum of the own part goes."""
        return self._own() if self._call.out is None else self._call.out

    def _outgoing(self, peer: int) -> torch.Tensor:
        if self._call.op == "broadcast" and self._group.rank != self._call.source:
            return self._buffer[:0]
        return self._shard(peer) if self._call.reduction else self._own()

    def _incoming(self, peer: int) -> torch.Tensor:
        """Where the peer's message goes: in place, or, if it is to be added, into scratch."""
        if self._call.op == "broadcast" and self._group.rank == self._call.source:
            return self._buffer[:0]
        if not self._call.reduction:
            return self._shard(peer)
        if peer not in self._landing:
            # The first one that is added (see `combine`) may lie where the sum is to be.
            if self._call.out is not None and peer == min(self._peers):
                self._landing[peer] = self._call.out
            else:
                self._landing[peer] = SCRATCH.take(self._own().numel(), self._call.dtype)
                self._scratch.append(self._landing[peer])
        return self._landing[peer]

    def _segments(self, part: torch.Tensor) -> list[torch.Tensor]:
        if not 0 < part.nbytes <= _SEGMENT_BYTES:
            return list(part.split(_SEGMENT_BYTES // part.element_size())) if part.numel() else []
        return [part]

    # -- launch ---------------------------------------------------------------------------------------------

    def _post_receives(self) -> None:
        channel = channel_of(self._process_group)
        for peer in self._peers:
            try:
                work, self._header_slots[peer] = channel.take(peer)
            except RuntimeError as error:
                self._refuse(peer, error)
                continue
            self._header_receives.append(_Message(peer, 0, work))
        if not self._inline and self._refused is None:
            self._post_data_receives()

    def _post_data_receives(self) -> None:
        for peer in self._peers:
            self._receives += self._post(receive, peer, self._incoming(peer), round_number=0)
        if self._two_rounds:
            # Safe this early, though the first round still reads these shards: a peer sends the sum of a
            # segment only after it has received this rank's part of it.
            for peer in self._peers:
                self._second_receives += self._post(receive, peer, self._shard(peer), round_number=1)

    def _post_sends(self) -> None:
        channel = channel_of(self._process_group)
        for peer in self._peers:
            if not self._sent_slots or self._differs_by_peer():
                self._sent_slots.append(self._write_slot(self._outgoing(peer), self._lay_out(peer)))
            try:
                self._sends.append(_Message(peer, 0, channel.send(self._sent_slots[-1], peer)))
            except RuntimeError as error:
                self._refuse(peer, error)
        if not self._inline and self._refused is None:
            self._post_data_sends()

    def _post_data_sends(self) -> None:
        for peer in self._peers:
            self._sends += self._post(send, peer, self._outgoing(peer), round_number=0)

    def _differs_by_peer(self) -> bool:
        """Whether the first message is another one for every peer."""
        return self._inline and self._call.op == "reduce_scatter"

    def _lay_out(self, peer: int) -> Place:
        """Where the peer finds what goes to it, if it need not be sent."""
        return NOWHERE

    def _refuse(self, peer: int, error: RuntimeError) -> None:
        """The connection is known to be closed. The other peers still hear from this rank: to them it is not gone."""
        if self._refused is None:
            self._refused = PeerError(self._with_rank(peer, error), peer=peer)

    def _write_slot(self, payload: torch.Tensor, place: Place) -> Slot:
        slot = SCRATCH.take_slot()
        slot.write_header(self._header.numbers, place=place)
        if self._inline and payload.numel():
            slot.payload(payload.numel(), payload.dtype).copy_(payload)
        return slot

    def _post(
        self,
        direction: Callable[[torch.Tensor, dist.ProcessGroup, int, int], dist.Work],
        peer: int,
        part: torch.Tensor,
        *,
        round_number: int,
        segment_number: int | None = None,
    ) -> list[_Message]:
        messages = []
        for number, segment in enumerate(self._segments(part)):
            if segment_number in (None, number):
                tag = self._header.tag_of(round_number, number)
                messages.append(_Message(peer, number, direction(segment, self._process_group, peer, tag)))
        return messages

    # -- completion -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the messages and add what came. Raises PeerError, or CollectiveError for a mismatch."""
        self._deadline = time.monotonic() + self._group.timeout_seconds
        self._take_headers()
        # A tensor made in inference mode may be waited for outside of it.
        with torch.inference_mode() if self._buffer.is_inference() else nullcontext():
            if self._inline:
                self._take_payloads()
            else:
                self._take_data()
        self._wait_all(self._sends)
        for scratch in self._scratch:
            SCRATCH.give(scratch)
        for slot in (*self._sent_slots, *self._header_slots.values()):
            SCRATCH.give_slot(slot)

    def _take_headers(self) -> None:
        try:
            while self._header_receives:
                peer = self._header_receives[0].peer
                self._wait(self._header_receives.pop(0))
                self._check_header(peer)
        except PeerError as error:
            raise self._diagnosis(error) from None

    def _check_header(self, peer: int) -> None:
        numbers, self._places[peer] = self._header_slots[peer].read_header()
        theirs = Header(numbers)
        if theirs != self._header:
            ranks = self._group.ranks
            raise CollectiveError(self._header.difference(theirs, rank=ranks[self._group.rank], peer_rank=ranks[peer]))

    def _diagnosis(self, error: PeerError) -> Exception:
        """A rank that left may have left because of a mismatch that another header shows; and who is missing?"""
        missing = [str(self._group.ranks[error.peer])]
        for message in self._header_receives:
            try:
                message.work.wait(timedelta(seconds=_PROBE_SECONDS))
            except RuntimeError:
                missing.append(str(self._group.ranks[message.peer]))
                continue
            try:
                self._check_header(message.peer)
            except CollectiveError as mismatch:
                return mismatch
        return PeerError(f"{error}; nothing came from rank {', '.join(missing)}", peer=error.peer)

    def _take_payloads(self) -> None:
        if self._call.reduction:
            pieces = {
                peer: slot.payload(self._own().numel(), self._call.dtype) for peer, slot in self._header_slots.items()
            }
            rank, reduction = self._group.rank, self._call.reduction
            combine(self._own(), pieces, rank=rank, reduction=reduction, out=self._target())
            return
        for peer, slot in self._header_slots.items():
            incoming = self._incoming(peer)
            if incoming.numel():
                incoming.copy_(slot.payload(incoming.numel(), incoming.dtype))

    def _take_data(self) -> None:
        if self._call.reduction:
            self._add_segments()
        self._wait_all(self._receives)
        self._wait_all(self._second_receives)

    def _add_segments(self) -> None:
        own = self._segments(self._own())
        targets = self._segments(self._target())
        others = {peer: self._segments(part) for peer, part in self._landing.items()}
        if self._whole:
            # The sums are written where the messages are read from. (An own shard is sent to nobody.)
            self._wait_all(self._sends)
        for number, segment in enumerate(own):
            self._wait_all(self._receives, segment=number)
            pieces = {peer: segments[number] for peer, segments in others.items()}
            rank, reduction = self._group.rank, self._call.reduction
            combine(segment, pieces, rank=rank, reduction=reduction, out=targets[number])
            if self._two_rounds:
                for peer in self._peers:
                    self._sends += self._post(send, peer, self._own(), round_number=1, segment_number=number)

    def _wait_all(self, messages: list[_Message], *, segment: int | None = None) -> None:
        """Wait for the messages (of one segment, if given) and drop them: gloo waits once for each, not twice."""
        waited = [message for message in messages if segment in (None, message.segment)]
        for message in waited:
            messages.remove(message)
            self._wait(message)

    def _wait(self, message: _Message) -> None:
        remaining_seconds = max(self._deadline - time.monotonic(), 0.001)
        try:
            message.work.wait(timedelta(seconds=remaining_seconds))
        except RuntimeError as error:
            raise PeerError(self._with_rank(message.peer, error), peer=message.peer) from None

    def _with_rank(self, peer: int, error: RuntimeError) -> str:
        return f"with rank {self._group.ranks[peer]}: {first_sentence(str(error))}"
