"""Gradients of small parameters wait as autograd left them until all of a stretch are there: one copy for all of them.

    hook of each one     gradient ──► list; the handle takes its place in `p.grad`
    the last one's       list ──► views of the bucket

What a hook does is all that a small parameter costs in backward, and less than its share of everything else. So the two
here know one case, a first or second gradient of a backward that the reducer knows, and leave all others to it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hybrid import shims
from hybrid.sharding.bucket import Bucket
from hybrid.sharding.gradient_handle import GradientHandle

if TYPE_CHECKING:
    from hybrid.sharding.reduce import Reducer

__all__ = ["Arrivals", "Stretch"]

_MOST_ELEMENTS = 2**15  # of a parameter whose gradient waits: beyond it the copy takes longer than the view of it
_STRETCH_BYTES = 2**20  # at most; it is memory that is held twice for a moment
_STRETCHES = 8  # of a bucket, at least

_IDLE: Any = object()

Hooks = tuple[Callable[..., Any], Callable[..., None]]


@dataclass(slots=True)
class KnownBackward:
    """Whether the reducer has seen a gradient of the backward that runs, and will see its end."""

    is_known: bool = False
    _end: weakref.ref[Callable[[], None]] | None = None
    """What is called then. Autograd holds it, as long as that backward runs."""

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Of the backward that runs, unless it raises."""

        def end() -> None:
            self.forget()
            callback()

        self._end = weakref.ref(end)
        shims.call_at_end_of_backward(end)

    def has_raised(self) -> bool:
        """Whether the end of that backward will never be told."""
        return self._end is not None and self._end() is None

    def forget(self) -> None:
        """It is over."""
        self._end = None


class Stretch:
    """Neighbours in one bucket whose gradients are waited for together.

    index: of the bucket.
    positions: in it, from one to before another.
    taken: gradient of each, None before it comes; of one that is not waited for, a mark that keeps the quick hook away.
    missing: how many are still to come.
    """

    __slots__ = ("expected", "index", "missing", "positions", "taken")

    def __init__(self, index: int, positions: range) -> None:
        self.index = index
        self.positions = positions
        self.taken: list[Any] = [None] * len(self.positions)
        self.expected = self.missing = len(self.positions)

    def expect(self, idle: Sequence[bool]) -> None:
        """Wait for all but those that are idle (by position in the bucket); nothing waits now."""
        self.taken[:] = [_IDLE if idle[position] else None for position in self.positions]
        self.expected = self.missing = self.taken.count(None)

    def take(self) -> list[torch.Tensor | None]:
        """The gradients that wait, None where none does; from now on none does anywhere."""
        waiting = list(self.taken)
        if self.expected == len(waiting):
            self.taken[:] = [None] * len(waiting)
        else:
            self.taken[:] = [_IDLE if gradient is _IDLE else None for gradient in waiting]
            waiting = [None if gradient is _IDLE else gradient for gradient in waiting]
        self.missing = self.expected
        return waiting

    def waiting_bytes(self) -> int:
        """Of the gradients that wait."""
        tensors = [gradient for gradient in self.taken if isinstance(gradient, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _stretches_of(bucket: Bucket) -> list[Stretch]:
    """The small parameters of a bucket that lie side by side, cut so that no stretch holds much memory twice."""
    stretches: list[range] = []
    size = 0
    most = min(_STRETCH_BYTES, bucket.partition.num_elements * bucket.key.dtype.itemsize // _STRETCHES)
    for position, entry in enumerate(bucket.partition.entries):
        if bucket.is_one_parameter or not 0 < entry.num_elements < _MOST_ELEMENTS:
            continue
        own_bytes = entry.num_elements * bucket.key.dtype.itemsize
        if stretches and stretches[-1].stop == position and size + own_bytes <= most:
            stretches[-1] = range(stretches[-1].start, position + 1)
            size += own_bytes
        else:
            stretches.append(range(position, position + 1))
            size = own_bytes
    return [Stretch(bucket.index, positions) for positions in stretches if len(positions) > 1]


class Arrivals:
    """The stretches of all buckets."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.backward = KnownBackward()
        self._stretches = [_stretches_of(bucket) for bucket in buckets]
        self._places = {
            (stretch.index, position): (stretch, place)
            for stretch in self._all()
            for place, position in enumerate(stretch.positions)
        }

    def _all(self) -> Iterator[Stretch]:
        return itertools.chain.from_iterable(self._stretches)

    def hooks(self, reducer: weakref.ref[Reducer], bucket: Bucket, position: int, handle: GradientHandle) -> Hooks:
        """Those of one parameter: before and after autograd accumulates its gradient."""
        if (bucket.index, position) not in self._places:
            return _plain_hooks(reducer, bucket.index, position)
        stretch, place = self._places[bucket.index, position]
        return _quick_hooks(reducer, bucket, stretch, place, handle=handle, backward=self.backward)

    def holding(self, bucket: Bucket | None = None) -> list[Stretch]:
        """The stretches in which a gradient waits: of one bucket, or of all."""
        among = self._all() if bucket is None else self._stretches[bucket.index]
        return [stretch for stretch in among if stretch.missing != stretch.expected]

    def expect(self, idle: Sequence[Sequence[bool]]) -> None:
        """Wait for all but those that are idle, by bucket and position; nothing waits now."""
        for stretch in self._all():
            stretch.expect(idle[stretch.index])

    def waiting_bytes(self) -> int:
        """Of the gradients that wait."""
        return sum(stretch.waiting_bytes() for stretch in self._all())


def _plain_hooks(reducer: weakref.ref[Reducer], index: int, position: int) -> Hooks:
    """The two hooks of one parameter. They hold nothing: autograd holds them where no garbage collector looks."""

    def before(gradients: tuple[torch.Tensor | None, ...]) -> tuple[None, ...] | None:
        owner = reducer()
        return None if owner is None else owner.before_accumulation(index, position, gradients[0])

    def after(parameter: torch.Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner.after_accumulation(index, position)

    return before, after


def _quick_hooks(
    reducer: weakref.ref[Reducer],
    bucket: Bucket,
    stretch: Stretch,
    place: int,
    *,
    handle: GradientHandle,
    backward: KnownBackward,
) -> Hooks:
    """The same of a parameter in a stretch, number `place` there. What they hold knows no parameter."""
    position = stretch.positions[place]
    slow_before, slow_after = _plain_hooks(reducer, bucket.index, position)
    taken, shown, bucket_of = stretch.taken, bucket.shown, weakref.ref(bucket)

    def before(gradients: tuple[torch.Tensor | None, ...]) -> tuple[None, ...] | None:
        home = bucket_of()
        if home is not None and backward.is_known and gradients[0] is not None:
            parameter = home.parameters[position]
            current = parameter.grad
            if current is handle:  # autograd gives its own tensor away only if there is none
                parameter.grad = None
                return None
            if current is None and not shown[position]:
                return None
        returned: tuple[None, ...] | None = slow_before(gradients)
        return returned

    def after(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not backward.is_known or taken[place] is not None:
            slow_after(parameter)
            return
        parameter.grad = handle
        taken[place] = gradient
        shown[position] = True
        stretch.missing -= 1
        if not stretch.missing:
            owner = reducer()
            if owner is not None:
                owner.take(stretch)

    return before, after
