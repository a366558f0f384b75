"""The sink of one parameter: a layer's backward adds to the bucket itself."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch

from hybrid import shims
from hybrid.cpu_products import add_product, is_plain
from hybrid.gradient_sinks import offer, stays
from hybrid.later_products import LaterProducts
from hybrid.sharding.absence import AbsentParameter
from hybrid.sharding.bucket import Bucket
from hybrid.weight_gradients import WeightGradients

if TYPE_CHECKING:
    from hybrid.sharding.reduce import Reducer

__all__ = ["BucketSink", "offer_sinks"]

# Below this many elements the time that a Python backward takes is more than a pass over the gradient.
_LEAST_ELEMENTS = 2**15


class BucketSink:
    """See `hybrid.gradient_sinks.Sink`. It keeps neither the reducer nor its buffers alive: graphs hold sinks."""

    def __init__(self, reducer: Reducer, bucket: Bucket, position: int) -> None:
        self._reducer = weakref.ref(reducer)
        self._index, self._position = bucket.index, position
        self._dtype = bucket.key.grad_dtype
        self._node = torch.autograd.graph.get_gradient_edge(bucket.parameters[position]).node

    def is_open(self, dtype: torch.dtype) -> bool:
        reducer = self._reducer()
        if reducer is None or dtype != self._dtype or WeightGradients.current() is not None:
            return False
        parameter = reducer.buckets[self._index].parameters[self._position]
        return (
            parameter.requires_grad  # not frozen since forward
            and not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled())
            and not shims.has_gradient_hooks(parameter)
            and shims.will_run(self._node)
        )

    def add_product(
        self, left: torch.Tensor, right: torch.Tensor, *, rows: tuple[int, int] | None = None, may_wait: bool = False
    ) -> None:
        later = LaterProducts.current() if may_wait else None
        if later is None or not (stays(left) and stays(right)):
            _add(*self._open_view(), left, right, rows)
            return
        reducer, bucket = self._bucket()
        reducer.foresee_gradient(bucket, self._position)
        # Not as they are: who hands out a gradient's memory again looks at how many tensors see it.
        write = partial(self._add_later, left.detach(), right.detach(), rows)
        place = reducer, self._index, self._position
        later.add(place, write, then=partial(reducer.arrive_later, self._index, self._position))

    def _add_later(self, left: torch.Tensor, right: torch.Tensor, rows: tuple[int, int] | None) -> None:
        _, bucket = self._bucket()
        _add(*bucket.open_view(self._position), left, right, rows)

    def add_rows(self, indices: torch.Tensor, rows: torch.Tensor) -> None:
        view, is_filled = self._open_view()
        if not is_filled:
            view.zero_()
        view.index_add_(0, indices, rows)

    def _open_view(self) -> tuple[torch.Tensor, bool]:
        """Where to write, and whether something is there that counts; it counts from now on."""
        reducer, bucket = self._bucket()
        reducer.foresee_gradient(bucket, self._position)
        bucket.begin_sum(self._position)
        return bucket.open_view(self._position)

    def _bucket(self) -> tuple[Reducer, Bucket]:
        reducer = self._reducer()
        assert reducer is not None  # `is_open` was asked before
        return reducer, reducer.buckets[self._index]


def _add(
    view: torch.Tensor, is_filled: bool, left: torch.Tensor, right: torch.Tensor, rows: tuple[int, int] | None
) -> None:
    """left @ right to what is in a view, or in rows of it, if that counts."""
    if rows is not None:
        if not is_filled:
            view.zero_()
        view, is_filled = view[rows[0] : rows[1]], True
    add_product(view, left, right, is_first=not is_filled)


def offer_sinks(reducer: Reducer) -> list[BucketSink]:
    """Sinks for all matrices of the reducer's buckets that are large enough; the caller keeps them alive."""
    sinks = []
    for bucket in reducer.buckets:
        for position, parameter in enumerate(bucket.parameters):
            if not is_plain(parameter) and type(parameter) is not AbsentParameter:
                continue  # a class of the user's, which may want to see what is done with it
            if parameter.dim() == 2 and parameter.numel() >= _LEAST_ELEMENTS and bucket.is_dense(position):
                sink = BucketSink(reducer, bucket, position)
                offer(parameter, sink)
                sinks.append(sink)
    return sinks
