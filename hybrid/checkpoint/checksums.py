"""Checksums of files: XXH3-64, computed in blocks while a file is written, and again when it is checked.

XXH3 finds damage (a flipped bit, a file that ends early), at the speed of memory. It is no defence against somebody who
means to deceive.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from xxhash import xxh3_64

__all__ = ["BLOCK_BYTES", "Checksum", "file_checksum"]

# Hashed and written, or read and hashed, while the block is still in the cache of its core.
BLOCK_BYTES = 2**20


class Checksum:
    """The sum of what has been given to `update` so far."""

    def __init__(self) -> None:
        self._state = xxh3_64()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._state.update(data)

    def text(self) -> str:
        """16 hexadecimal digits."""
        return self._state.hexdigest()


def file_checksum(path: Path, *, on_progress: Callable[[int], None] | None = None) -> str:
    """The sum of a file's content; `on_progress` gets the number of bytes of each block that was read.

    Raises:
        OSError: the file cannot be read.
    """
    checksum = Checksum()
    block = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # not everywhere; only a hint to read ahead
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while num_bytes := file.readinto(block):
            checksum.update(block[:num_bytes])
            if on_progress is not None:
                on_progress(num_bytes)
    return checksum.text()
