"""Numbers that look random and are the same on every rank and every kind of device."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch

__all__ = ["even_noise"]

_BITS = 24


def even_noise(shape: Sequence[int], *, name: str, device: torch.device) -> torch.Tensor:
    """Uniform, of mean 0 and deviation 1, in float32; another for each name.

    Whole numbers only, until the last step: generators of other devices draw others.
    """
    number = torch.arange(math.prod(shape), dtype=torch.int64, device=device)
    number.add_(zlib.crc32(name.encode()))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        number.bitwise_xor_(number >> shift).mul_(factor).bitwise_and_(0xFFFFFFFF)
    uniform = (number >> (32 - _BITS)).to(torch.float32).div_(2**_BITS).sub_(0.5 - 2.0 ** (-_BITS - 1))
    return uniform.mul_(math.sqrt(12.0)).view(tuple(shape))
