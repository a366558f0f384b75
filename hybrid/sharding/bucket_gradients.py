"""The gradients of a bucket, from the first one that arrives to what the optimizer sees.

How long each buffer lives is in the docstring of `bucket.py`. Their memory is used again in the next step, with the
views of it (`ReusedBuffer`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import attrgetter

import torch

from hybrid import shims
from hybrid.collectives import ops
from hybrid.contracts.partition import BucketPartition
from hybrid.errors import ModelError
from hybrid.sharding.bucket_key import BucketKey
from hybrid.sharding.reused_buffer import ReusedBuffer
from hybrid.sharding.unfinished_sums import Before, UnfinishedSums

__all__ = ["BucketGradients"]

_IS_SPARSE = attrgetter("is_sparse")
_OWN_VIEWS = -1  # among the keys of views; those of neighbours are the position of the first
_NEAR_ELEMENTS = 2**12  # to set these to zero takes no longer than one more call


class BucketGradients(ABC):
    """What `Bucket` does with gradients; it has the rest of what is named here."""

    index: int
    key: BucketKey
    partition: BucketPartition
    parameters: tuple[torch.nn.Parameter, ...]
    fqns: tuple[str, ...]
    low: int
    high: int
    data: torch.Tensor

    @abstractmethod
    def view(self, flat: torch.Tensor, position: int) -> torch.Tensor:
        """The parameter's shape and strides over a whole flat buffer of this bucket."""

    @abstractmethod
    def strides(self, position: int) -> tuple[int, ...]:
        """The parameter's strides."""

    @abstractmethod
    def own_views(self, shard_buffer: torch.Tensor) -> list[torch.Tensor]:
        """Of a buffer over the own shard, what belongs to each own slice."""

    def _init_gradients(self, device: torch.device) -> None:
        self._empty = _merged(self.partition.gaps())
        self._places = self._own_places()
        # Memory of whole gradients, and of their sums over the own range where that is apart.
        self._wholes = ReusedBuffer(self.partition.num_elements, dtype=self.key.grad_dtype, device=device)
        self._owns = self._wholes
        if self.partition.num_shards > 1:
            self._owns = ReusedBuffer(self.high - self.low, dtype=self.key.grad_dtype, device=device)

        self._near: ops.Group | None = None  # those who may read whole gradients where they lie
        self.local: torch.Tensor | None = None
        self.filled = [False] * len(self.parameters)
        self.raw: torch.Tensor | None = None
        self.settled: torch.Tensor | None = None
        self.scale: float | torch.Tensor = 1.0
        # Whether a real gradient has come since zero_grad: here, and on any rank (known after a settlement).
        self.has_gradient = [False] * len(self.parameters)
        # Whether our handle stands in `p.grad`: then None means dropped. Always this list, which hooks hold.
        self.shown = [False] * len(self.parameters)
        self.has_gradient_anywhere = [False] * len(self.parameters)
        self.unfinished = UnfinishedSums()

    def _own_places(self) -> dict[str, tuple[int, int]]:
        """Of each parameter, its place in the own range, with the padding behind it: factors reach that, too."""
        entries = sorted(self.partition.entries, key=attrgetter("offset_elements", "num_elements"))
        begins = [0, *(entry.offset_elements for entry in entries[1:])]
        ends = [*begins[1:], self.partition.num_elements]
        own = [min(max(edge, self.low), self.high) - self.low for edge in (*begins, *ends)]
        return {entry.fqn: (own[i], own[i + len(entries)]) for i, entry in enumerate(entries)}

    def accumulate(self, position: int, gradient: torch.Tensor, *, may_keep: bool = False) -> None:
        """Take over one gradient that autograd has just finished; dtype and layout may differ.

        With `may_keep` nobody else sees its memory, and `is_one_parameter`: it may become the buffer.
        """
        as_it_lies = (self.key.grad_dtype, self.strides(position))
        keep = may_keep and self.local is None and (gradient.dtype, gradient.stride()) == as_it_lies
        if self.local is None:
            self.local = gradient.as_strided((gradient.numel(),), (1,)) if keep else self.new_gradient_buffer()
        view = self.view(self.local, position)
        if self.filled[position]:
            view.add_(gradient)
        elif gradient.is_sparse:
            view.zero_().add_(gradient)
        elif not keep:
            view.copy_(gradient)
        self.filled[position] = self.has_gradient[position] = True

    def accumulate_all(self, start: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """`accumulate` for neighbours, from position `start` on; in one call, if all are first or all are further ones.

        Views of them are kept for the next time.
        """
        stop, count = start + len(gradients), len(gradients)
        num_filled = sum(self.filled[start:stop])
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) < count or 0 < num_filled < count or any(map(_IS_SPARSE, present)):
            for position, gradient in enumerate(gradients, start):
                if gradient is not None:
                    self.accumulate(position, gradient)
            return
        if self.local is None:
            self.local = self.new_gradient_buffer()
        views = self._wholes.views(self.local, start, lambda flat: [self.view(flat, p) for p in range(start, stop)])
        (shims.ADD_TO_EACH if num_filled else shims.COPY_TO_EACH)(views, present)
        self.filled[start:stop] = self.has_gradient[start:stop] = [True] * count

    def open_view(self, position: int) -> tuple[torch.Tensor, bool]:
        """Where one parameter's gradient is to be written, and whether one is there, to be added to.

        Counts as filled from now on.
        """
        if self.local is None:
            self.local = self.new_gradient_buffer()
        is_filled = self.filled[position]
        self.filled[position] = self.has_gradient[position] = True
        return self.view(self.local, position), is_filled

    def begin_sum(self, position: int) -> None:
        """A backward is about to write an addend of a gradient; its hook tells when the last one is there."""
        self.unfinished.begin(position, Before(self.filled[position], self.has_gradient[position]))

    def abandon_unfinished(self) -> None:
        """A backward has raised: what it wrote of sums that it did not finish is not there."""
        for position, before in self.unfinished.abandon():
            self.filled[position], self.has_gradient[position] = before

    def refuse_spoilt(self) -> None:
        """Raises ModelError: a gradient whose values are those of no backward."""
        for position in self.unfinished.spoilt:
            raise ModelError(
                f"a backward raised between two uses of {self.fqns[position]!r}: its gradient holds one of them, added "
                "to those of earlier backwards. Call zero_grad() on the model or the optimizer, and accumulate anew"
            )

    def new_gradient_buffer(self) -> torch.Tensor:
        """A whole buffer whose padding is zero and whose parameters' ranges are not written yet."""
        buffer = self._new_whole()
        for begin, end in self._empty:
            buffer[begin:end].zero_()
        return buffer

    def lie_near(self, group: ops.Group | None) -> None:
        """Whole gradients are to lie in memory that these ranks can read, if there is such: it stays mapped."""
        self._near = group

    def _new_whole(self) -> torch.Tensor:
        if self._near is not None:
            shared = ops.shared_buffer(self.partition.num_elements, self.key.grad_dtype, group=self._near)
            if shared is not None:
                return shared
        return self._wholes.open()

    def reduce_scatter(self, buffer: torch.Tensor, *, group: ops.Group, out: torch.Tensor | None) -> ops.Handle:
        """Sum a whole buffer, which nobody writes to again, over the shards."""
        self._near = group
        return ops.reduce_scatter(
            buffer, bounds=self.partition.bounds, group=group, out=out, given_up=True, tag=self.index
        )

    def give_up(self, buffer: torch.Tensor) -> None:
        """Nobody will read this gradient buffer of the bucket again."""
        ops.release(buffer)
        self._wholes.close(buffer)
        if self._owns is not self._wholes:
            self._owns.close(buffer)

    def take_local(self, *, dtype: torch.dtype | None = None, divisor: float = 1.0) -> torch.Tensor:
        """Give the whole gradient buffer away for its reduction; parameters without a gradient count as zero.

        Args:
            dtype: in which the gradients travel; None: their own.
            divisor: by which they are divided before.
        """
        buffer = self.local
        if buffer is None:
            buffer = torch.zeros(self.partition.num_elements, dtype=self.key.grad_dtype, device=self.data.device)
        elif not all(self.filled):
            for position, filled in enumerate(self.filled):
                if not filled:
                    self.view(buffer, position).zero_()
        self.local = None
        self.filled = [False] * len(self.parameters)
        self.unfinished.leave()
        if divisor != 1.0:
            buffer.div_(divisor)
        if dtype in (None, buffer.dtype):
            return buffer
        sent = buffer.to(dtype)
        self.give_up(buffer)
        return sent

    def new_accumulator(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Where the sum of the own range is to arrive, to become `raw`; None: `add_reduced` takes it."""
        if self.raw is not None or dtype != self.key.grad_dtype:
            return None
        return self._owns.open()

    def add_reduced(self, buffer: torch.Tensor) -> None:
        """Add the own range of a reduced buffer to what has been reduced before, and give the buffer up."""
        if self.raw is not None:
            self.raw.add_(buffer[self.low : self.high])
        elif self.partition.num_shards == 1 and buffer.dtype == self.key.grad_dtype:
            self.raw = buffer
            return
        else:
            self.raw = buffer[self.low : self.high].to(self.key.grad_dtype, copy=True)
        self.give_up(buffer)

    def settle(self, scale: float) -> None:
        """Turn the sum over ranks into the gradient that the optimizer sees: `scale` times the sum, added to it."""
        if self.raw is None:
            return
        if self.settled is None:
            self.settled, self.scale = self.raw, scale
        else:
            self.apply_scale()
            self.settled.add_(self.raw, alpha=scale)
            self.give_up(self.raw)
        self.raw = None

    def apply_scale(self) -> None:
        """Multiply the settled gradient by its pending factor."""
        if self.settled is not None and self.has_pending_scale():
            self.settled.mul_(self.scale_for(self.settled))
        self.scale = 1.0

    def has_pending_scale(self) -> bool:
        """Whether the settled gradient has still to be multiplied."""
        return not (isinstance(self.scale, float) and self.scale == 1.0)

    def scale_for(self, gradient: torch.Tensor) -> float | torch.Tensor:
        """The pending factor, where this gradient is."""
        return self.scale.to(gradient.device) if isinstance(self.scale, torch.Tensor) else self.scale

    def drop(self, position: int) -> None:
        """Forget one parameter's gradient, as `p.grad = None` does."""
        self.fill_zero(position)
        self.has_gradient[position] = self.has_gradient_anywhere[position] = self.shown[position] = False

    def fill_zero(self, position: int) -> None:
        """Set one parameter's gradient to zero, but leave it there."""
        self.unfinished.empty(position)
        if self.local is not None and self.filled[position]:
            self.view(self.local, position).zero_()
        self.apply_scale()  # a factor that is NaN, as clipping by the norm of NaN makes it, would reach the zeros
        begin, end = self._places[self.fqns[position]]
        for buffer in (self.raw, self.settled):
            if buffer is not None:
                buffer[begin:end].zero_()

    def drop_all(self) -> None:
        """Give up every gradient buffer."""
        for buffer in (self.local, self.raw, self.settled):
            if buffer is not None:
                self.give_up(buffer)
        self.local = self.raw = self.settled = None
        self.unfinished.empty_all()
        self.scale = 1.0
        count = len(self.parameters)
        self.filled = [False] * count
        self.has_gradient = [False] * count
        self.shown[:] = [False] * count
        self.has_gradient_anywhere = [False] * count

    def gradient_bytes(self) -> int:
        """Live bytes of this bucket's gradient buffers."""
        buffers = (self.local, self.raw, self.settled)
        return sum(buffer.untyped_storage().nbytes() for buffer in buffers if buffer is not None)

    def settled_views(self, *, are_given_back: bool) -> list[torch.Tensor]:
        """Of the settled gradient, `own_views`. Made anew if it is not sure that they are given back before it is."""
        assert self.settled is not None
        if not are_given_back:
            return self.own_views(self.settled)
        return self._owns.views(self.settled, _OWN_VIEWS, self.own_views)


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that cover these, with less than a call's worth of elements between them."""
    merged: list[tuple[int, int]] = []
    for begin, end in ranges:
        if merged and begin - merged[-1][1] < _NEAR_ELEMENTS:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged
