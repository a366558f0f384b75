"""Where one parameter lives, and over which mesh axes its gradient must be summed.

There is one record per parameter of the user's model. Gradient synchronisation, the one owner that counts
an element in a norm, checkpoint coordinates and random seeds are all derived from it, so that they cannot
disagree. A parameter without a record is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["Box", "Placement", "replicated"]


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
        replica_id: 0 for the rank that stands for all copies of these boxes; others count up.
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
    tied_fqns: tuple[str, ...] = ()
    replica_id: int = 0
    chunks: tuple[int, ...] = (0,)
    mesh: str = "dense"

    @property
    def num_elements(self) -> int:
        """Elements that this rank holds."""
        return sum(box.num_elements for box in self.boxes)

    def is_owner(self, coordinates: Mapping[str, int], cut_axes: Sequence[str]) -> bool:
        """Whether the rank at `coordinates` is the one that counts these elements, when ZeRO cuts over `cut_axes`.

        A copy stands at every other place of the axes over which the gradient is summed but not cut; the
        copy at coordinate 0 counts.
        """
        return self.replica_id == 0 and all(
            coordinates.get(axis, 0) == 0 for axis in self.partial_axes if axis not in cut_axes
        )


def replicated(
    fqn: str,
    shape: Sequence[int],
    *,
    dtype: str,
    partial_axes: Sequence[str],
    trainable: bool,
    tied_fqns: Sequence[str] = (),
) -> Placement:
    """The record of a parameter that every rank holds whole, such as each one of plain data parallel."""
    sizes = tuple(shape)
    start = (0,) * len(sizes)
    return Placement(
        fqn=fqn,
        global_shape=sizes,
        dtype=dtype,
        boxes=(Box(local_start=start, global_start=start, sizes=sizes),),
        partial_axes=tuple(partial_axes),
        trainable=trainable,
        tied_fqns=tuple(tied_fqns),
    )
