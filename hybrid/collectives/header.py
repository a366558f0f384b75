"""What a rank tells its peers about a call before any data move."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch

from hybrid.collectives.call import Call

__all__ = ["Header"]

_OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
_REDUCTIONS = ("", "sum", "max", "min")
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
)
_FIRST_DATA_TAG = 2
_NUM_TAGS = 2**31 - 16 - _FIRST_DATA_TAG  # the last ones are those of `point_to_point`


class Header(NamedTuple):
    """Equal on all ranks of one call."""

    numbers: tuple[int, ...]
    """Sequence number, operation, reduction, dtype, elements, the caller's tag, checksum of the rest."""

    @classmethod
    def of(cls, call: Call) -> Header:
        rest = repr((call.group.axis, call.group.ranks, call.bounds, call.source, call.control))
        return cls(
            (
                next(call.group.sequence),
                _OPS.index(call.op),
                _REDUCTIONS.index(call.reduction),
                _DTYPES.index(call.dtype),
                call.num_elements,
                call.tag,
                zlib.crc32(rest.encode()),
            )
        )

    def tag_of(self, round_number: int, segment_number: int) -> int:
        """gloo's tag for a data message; calls that differ in anything do not hear each other's data."""
        return zlib.crc32(repr((self.numbers, round_number, segment_number)).encode()) % _NUM_TAGS + _FIRST_DATA_TAG

    def difference(self, theirs: Header, *, rank: int, peer_rank: int) -> str:
        """The sentence for two ranks that launched unequal calls."""
        return (
            f"rank {rank} and rank {peer_rank} did not launch the same collective: "
            f"rank {rank} launched {self}; rank {peer_rank} launched {theirs}{_hint(self.numbers, theirs.numbers)}"
        )

    def __str__(self) -> str:
        sequence, op, reduction, dtype, num_elements, tag, _ = self.numbers
        size_bytes = num_elements * _DTYPES[dtype].itemsize
        name = f"{_OPS[op]}({_REDUCTIONS[reduction]})" if reduction else _OPS[op]
        dtype_name = str(_DTYPES[dtype]).removeprefix("torch.")
        return f"{name} of {num_elements} {dtype_name} ({size_bytes} bytes), tag {tag}, as number {sequence}"


def _hint(ours: tuple[int, ...], theirs: tuple[int, ...]) -> str:
    if ours[:6] == theirs[:6]:
        return "; they differ in the shard bounds, the source or the axis"
    if ours[0] == theirs[0] and ours[4] != theirs[4]:
        return "; all ranks must pass buffers of one size"
    return "; all ranks must launch the same collectives in the same order"
