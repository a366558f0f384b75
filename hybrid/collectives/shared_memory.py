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

Nobody waits for room: an arena has as many addresses as the machine has memory. A page takes memory from its first use
on, and gives it back when some hundred messages have not needed it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from hybrid.errors import CollectiveError, LaunchError

__all__ = [
    "NOWHERE",
    "OFF_VARIABLE",
    "PIECE_BYTES",
    "Arena",
    "Introduction",
    "Neighbour",
    "Place",
    "arena",
    "forget_arena",
    "introduction",
    "is_wanted",
    "neighbours",
    "piece_elements",
]

OFF_VARIABLE: Final = "HYBRID_SHARED_MEMORY"  # "0": this process takes no part, all its messages go over gloo
_WORDS: Final = {"": True, "1": True, "on": True, "true": True, "yes": True} | dict.fromkeys(
    ("0", "off", "false", "no"), False
)
_ALIGNMENT_BYTES = 64
_TOKEN_BYTES = 16
_LINK_BEGINS = "/memfd:hybrid"
_TRIM_EVERY = 128  # messages: all of some steps
PIECE_BYTES: Final = 4 << 20
"""A large message is read in pieces, for the pages of a neighbour count as memory of this process while it reads them.

Adding up 32 MB takes as long as from pages that stay, 7.9 ms; in pieces of 1 MB 8.7 ms.
"""
_LEAST_LEFT_BYTES = 1 << 18  # smaller ones lie where other small ones have lain


class Place(NamedTuple):
    """Where a message lies in its sender's arena."""

    marks: int
    """Offset of the readers' marks."""
    start: int
    """Offset of the bytes."""

    def after(self, num_bytes: int) -> Place:
        """The rest of the message, without its first bytes."""
        return self._replace(start=self.start + num_bytes)


NOWHERE: Final = Place(-1, -1)
"""Of a message that has nothing to lay out."""


class Introduction(NamedTuple):
    """By what other processes find the arena of this one, and know that it is the right one."""

    boot: str
    """Of the running kernel: process numbers mean something under the same one only."""
    process: int
    descriptor: int
    num_bytes: int
    token: bytes


def _elements(memory: mmap.mmap, start: int, *, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A range as a tensor, of no more than these bytes: whoever counts live tensors does not count the addresses."""
    if num_elements == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_elements * dtype.itemsize, offset=start).view(dtype)


@dataclass(slots=True, weakref_slot=True)
class _Lent:
    start: int
    end: int
    marks: int
    held: bool = False
    """A tensor of this process sees it."""

    def let_go(self) -> None:
        self.held = False


class Arena:
    """The memory of this process. Threads may share it.

    Raises:
        OSError: the system gives none.
    """

    def __init__(self, num_bytes: int | None = None) -> None:
        self.process = os.getpid()
        self._num_bytes = _machine_bytes() if num_bytes is None else num_bytes
        descriptor = os.memfd_create("hybrid", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, self._num_bytes)
            self._memory = mmap.mmap(descriptor, self._num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(self, os.close, descriptor).atexit = False
        self.descriptor = descriptor
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._memory[:_TOKEN_BYTES] = self._token
        self._lent: list[_Lent] = []  # by start
        self._lock = threading.RLock()
        self._used = self._recent = self._before = _ALIGNMENT_BYTES
        self._num_lent = 0
        self.sent_bytes = 0
        """What all readers together have been given."""

    def introduction(self) -> Introduction:
        return Introduction(_boot(), self.process, self.descriptor, self._num_bytes, self._token)

    def empty(self, num_elements: int, dtype: torch.dtype, *, marks: int) -> torch.Tensor:
        """A flat buffer whose bytes can be sent without a copy; its memory is taken back when no tensor sees it.

        Args:
            marks: ranks of the group that will read it.
        """
        num_bytes = num_elements * dtype.itemsize
        with self._lock:
            lent = self._find_room(_rounded(marks) + _rounded(num_bytes), b"\1" * marks)
            lent.held = True
        memory = (ctypes.c_char * num_bytes).from_buffer(self._memory, lent.start + _rounded(marks))
        weakref.finalize(memory, lent.let_go).atexit = False
        return torch.frombuffer(memory, dtype=dtype)

    @torch.no_grad()
    def lend(self, part: torch.Tensor, *, readers: Iterable[int], marks: int, given_up: bool = False) -> Place:
        """Where `part` can be read until every reader has set its mark.

        Args:
            part: flat and contiguous.
            readers: which of the `marks` ranks of the group will read it.
            given_up: nobody will write to its memory again. If that is a buffer of `empty`, it is read there.

        Raises:
            CollectiveError: there is no room.
        """
        readers = list(readers)
        unread = bytearray(b"\1" * marks)
        for reader in readers:
            unread[reader] = 0
        with self._lock:
            self.sent_bytes += part.nbytes * len(readers)
            if given_up and (place := self._in_place(part, readers, marks)) is not None:
                return place
            lent = self._find_room(_rounded(marks) + _rounded(part.nbytes), bytes(unread))
        start = lent.start + _rounded(marks)
        _elements(self._memory, start, num_elements=part.numel(), dtype=part.dtype).copy_(part)
        return Place(lent.start, start)

    def _in_place(self, part: torch.Tensor, readers: Sequence[int], marks: int) -> Place | None:
        offset, raw = part.data_ptr() - self._address, self._memory
        lent = next((one for one in self._lent if one.held and one.start <= offset < one.end), None)
        # One mark cannot stand for two messages.
        if lent is None or lent.marks != marks or any(raw[lent.start + reader] == 0 for reader in readers):
            return None
        for reader in readers:
            raw[lent.start + reader] = 0
        return Place(lent.start, offset)

    def _find_room(self, num_bytes: int, marks: bytes) -> _Lent:
        """The first gap that is large enough: what is used again soon is in the caches, and its pages are there."""
        self._free()
        index, start = len(self._lent), _ALIGNMENT_BYTES  # after the token
        for place, lent in enumerate(self._lent):
            if lent.start - start >= num_bytes:
                index = place
                break
            start = lent.end
        if self._num_bytes - start < num_bytes:
            raise CollectiveError(
                f"{num_bytes} bytes for other ranks of this host find no room beside what these have not read yet, "
                f"{sum(lent.end - lent.start for lent in self._lent)} of {self._num_bytes} bytes; wait for the handles "
                f"of earlier collectives, or set {OFF_VARIABLE}=0"
            )
        self._memory[start : start + len(marks)] = marks
        found = _Lent(start, start + num_bytes, len(marks))
        self._lent.insert(index, found)
        self._used, self._recent = max(self._used, found.end), max(self._recent, found.end)
        self._num_lent += 1
        if self._num_lent % _TRIM_EVERY == 0:
            self._trim()
        return found

    def _free(self) -> None:
        raw = self._memory
        self._lent = [
            lent for lent in self._lent if lent.held or raw[lent.start : lent.start + lent.marks] != b"\1" * lent.marks
        ]

    def _trim(self) -> None:
        """Give back the memory, not the addresses, behind what has been needed lately."""
        top = self._lent[-1].end if self._lent else _ALIGNMENT_BYTES
        page = mmap.PAGESIZE
        begin, end = -(-max(self._recent, self._before, top) // page) * page, -(-self._used // page) * page
        if begin < end and hasattr(mmap, "MADV_REMOVE"):
            self._memory.madvise(mmap.MADV_REMOVE, begin, end - begin)
        self._used, self._before, self._recent = max(self._recent, self._before, top), self._recent, top

    @property
    def lent_bytes(self) -> int:
        """Of places that somebody has not read yet, or buffers that a tensor sees."""
        with self._lock:
            self._free()
            return sum(lent.end - lent.start for lent in self._lent)


class Neighbour:
    """The arena of another process on this host. What it has laid out stays readable when it has ended.

    Raises:
        OSError: it cannot be reached from here, or is not what was introduced.
    """

    def __init__(self, introduced: Introduction) -> None:
        path = f"/proc/{introduced.process}/fd/{introduced.descriptor}"
        # In a container with process numbers of its own the same number is another process. What a stranger has open
        # is not opened here: that could wait for ever, or do something.
        if introduced.boot != _boot() or not os.readlink(path).startswith(_LINK_BEGINS):
            raise OSError(f"{path} is no arena of this host")
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        if os.fstat(self._descriptor).st_size != introduced.num_bytes:
            raise OSError(f"{path} has another size")
        self._memory = mmap.mmap(self._descriptor, introduced.num_bytes)
        if self._memory[:_TOKEN_BYTES] != introduced.token:
            raise OSError(f"{path} is another arena")

    def read(self, place: Place, *, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """What lies there: to be read only, and only until `has_read`."""
        return _elements(self._memory, place.start, num_elements=num_elements, dtype=dtype)

    def copy(self, place: Place, into: torch.Tensor) -> None:
        """What lies there into a flat, contiguous tensor. The system copies, so that no page comes to this process."""
        # Not by `numpy()`, after which torch no longer resizes a storage.
        rest, start = memoryview((ctypes.c_char * into.nbytes).from_address(into.data_ptr())), place.start
        while rest:
            num_bytes = os.preadv(self._descriptor, [rest], start)
            rest, start = rest[num_bytes:], start + num_bytes

    def leave(self, place: Place, num_bytes: int) -> None:
        """These bytes are not needed for now: their pages, which are there once for both, no longer count here."""
        if num_bytes < _LEAST_LEFT_BYTES:
            return
        begin = place.start // mmap.PAGESIZE * mmap.PAGESIZE
        self._memory.madvise(mmap.MADV_DONTNEED, begin, place.start + num_bytes - begin)

    def has_read(self, place: Place, *, reader: int) -> None:
        """The reader (index in the group) will not look there again."""
        self._memory[place.marks + reader] = 1


def piece_elements(dtype: torch.dtype) -> int:
    """Of a large message, what is read at a time."""
    return PIECE_BYTES // dtype.itemsize


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# At most one, of this very process: after a fork the child makes its own.
_arenas: list[Arena] = []


def arena() -> Arena:
    """The one of this process, made at the first call. Raises OSError where the system gives none."""
    if not _arenas or _arenas[0].process != os.getpid():
        _arenas[:] = [Arena()]
    return _arenas[0]


def forget_arena() -> None:
    """The process groups are gone: the next ones get memory of their own, with nothing in it that was never read."""
    _arenas.clear()


def is_wanted() -> bool:
    """What the environment says. Raises LaunchError for a word that says nothing."""
    word = os.environ.get(OFF_VARIABLE, "").strip().lower()
    if word not in _WORDS:
        raise LaunchError(f"{OFF_VARIABLE}={os.environ[OFF_VARIABLE]!r}: expected 1 (the default) or 0")
    return _WORDS[word]


def introduction() -> Introduction | None:
    """What this process tells the others; None if it takes no part."""
    if not is_wanted():
        return None
    try:
        return arena().introduction()
    except (OSError, AttributeError, ValueError):  # no such call, or not so much
        return None


def neighbours(introductions: Mapping[int, Introduction | None]) -> dict[int, Neighbour]:
    """The arenas that can be reached from here, by rank."""
    found = {}
    for rank, introduced in introductions.items():
        if introduced is not None:
            try:
                found[rank] = Neighbour(introduced)
            except (OSError, ValueError):
                continue
    return found
