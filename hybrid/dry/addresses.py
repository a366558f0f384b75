"""Memory that nobody touches, and a sentence where even that cannot be had."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence

import torch

from hybrid.errors import ModelError

__all__ = ["is_refusal", "too_large", "untouched"]

_REFUSALS = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")
# As in Linux' mman.h, on the processors for which there is a torch; Python has no name for it before 3.13.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def untouched(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory that nobody touches: also more than this machine has, which most systems give where nobody reserves it."""
    try:
        return torch.empty_strided(shape, strides, dtype=dtype)
    except RuntimeError as error:
        if not is_refusal(error):
            raise
        num_elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if not sys.platform.startswith("linux"):
            raise too_large(num_elements * dtype.itemsize, error) from None
        try:
            memory = mmap.mmap(
                -1, num_elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
            )
        except (OSError, ValueError, OverflowError) as refused:
            raise too_large(num_elements * dtype.itemsize, refused) from None
        return torch.frombuffer(memory, dtype=dtype).as_strided(tuple(shape), tuple(strides))


def is_refusal(error: RuntimeError) -> bool:
    return any(text in str(error) for text in _REFUSALS)


def too_large(num_bytes: int, error: Exception) -> ModelError:
    return ModelError(
        f"a tensor of {num_bytes:,} bytes is more than this machine gives addresses for, though nobody would touch it "
        f"({str(error).splitlines()[0][:120]}): give fewer tokens (--seq) or a smaller micro_batch_size"
    )
