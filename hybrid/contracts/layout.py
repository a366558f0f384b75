"""Where each rank stands: rank <-> coordinate on the axes, and the ranks of any group over any set of axes.

This is the only place that knows how ranks are numbered. A layout is a row-major grid: the first axis is
the outermost (its neighbours are far apart), the last the innermost (its groups are contiguous ranks).

      axes  pp 2 × dp_shard 2 × tp 2                  rank = (pp · 2 + dp_shard) · 2 + tp

                    tp 0   tp 1
      pp 0  dp_shard 0  0      1        tp groups        (0 1) (2 3) (4 5) (6 7)
            dp_shard 1  2      3        dp_shard groups  (0 2) (1 3) (4 6) (5 7)
      pp 1  dp_shard 0  4      5        pp groups        (0 4) (1 5) (2 6) (3 7)
            dp_shard 1  6      7

"tp/2" is the innermost factor 2 of the axis tp: above with tp 4 its groups would be (0 1) (2 3) within each tp group.
Ranks that hold the same kv head form such groups. "pp:0,3" are the places 0 and 3 of the axis pp, and every other place
by itself: the stages that hold a tied weight.

A layout takes any axis names, so that a second factorisation of the same ranks (for experts) can be another
`Layout` beside the dense one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

__all__ = ["AXES", "Axis", "Layout", "axis_name", "place_on"]

#: The dense axes, outer to inner. A tp group is contiguous ranks, so it stays inside one node.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of the grid of ranks."""

    name: str
    size: int

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int):
            raise ValueError(f"axis {self.name!r}: the size must be a whole number, got {self.size!r}")
        if self.size < 1:
            raise ValueError(f"axis {self.name!r}: the size must be at least 1, got {self.size}")

    def __str__(self) -> str:
        return f"{self.name} {self.size}"


@dataclass(frozen=True, slots=True)
class Layout:
    """A grid of ranks; `axes` from the outermost to the innermost."""

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        names = [axis.name for axis in self.axes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"axis {', '.join(map(repr, twice))} is listed twice in {tuple(names)}")

    @classmethod
    def of(cls, *, order: Sequence[str] = AXES, **degrees: int) -> Layout:
        """`Layout.of(dp_shard=4, tp=2)`: the axes of `order` with these degrees, 1 where none is given."""
        strangers = sorted(set(degrees) - set(order))
        if strangers:
            raise ValueError(f"axis {strangers[0]!r} is not in the order {tuple(order)}")
        return cls(tuple(Axis(name=name, size=degrees.get(name, 1)) for name in order))

    @property
    def world_size(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    def degree(self, axis: str) -> int:
        """Size of the axis, or of the part of it; 1 for a dense axis that this layout does not list."""
        name = axis_name(axis)
        for listed in self.axes:
            if listed.name == name:
                return max(len(block) for block in _blocks(axis, listed.size))
        if axis in AXES:
            return 1
        raise ValueError(f"no axis {axis!r}; this layout has {', '.join(self.axis_names)}")

    def coordinate(self, rank: int) -> dict[str, int]:
        """Axis name -> this rank's place on it, outer to inner."""
        self._check_rank(rank)
        places: list[int] = []
        for axis in reversed(self.axes):
            rank, place = divmod(rank, axis.size)
            places.append(place)
        return dict(zip(self.axis_names, reversed(places), strict=True))

    def rank_of(self, **coordinates: int) -> int:
        """The rank at this coordinate; an axis that is not named counts as 0."""
        for name, place in coordinates.items():
            degree = self.degree(name)
            if not 0 <= place < degree:
                raise ValueError(f"axis {name!r} has size {degree}; coordinate {place} is not in 0..{degree - 1}")
        rank = 0
        for axis in self.axes:
            rank = rank * axis.size + coordinates.get(axis.name, 0)
        return rank

    def group_ranks(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that share with `rank` every coordinate but those of `axes`, in ascending order.

        Ascending order is the row-major order of the layout: of several axes the outer one varies slowest,
        whatever the order in which they are named here.
        """
        varied = self._varied(axes)
        start = self.coordinate(rank)
        ranks = [0]
        for axis in self.axes:
            own = start[axis.name]
            places = next(block for block in varied.get(axis.name, ((own,),)) if own in block)
            ranks = [before * axis.size + place for before in ranks for place in places]
        return tuple(ranks)

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """All groups over `axes`: each rank is in exactly one; ordered by their lowest rank."""
        axes = tuple(axes) if not isinstance(axes, str) else axes
        varied = self._varied(axes)
        heads = product(
            *([block[0] for block in varied[a.name]] if a.name in varied else range(a.size) for a in self.axes)
        )
        return tuple(
            self.group_ranks(self.rank_of(**dict(zip(self.axis_names, head, strict=True))), axes) for head in heads
        )

    def describe(self) -> str:
        """`pp 2 × dp_shard 4`, outer to inner, axes of size 1 left out."""
        return " × ".join(str(axis) for axis in self.axes if axis.size > 1) or "one process"

    def _varied(self, axes: Iterable[str]) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Axis -> its places, those that are in one group together."""
        if isinstance(axes, str):
            raise ValueError(f"axes must be a sequence of names, got the text {axes!r}; write ({axes!r},)")
        varied: dict[str, tuple[tuple[int, ...], ...]] = {}
        for axis in axes:
            degree = self.degree(axis)  # refuses a name that is no axis
            name = axis_name(axis)
            if degree > max((len(block) for block in varied.get(name, ())), default=0):
                varied[name] = _blocks(axis, self.degree(name))
        return varied

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in 0..{self.world_size - 1} (world_size {self.world_size})")


def axis_name(axis: str) -> str:
    """`tp` of "tp/2", `pp` of "pp:0,3"."""
    return axis.partition("/")[0].partition(":")[0]


def place_on(axis: str, coordinates: Mapping[str, int]) -> int:
    """Place on an axis, or on a part of one; 0 for an axis that the coordinates do not name."""
    name = axis_name(axis)
    place = coordinates.get(name, 0)
    if axis == name:
        return place
    return next(block.index(place) for block in _blocks(axis, None, least=place + 1) if place in block)


def _blocks(axis: str, size: int | None, *, least: int = 0) -> tuple[tuple[int, ...], ...]:
    """The places of an axis of this size, in the groups that "tp/2" or "pp:0,3" makes of them, ascending."""
    name, slash, factor = axis.partition("/")
    listed = axis.partition(":")[2]
    if slash:
        if not factor.isdecimal() or int(factor) < 1:
            raise ValueError(f"axis {axis!r}: the factor behind the slash must be a whole number of at least 1")
        width = int(factor)
        if size is None:
            size = -(-least // width) * width
        if size % width:
            raise ValueError(f"axis {axis!r}: {factor} does not divide the size {size} of {name!r}")
        return tuple(tuple(range(start, start + width)) for start in range(0, size, width))
    if listed:
        if not all(place.isdecimal() for place in listed.split(",")):
            raise ValueError(f"axis {axis!r}: the places behind the colon must be whole numbers")
        together = tuple(sorted({int(place) for place in listed.split(",")}))
        if size is None:
            size = max(least, together[-1] + 1)
        if together[-1] >= size:
            raise ValueError(f"axis {axis!r}: place {together[-1]} is not in 0..{size - 1}")
        alone = ((place,) for place in range(size) if place not in together)
        return tuple(sorted([together, *alone]))
    assert size is not None
    return (tuple(range(size)),)
