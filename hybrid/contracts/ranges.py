"""Boxes of flat ranges: in which rectangles of a parameter a contiguous range of its elements lies.

A shard is a contiguous range of the elements in the order in which they lie in memory. A file that any layout can
read knows rectangles in the plain model's coordinates instead. A range of a d-dimensional tensor is at most 2d − 1 of
them:
                              . . . . 0 0          the end of a row
    elements 4 to 20 of 4 × 6 1 1 1 1 1 1          whole rows
                              1 1 1 1 1 1
                              2 2 . . . .          the beginning of a row
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from hybrid.contracts.layout import axis_name, place_on
from hybrid.contracts.placement import Placement

__all__ = ["Piece", "coverage_problem", "deal", "overlap", "pieces", "range_boxes", "write_share"]

Sizes = tuple[int, ...]

# What falls on both sides of a boundary between two writers goes to one of them, unless it is larger than this.
_SMALL_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangle of a parameter, cut from a contiguous range of this rank's memory.

    Args:
        flat_start: first element of the rectangle `block` in memory, counted from the parameter's first.
        block: sizes of that rectangle, in the order of memory (its elements are contiguous).
        inside: where the piece begins in it, in the parameter's order of dims.
        offsets: where the piece begins in the plain model's parameter.
        sizes: the piece's own sizes.
    """

    flat_start: int
    block: Sizes
    inside: Sizes
    offsets: Sizes
    sizes: Sizes


def range_boxes(start: int, stop: int, shape: Sequence[int]) -> tuple[tuple[Sizes, Sizes], ...]:
    """The rectangles (offsets, sizes) of elements `[start, stop)` in row-major order; at most 2d − 1 of them."""
    return tuple(_range_boxes(start, stop, tuple(shape)))


def _range_boxes(start: int, stop: int, shape: Sizes) -> Iterator[tuple[Sizes, Sizes]]:
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if head and first == last:
        yield from _in_row(first, head, tail, shape)
        return
    if head:
        yield from _in_row(first, head, row, shape)
        first += 1
    if last > first:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if tail:
        yield from _in_row(last, 0, tail, shape)


def _in_row(row: int, start: int, stop: int, shape: Sizes) -> Iterator[tuple[Sizes, Sizes]]:
    for offsets, sizes in _range_boxes(start, stop, shape[1:]):
        yield (row, *offsets), (1, *sizes)


def overlap(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[Sizes, Sizes] | None:
    """The rectangle (offsets, sizes) in which two of them meet; None if they do not."""
    begins = tuple(max(a, b) for a, b in zip(offsets, other_offsets, strict=True))
    ends = (min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, other_offsets, other_sizes, strict=True))
    met = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return None if any(size <= 0 for size in met) else (begins, met)


def pieces(placement: Placement, start: int, stop: int, *, order: Sequence[int]) -> list[Piece]:
    """What elements `[start, stop)` of the part that a rank holds are in the plain model's coordinates.

    Args:
        placement: the record of the parameter on this rank.
        start, stop: counted in the order of memory over this rank's part.
        order: dims from the slowest to the fastest in memory: (0, 1, ...) for a contiguous tensor.
    """
    boxes = placement.boxes
    local = tuple(
        max(box.local_start[dim] + box.sizes[dim] for box in boxes) for dim in range(len(placement.global_shape))
    )
    back = [list(order).index(dim) for dim in range(len(local))]
    in_memory = tuple(local[dim] for dim in order)
    found = []
    for begins, block in range_boxes(start, stop, in_memory):
        flat_start = 0
        for begin, size in zip(begins, in_memory, strict=True):
            flat_start = flat_start * size + begin
        here, sizes = tuple(begins[dim] for dim in back), tuple(block[dim] for dim in back)
        for box in boxes:
            met = overlap(here, sizes, box.local_start, box.sizes)
            if met is None:
                continue
            found.append(
                Piece(
                    flat_start=flat_start,
                    block=block,
                    inside=tuple(at - begin for at, begin in zip(met[0], here, strict=True)),
                    offsets=tuple(
                        at - low + high for at, low, high in zip(met[0], box.local_start, box.global_start, strict=True)
                    ),
                    sizes=met[1],
                )
            )
    return found


def write_share(
    placement: Placement,
    coordinates: Mapping[str, int],
    *,
    degree: Callable[[str], int],
    cut_axes: Sequence[str],
) -> tuple[tuple[str, ...], int, int]:
    """(axes, index, count): over which axes other ranks hold the same elements, and which of the copies this one has.

    ZeRO cuts over `cut_axes`.

    Args:
        placement: the record of the parameter on this rank.
        coordinates: this rank's place on each axis.
        degree: size of an axis, or of a part of one.
    """
    widest: dict[str, str] = {}
    for axis in (*placement.copy_axes, *placement.partial_axes):
        name = axis_name(axis)
        if axis not in cut_axes and (name not in widest or degree(axis) > degree(widest[name])):
            widest[name] = axis
    index, count = 0, 1
    for axis in widest.values():
        index, count = index * degree(axis) + place_on(axis, coordinates), count * degree(axis)
    return tuple(widest.values()), index, count


def deal(lengths: Sequence[int], *, index: int, count: int) -> list[tuple[int, int, int]]:
    """The share of one of `count` writers in things of these lengths: (position, start, stop) of each part.

    Shares are equal up to the size of small things, which are not cut; together they are everything once.
    """
    total = sum(lengths)
    low, high = _boundary(lengths, total * index // count), _boundary(lengths, total * (index + 1) // count)
    share = []
    begin = 0
    for position, length in enumerate(lengths):
        start, stop = max(low - begin, 0), min(high - begin, length)
        if start < stop:
            share.append((position, start, stop))
        begin += length
    return share


def _boundary(lengths: Sequence[int], wanted: int) -> int:
    """`wanted`, or the nearer edge of the small thing in the middle of which it falls."""
    begin = 0
    for length in lengths:
        if begin < wanted < begin + length and length <= _SMALL_ELEMENTS:
            return begin if wanted - begin < begin + length - wanted else begin + length
        begin += length
    return wanted


def coverage_problem(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Why these rectangles (offsets, sizes) are not each element of a tensor of this shape once; None if they are."""
    total = 0
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"a piece at {tuple(offsets)} of sizes {tuple(sizes)} in a tensor of shape {tuple(shape)}"
        if any(at < 0 or size < 0 or at + size > end for at, size, end in zip(offsets, sizes, shape, strict=True)):
            return f"the piece at {tuple(offsets)} of sizes {tuple(sizes)} leaves the shape {tuple(shape)}"
        total += prod(sizes)
    meeting = _first_meeting(sorted((tuple(offsets), tuple(sizes)) for offsets, sizes in boxes))
    if meeting is not None:
        return f"the pieces at {meeting[0]} and {meeting[1]} overlap"
    if total != prod(shape):
        return f"the pieces have {total} of {prod(shape)} elements"
    return None


def _first_meeting(boxes: Sequence[tuple[Sizes, Sizes]]) -> tuple[Sizes, Sizes] | None:
    """The offsets of two rectangles that meet; they come in ascending order of their first offset."""
    open_ones: list[tuple[Sizes, Sizes]] = []
    for offsets, sizes in boxes:
        if prod(sizes) == 0:
            continue
        if offsets:
            open_ones = [one for one in open_ones if one[0][0] + one[1][0] > offsets[0]]
        for other_offsets, other_sizes in open_ones:
            if overlap(offsets, sizes, other_offsets, other_sizes) is not None:
                return other_offsets, offsets
        open_ones.append((offsets, sizes))
    return None
