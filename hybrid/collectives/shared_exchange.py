"""Collectives of ranks on one host: headers over gloo, data through shared memory.

What is sent is laid out in the arena of this process at the launch, once, however many ranks read it; the header says
where. Whoever waits adds it up, or copies it, from the arenas of the others, and marks it as read.

    operation                 lays out                        reads of peer p
    reduce_scatter            every other rank's range        own range, added
    all_gather                own range                       p's range, copied
    broadcast                 all of it (source only)         all of it (of the source only), copied
    all_reduce, small or      all of it                       all of it, added
    on two ranks
    all_reduce, large         every other rank's range, then  own range, added; then
                              the sum of the own range        the sum of p's range, copied

Sums are those of the other ways, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hybrid.collectives.call import Call
from hybrid.collectives.channel import receive, send
from hybrid.collectives.exchange import Exchange
from hybrid.collectives.group import Group
from hybrid.collectives.ordered_sum import combine
from hybrid.collectives.shared_memory import NOWHERE, PIECE_BYTES, Place, arena, piece_elements

__all__ = ["SharedExchange"]

_NOTICE_ROUND = 2
"""Apart from the rounds of data: the word that a sum lies there."""


class SharedExchange(Exchange):
    """A launched call in a group whose ranks can all read each other's memory."""

    def __init__(self, call: Call) -> None:
        self._notices: dict[int, torch.Tensor] = {}
        super().__init__(call)

    @classmethod
    def takes_one_round(cls, num_bytes: int, group: Group) -> bool:
        """See `Exchange`. Two ranks copy as many bytes in one round as in two."""
        return group.size == 2 or super().takes_one_round(num_bytes, group)

    @classmethod
    def only_reads(cls, buffer: torch.Tensor, group: Group) -> bool:
        """Whether an all-reduce goes this way, and its sum may go elsewhere while the buffer stays as it is."""
        return bool(group.near) and cls.takes_one_round(buffer.nbytes, group)

    # -- launch ---------------------------------------------------------------------------------------------

    def _post_data_receives(self) -> None:
        if self._two_rounds:
            for peer in self._peers:
                self._notices[peer] = torch.empty(2, dtype=torch.int64)
                self._second_receives += self._post(receive, peer, self._notices[peer], round_number=_NOTICE_ROUND)

    def _differs_by_peer(self) -> bool:
        return super()._differs_by_peer() or (not self._inline and not self._whole and self._call.reduction != "")

    def _lay_out(self, peer: int) -> Place:
        part = self._outgoing(peer)
        if self._inline or not part.numel():
            return NOWHERE
        return self._lend(part, (peer,) if self._differs_by_peer() else self._peers)

    def _lend(self, part: torch.Tensor, readers: Sequence[int]) -> Place:
        given_up = self._call.given_up and not self._two_rounds
        return arena().lend(part, readers=readers, marks=self._group.size, given_up=given_up)

    def _post_data_sends(self) -> None:
        """There is nothing to send beside the headers."""

    # -- completion -----------------------------------------------------------------------------------------

    def _take_data(self) -> None:
        if self._call.reduction and self._own().numel():
            self._add_pieces()
            self._mark_as_read(self._places)
        elif not self._call.reduction:
            self._copy_shards(self._places)
        if self._two_rounds:
            self._exchange_sums()

    def _add_pieces(self) -> None:
        near, rank, reduction, dtype = self._group.near, self._group.rank, self._call.reduction, self._call.dtype
        size = piece_elements(dtype)
        targets = self._target().split(size)
        for number, (own, target) in enumerate(zip(self._own().split(size), targets, strict=True)):
            places = {peer: place.after(number * PIECE_BYTES) for peer, place in self._places.items()}
            others = {p: near[p].read(place, num_elements=own.numel(), dtype=dtype) for p, place in places.items()}
            combine(own, others, rank=rank, reduction=reduction, out=target)
            for peer, place in places.items():
                near[peer].leave(place, own.nbytes)

    def _exchange_sums(self) -> None:
        notice = torch.tensor(self._lend(self._own(), self._peers))
        for peer in self._peers:
            self._sends += self._post(send, peer, notice, round_number=_NOTICE_ROUND)
        self._wait_all(self._second_receives)
        self._copy_shards({peer: Place(*notice.tolist()) for peer, notice in self._notices.items()})

    def _copy_shards(self, places: Mapping[int, Place]) -> None:
        for peer, place in places.items():
            if place != NOWHERE:
                self._group.near[peer].copy(place, self._shard(peer))
        self._mark_as_read(places)

    def _mark_as_read(self, places: Mapping[int, Place]) -> None:
        for peer, place in places.items():
            if place != NOWHERE:
                self._group.near[peer].has_read(place, reader=self._group.rank)
