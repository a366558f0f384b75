"""Ranks that meet over a gloo group of their own, from any thread, and name whoever does not come.

The calls of `ops` belong to the training: they are deferred in tests, traced, and kept for messages. Work beside the
training has no part in any of it. And it can wait: a rank that finds another one gone still waits for all that are
alive before it says so. Otherwise it would leave first, and the others would take it for the one that failed.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybrid.collectives.call import first_sentence
from hybrid.collectives.channel import receive, send
from hybrid.collectives.group import Group
from hybrid.errors import CollectiveError

__all__ = ["Word", "gather_bytes", "meet"]

# One message of fixed size per pair of ranks: gloo must know the size before.
_MESSAGE_BYTES = 4096
_HEAD = struct.Struct("<qq")  # the number, bytes of the text
_FIRST_TAG = 1 << 20
_NUM_TAGS = 1 << 20


class Word(NamedTuple):
    """What a rank says to all others."""

    text: str = ""
    number: int = 0


def meet(word: Word, *, group: Group) -> list[Word]:
    """The word of every rank, in group order, when all have come. A text that is too long is cut.

    Raises:
        CollectiveError: which ranks are gone, or did not come within the timeout.
    """
    if group.size == 1:
        return [word]
    assert group.process_group is not None
    tag = _next_tag(group)
    mine = _packed(word)
    theirs = {peer: torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8) for peer in group.peers}
    missing = _Missing(group)
    receives: dict[int, dist.Work] = {}
    sends: dict[int, dist.Work] = {}
    for peer in group.peers:
        with missing.unless_heard(peer):
            receives[peer] = receive(theirs[peer], group.process_group, peer, tag)
    for peer in group.peers:
        with missing.unless_heard(peer):
            sends[peer] = send(mine, group.process_group, peer, tag)
    for peer, work in receives.items():
        with missing.unless_heard(peer):
            work.wait(missing.remaining())
    for peer, work in sends.items():
        # Who has spoken has come, and listens: this takes no time. Who has not is known already.
        if peer not in missing.reasons:
            with missing.unless_heard(peer):
                work.wait(missing.remaining())
    missing.check()
    return [word if rank == group.rank else _unpacked(theirs[rank]) for rank in range(group.size)]


def gather_bytes(data: bytes, sizes: Sequence[int], *, group: Group) -> list[bytes]:
    """The data of every rank, on the first one of the group; nothing on the others.

    Args:
        sizes: of every rank's data, as they told each other in `meet`.

    Raises:
        CollectiveError: which ranks are gone, or did not send within the timeout.
    """
    if group.size == 1:
        return [data]
    assert group.process_group is not None
    tag = _next_tag(group)
    missing = _Missing(group)
    if group.rank != 0:
        if data:
            with missing.unless_heard(0):
                send(_tensor(data), group.process_group, 0, tag).wait(missing.remaining())
        missing.check()
        return []
    buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    works: dict[int, dist.Work] = {}
    for peer in group.peers:
        if sizes[peer]:
            with missing.unless_heard(peer):
                works[peer] = receive(buffers[peer], group.process_group, peer, tag)
    for peer, work in works.items():
        with missing.unless_heard(peer):
            work.wait(missing.remaining())
    missing.check()
    return [data, *(buffer.numpy().tobytes() for buffer in buffers[1:])]


class _Missing:
    """The ranks that were not heard, and why; the time that is left to hear them."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._deadline = time.monotonic() + group.timeout_seconds
        self._peer = -1
        self.reasons: dict[int, str] = {}

    def remaining(self) -> timedelta:
        return timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))

    def unless_heard(self, peer: int) -> _Missing:
        self._peer = peer
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, RuntimeError):
            return False
        late = time.monotonic() >= self._deadline
        reason = f"did not come within {self._group.timeout_seconds:g} s" if late else "is gone"
        self.reasons.setdefault(self._peer, f"{reason} ({first_sentence(str(error))})")
        return True

    def check(self) -> None:
        if self.reasons:
            ranks = self._group.ranks
            said = "; ".join(f"rank {ranks[peer]} {reason}" for peer, reason in sorted(self.reasons.items()))
            raise CollectiveError(f"rank {ranks[self._group.rank]}: {said}")


def _next_tag(group: Group) -> int:
    """Messages of two meetings never meet."""
    return _FIRST_TAG + next(group.sequence) % _NUM_TAGS


def _packed(word: Word) -> torch.Tensor:
    text = word.text.encode()[: _MESSAGE_BYTES - _HEAD.size]
    return _tensor((_HEAD.pack(word.number, len(text)) + text).ljust(_MESSAGE_BYTES, b"\0"))


def _unpacked(message: torch.Tensor) -> Word:
    raw = message.numpy().tobytes()
    number, length = _HEAD.unpack_from(raw)
    return Word(raw[_HEAD.size : _HEAD.size + length].decode(errors="ignore"), number)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
