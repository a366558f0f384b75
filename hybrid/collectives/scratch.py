"""Receive buffers that are used again.

A fresh buffer of some megabytes for every collective is mapped, page-faulted and unmapped each time, and
fragments the heap. A buffer is lent to one collective at a time and comes back when that one has ended.
"""

from __future__ import annotations

import struct
from collections import defaultdict

import torch

from hybrid.collectives.shared_memory import Place

__all__ = ["HEADER_BYTES", "INLINE_BYTES", "SCRATCH", "ScratchPool", "Slot"]

# Whole elements of the largest dtype, complex128: what is behind it is seen as elements.
HEADER = struct.Struct("<9q8x")
HEADER_BYTES = HEADER.size
SLOT_BYTES = 4096
INLINE_BYTES = SLOT_BYTES - HEADER_BYTES
_GRAIN_BYTES = 4096


class Slot:
    """A message of one fixed size: a header and, if it is small enough, the payload behind it."""

    __slots__ = ("_raw", "tensor")

    def __init__(self) -> None:
        self._raw = bytearray(SLOT_BYTES)
        self.tensor = torch.frombuffer(self._raw, dtype=torch.uint8)

    def write_header(self, header: tuple[int, ...], *, place: Place) -> None:
        """What all ranks of a call say alike, and where this one's bytes lie."""
        HEADER.pack_into(self._raw, 0, *header, *place)

    def read_header(self) -> tuple[tuple[int, ...], Place]:
        *header, marks, start = HEADER.unpack_from(self._raw, 0)
        return tuple(header), Place(marks, start)

    def payload(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """The bytes behind the header, seen as elements."""
        return self.tensor[HEADER_BYTES : HEADER_BYTES + num_elements * dtype.itemsize].view(dtype)


class ScratchPool:
    """Free buffers by size; sizes are rounded up to whole pages so that nearly equal shards share them."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._slots: list[Slot] = []
        self.total_bytes = 0
        """Bytes of all buffers that were made and not cleared, lent ones included."""

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised 1-D buffer; give it back with `give`."""
        num_bytes = -(-num_elements * dtype.itemsize // _GRAIN_BYTES) * _GRAIN_BYTES
        free = self._free[num_bytes]
        if free:
            raw = free.pop()
        else:
            raw = torch.empty(num_bytes, dtype=torch.uint8)
            self.total_bytes += num_bytes
        return raw.view(dtype)[:num_elements]

    def give(self, buffer: torch.Tensor) -> None:
        raw = buffer.new_empty(0, dtype=torch.uint8)
        storage = buffer.untyped_storage()
        raw.set_(storage, 0, (storage.nbytes(),), (1,))
        self._free[storage.nbytes()].append(raw)

    def take_slot(self) -> Slot:
        return self._slots.pop() if self._slots else Slot()

    def give_slot(self, slot: Slot) -> None:
        self._slots.append(slot)

    def clear(self) -> None:
        """Forget the free buffers, so that their memory returns to the allocator."""
        self.total_bytes -= sum(size * len(free) for size, free in self._free.items())
        self._free.clear()
        self._slots.clear()


# One pool for the process: what one group has finished with serves the next.
SCRATCH = ScratchPool()
