"""Memory in which a process lays out what it sends to ranks on its own host, and which they read in place.

A loopback connection copies every byte twice through the kernel, in threads that take the cores from the computation.
Here the sender copies once, and the receiver adds (or copies) straight from there. Only the word that something lies
there still goes over gloo: who is late, gone, or launched something else is found as on every other way.

    arena       one per process: anonymous memory, gone with the last process that knows it
    place       a range of it that is lent to one message: marks of its readers, one byte for each rank of the group,
                then the bytes. It is free again when all marks are set
    buffer      a range that the program works in (`empty`). What is sent of it, and given up, is read where it lies;
                the range is free when no tensor sees it any more and all marks are set
    neighbour   another rank's arena, seen from here

Nobody waits for room: an arena grows by another segment, which gives its memory back when all of it is free.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

__all__ = [
    "NOWHERE",
    "OFF_VARIABLE",
    "SEGMENT_BYTES",
    "Arena",
    "Introduction",
    "Neighbour",
    "Place",
    "arena",
    "introduction",
    "neighbours",
]

OFF_VARIABLE: Final = "HYBRID_SHARED_MEMORY"  # "0": this process takes no part, all its messages go over gloo
# Enough for the gradients in flight of a model of 40 M parameters. A page costs memory from its first use on only.
SEGMENT_BYTES: Final = 256 << 20
_ALIGNMENT_BYTES = 64
_TOKEN_BYTES = 16
_LINK_BEGINS = "/memfd:hybrid"
# The segment's file descriptor and an offset in one number.
_OFFSET_BITS = 44
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1


class Place(NamedTuple):
    """Where a message lies in its sender's arena."""

    marks: int
    """Segment, and offset of the readers' marks."""
    start: int
    """Offset of the bytes."""


NOWHERE: Final = Place(-1, -1)
"""Of a message that has nothing to lay out."""


class Introduction(NamedTuple):
    """By what other processes find the arena of this one, and know that it is the right one."""

    boot: str
    """Of the running kernel: process numbers mean something under the same one only."""
    process: int
    descriptor: int
    """Of the first segment; a place names that of its own."""
    token: bytes


class _Mapping:
    """A file in memory as bytes and as a tensor."""

    def __init__(self, descriptor: int) -> None:
        self.num_bytes = os.fstat(descriptor).st_size
        self.raw = mmap.mmap(descriptor, self.num_bytes)
        self.bytes = torch.frombuffer(self.raw, dtype=torch.uint8)

    def elements(self, start: int, *, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return self.bytes[start : start + num_elements * dtype.itemsize].view(dtype)


@dataclass(slots=True, weakref_slot=True)
class _Lent:
    start: int
    end: int
    marks: int
    held: bool = False
    """A tensor of this process sees it."""

    def let_go(self) -> None:
        self.held = False


class _Segment:
    """One piece of an arena. Raises OSError where the system gives none."""

    def __init__(self, num_bytes: int) -> None:
        self.descriptor = os.memfd_create("hybrid", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, num_bytes)
        self.mapping = _Mapping(self.descriptor)
        self.address = self.mapping.bytes.data_ptr()
        self._lent: list[_Lent] = []  # by start

    def lend(self, num_bytes: int, *, marks: bytes) -> _Lent | None:
        """A range with these marks; None if there is no room.

        The first gap that is large enough: what is used again soon is in the caches, and its pages are there.
        """
        self.free()
        index, start = len(self._lent), _ALIGNMENT_BYTES  # after the token
        for place, lent in enumerate(self._lent):
            if lent.start - start >= num_bytes:
                index = place
                break
            start = lent.end
        if self.mapping.num_bytes - start < num_bytes:
            return None
        self.mapping.raw[start : start + len(marks)] = marks
        lent = _Lent(start, start + num_bytes, len(marks))
        self._lent.insert(index, lent)
        return lent

    def free(self) -> bool:
        """Take back what has been read; whether that was the last of it."""
        held = bool(self._lent)
        raw = self.mapping.raw
        self._lent = [
            lent for lent in self._lent if lent.held or raw[lent.start : lent.start + lent.marks] != b"\1" * lent.marks
        ]
        return held and not self._lent

    def held_at(self, address: int) -> _Lent | None:
        """The buffer that lies at this address of the process."""
        offset = address - self.address
        if not 0 <= offset < self.mapping.num_bytes:
            return None
        return next((lent for lent in self._lent if lent.held and lent.start <= offset < lent.end), None)

    def give_back(self) -> None:
        """The memory, not the range of addresses: the next use begins with zeros."""
        self.mapping.raw.madvise(mmap.MADV_REMOVE)

    @property
    def lent_bytes(self) -> int:
        self.free()
        return sum(lent.end - lent.start for lent in self._lent)


class Arena:
    """The memory of this process. Raises OSError where the system gives none."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._segments = [_Segment(SEGMENT_BYTES)]
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._segments[0].mapping.raw[:_TOKEN_BYTES] = self._token
        self.sent_bytes = 0
        """What all readers together have been given."""

    def introduction(self) -> Introduction:
        return Introduction(_boot(), self.process, self._segments[0].descriptor, self._token)

    def empty(self, num_elements: int, dtype: torch.dtype, *, marks: int) -> torch.Tensor:
        """A flat buffer whose bytes can be sent without a copy; its memory is taken back when no tensor sees it.

        Args:
            marks: ranks of the group that will read it.
        """
        num_bytes = num_elements * dtype.itemsize
        segment, lent = self._find_room(_rounded(marks) + _rounded(num_bytes), b"\1" * marks)
        lent.held = True
        memory = (ctypes.c_char * num_bytes).from_buffer(segment.mapping.raw, lent.start + _rounded(marks))
        weakref.finalize(memory, lent.let_go).atexit = False
        return torch.frombuffer(memory, dtype=dtype)

    @torch.no_grad()
    def lend(self, part: torch.Tensor, *, readers: Iterable[int], marks: int, given_up: bool = False) -> Place:
        """Where `part` can be read until every reader has set its mark.

        Args:
            part: flat and contiguous.
            readers: which of the `marks` ranks of the group will read it.
            given_up: nobody will write to its memory again. If that is a buffer of `empty`, it is read there.
        """
        readers = list(readers)
        self.sent_bytes += part.nbytes * len(readers)
        if given_up and (place := self._in_place(part, readers, marks)) is not None:
            return place
        unread = bytearray(b"\1" * marks)
        for reader in readers:
            unread[reader] = 0
        segment, lent = self._find_room(_rounded(marks) + _rounded(part.nbytes), bytes(unread))
        start = lent.start + _rounded(marks)
        segment.mapping.elements(start, num_elements=part.numel(), dtype=part.dtype).copy_(part)
        return Place(segment.descriptor << _OFFSET_BITS | lent.start, start)

    def _in_place(self, part: torch.Tensor, readers: Sequence[int], marks: int) -> Place | None:
        address = part.data_ptr()
        for segment in self._segments:
            lent = segment.held_at(address)
            if lent is None or lent.marks != marks:
                continue
            raw = segment.mapping.raw
            if any(raw[lent.start + reader] == 0 for reader in readers):
                return None  # one mark cannot stand for two messages
            for reader in readers:
                raw[lent.start + reader] = 0
            return Place(segment.descriptor << _OFFSET_BITS | lent.start, address - segment.address)
        return None

    def _find_room(self, num_bytes: int, marks: bytes) -> tuple[_Segment, _Lent]:
        for later in self._segments[1:]:
            if later.free():
                later.give_back()
        for segment in self._segments:
            if (lent := segment.lend(num_bytes, marks=marks)) is not None:
                return segment, lent
        # Segments stay for good: a descriptor that came to mean another file would mislead whoever has it mapped.
        self._segments.append(_Segment(max(SEGMENT_BYTES, _ALIGNMENT_BYTES + num_bytes)))
        lent = self._segments[-1].lend(num_bytes, marks=marks)
        assert lent is not None
        return self._segments[-1], lent

    @property
    def lent_bytes(self) -> int:
        """Of places that somebody has not read yet."""
        return sum(segment.lent_bytes for segment in self._segments)


class Neighbour:
    """The arena of another process on this host.

    Raises:
        OSError: it cannot be reached from here, or is not what was introduced.
    """

    def __init__(self, introduced: Introduction) -> None:
        self._process = introduced.process
        self._segments: dict[int, _Mapping] = {}
        # In a container with process numbers of its own the same number is another process.
        if introduced.boot != _boot():
            raise OSError("another host")
        first = self._segment(introduced.descriptor)
        if first.raw[:_TOKEN_BYTES] != introduced.token:
            raise OSError(f"process {introduced.process} has another arena")

    def read(self, place: Place, *, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """What lies there: to be read only, and only until `has_read`."""
        segment = self._segment(place.marks >> _OFFSET_BITS)
        return segment.elements(place.start, num_elements=num_elements, dtype=dtype)

    def has_read(self, place: Place, *, reader: int) -> None:
        """The reader (index in the group) will not look there again."""
        self._segment(place.marks >> _OFFSET_BITS).raw[(place.marks & _OFFSET_MASK) + reader] = 1

    def _segment(self, descriptor: int) -> _Mapping:
        if descriptor not in self._segments:
            path = f"/proc/{self._process}/fd/{descriptor}"
            # What a stranger has open is not opened here: that could wait for ever, or do something.
            if not os.readlink(path).startswith(_LINK_BEGINS):
                raise OSError(f"{path} is no arena")
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._segments[descriptor] = _Mapping(opened)
            finally:
                os.close(opened)
        return self._segments[descriptor]


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


# At most one, of this very process: after a fork the child makes its own.
_arenas: list[Arena] = []


def arena() -> Arena:
    """The one of this process, made at the first call. Raises OSError where the system gives none."""
    if not _arenas or _arenas[0].process != os.getpid():
        _arenas[:] = [Arena()]
    return _arenas[0]


def introduction() -> Introduction | None:
    """What this process tells the others; None if it takes no part."""
    if os.environ.get(OFF_VARIABLE) == "0":
        return None
    try:
        return arena().introduction()
    except OSError:
        return None


def neighbours(introductions: Mapping[int, Introduction | None]) -> dict[int, Neighbour]:
    """The arenas that can be reached from here, by rank."""
    found = {}
    for rank, introduced in introductions.items():
        if introduced is not None:
            try:
                found[rank] = Neighbour(introduced)
            except OSError:
                continue
    return found
