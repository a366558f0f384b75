"""Where one parameter lives, and over which mesh axes its gradient must be summed.

There is one record per parameter of the user's model. Gradient synchronisation, the one owner that counts
an element in a norm, checkpoint coordinates and random seeds are all derived from it, so that they cannot
disagree. A parameter without a record is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from hybrid.contracts.layout import place_on

__all__ = ["Box", "Cut", "Placement", "even_cut", "fused_cut", "placed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle of a parameter that a rank holds: `sizes` elements at `local_start`, globally at `global_start`."""

    local_start: tuple[int, ...]
    global_start: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.local_start) == len(self.global_start) == len(self.sizes):
            raise ValueError(
                f"a box needs one start and one size per dim; got {len(self.local_start)} local starts, "
                f"{len(self.global_start)} global starts and {len(self.sizes)} sizes"
            )

    @property
    def num_elements(self) -> int:
        return prod(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The record of one parameter.

    Args:
        fqn: dotted name in the user's model; the first name in registration order if it is tied.
        tied_fqns: its other names.
        global_shape: shape in the user's model.
        dtype: name of the dtype without the `torch.` prefix, such as `"float32"`.
        boxes: what this rank holds of it, before ZeRO cuts it (ZeRO's cut is in `contracts/partition.py`).
        copy_axes: axes over which other ranks hold the same boxes, outer to inner, those of `partial_axes` among
            them. "tp/2" is the innermost factor 2 of the axis tp (see `contracts/layout.py`).
        partial_axes: axes over which the gradient is partial, outer to inner: it must be summed over them.
        chunks: pipeline chunks that hold it; `(0,)` without a pipeline.
        trainable: whether it required a gradient when the model was wrapped.
        mesh: which factorisation of the world the axes belong to.
    """

    fqn: str
    global_shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    partial_axes: tuple[str, ...]
    trainable: bool
    copy_axes: tuple[str, ...] = ()
    tied_fqns: tuple[str, ...] = ()
    chunks: tuple[int, ...] = (0,)
    mesh: str = "dense"

    @property
    def num_elements(self) -> int:
        """Elements that this rank holds."""
        return sum(box.num_elements for box in self.boxes)

    def is_owner(self, coordinates: Mapping[str, int], cut_axes: Sequence[str]) -> bool:
        """Whether the rank at `coordinates` is the one that counts these elements, when ZeRO cuts over `cut_axes`.

        A copy stands at every other place of the axes that hold copies but are not cut; that at coordinate 0 counts.
        """
        axes = dict.fromkeys([*self.copy_axes, *self.partial_axes])
        return all(place_on(axis, coordinates) == 0 for axis in axes if axis not in cut_axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a parameter is cut over the tp ranks: what one of them holds of it, along one dim.

    Args:
        dim: the dim that is cut.
        global_size: its size in the user's model.
        pieces: (start, length) along `dim`, in the order in which they lie in the local tensor. Fused parts (q, k
            and v in one weight) give one piece each.
        copies: so many neighbouring tp ranks hold the same pieces (fewer kv heads than ranks).
    """

    dim: int
    global_size: int
    pieces: tuple[tuple[int, int], ...]
    copies: int = 1

    def __post_init__(self) -> None:
        inside = all(start >= 0 and start + length <= self.global_size for start, length in self.pieces)
        ends = [(start, start + length) for start, length in sorted(self.pieces)]
        if not inside or any(end > start for (_, end), (start, _) in pairwise(ends)):
            raise ValueError(f"pieces {self.pieces} overlap or leave 0..{self.global_size}")

    @property
    def local_size(self) -> int:
        return sum(length for _, length in self.pieces)

    def boxes(self, shape: Sequence[int]) -> tuple[Box, ...]:
        """The pieces as rectangles of a parameter of this global shape."""
        boxes = []
        place = 0
        for start, length in self.pieces:
            local, there, sizes = [0] * len(shape), [0] * len(shape), list(shape)
            local[self.dim], there[self.dim], sizes[self.dim] = place, start, length
            boxes.append(Box(local_start=tuple(local), global_start=tuple(there), sizes=tuple(sizes)))
            place += length
        return tuple(boxes)


def even_cut(dim: int, size: int, *, rank: int, degree: int) -> Cut:
    """`size` cut into `degree` contiguous parts that differ by one at most, the longer ones first."""
    length = size // degree + (rank < size % degree)
    start = rank * (size // degree) + min(rank, size % degree)
    return Cut(dim=dim, global_size=size, pieces=((start, length),))


def fused_cut(dim: int, parts: Sequence[tuple[int, int]], *, rank: int, degree: int) -> Cut:
    """Each of some parts that lie one behind the other (q, k, v; gate, up) cut by itself, between heads.

    Args:
        dim: the dim along which they lie.
        parts: (number of heads, size of a head) of each; a part without heads has heads of size 1.
        rank, degree: place and number of the tp ranks.

    Raises:
        ValueError: a number of heads that the ranks do not divide; or that is smaller and does not divide them; or
            some parts whose heads are copied beside others whose heads are not.
    """
    pieces: list[tuple[int, int]] = []
    copies: set[int] = set()
    start = 0
    for heads, head_size in parts:
        if heads % degree == 0:
            held = heads // degree
            first = rank * held
            copies.add(1)
        elif degree % heads == 0:
            held = 1
            first = rank * heads // degree
            copies.add(degree // heads)
        else:
            raise ValueError(f"{heads} heads cannot be dealt out to {degree} ranks")
        pieces.append((start + first * head_size, held * head_size))
        start += heads * head_size
    if len(copies) > 1:
        raise ValueError(
            f"parts with {[heads for heads, _ in parts]} heads in one weight: on {degree} ranks some would be copied "
            "and others not"
        )
    return Cut(dim=dim, global_size=start, pieces=tuple(pieces), copies=copies.pop())


def placed(
    fqn: str,
    shape: Sequence[int],
    *,
    dtype: str,
    partial_axes: Sequence[str],
    trainable: bool,
    cut: Cut | None = None,
    copy_axes: Sequence[str] = (),
    chunks: Sequence[int] = (0,),
    tied_fqns: Sequence[str] = (),
) -> Placement:
    """The record of a parameter of this global shape that a rank holds whole, or of which it holds what `cut` says."""
    sizes = tuple(shape)
    start = (0,) * len(sizes)
    whole = (Box(local_start=start, global_start=start, sizes=sizes),)
    return Placement(
        fqn=fqn,
        global_shape=sizes,
        dtype=dtype,
        boxes=whole if cut is None else cut.boxes(sizes),
        partial_axes=tuple(partial_axes),
        copy_axes=tuple(copy_axes),
        chunks=tuple(chunks),
        trainable=trainable,
        tied_fqns=tuple(tied_fqns),
    )
