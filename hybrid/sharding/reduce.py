"""Reduction of gradients: hooks fill the buckets, full buckets are reduced in one fixed order.

A *round* reduces every bucket once, in index order, on every rank. It opens with the first gradient of a
backward pass outside `no_sync` and is closed when that pass ends: buckets that got no gradient, or not all,
are reduced then with zeros in the gaps. So the number and order of collectives never depend on which
parameters a rank happened to use, or on the order in which autograd finished.

    backward         hooks: take the gradient over ──► bucket full and its turn? launch ──► ...
    end of backward  launch what is left, in order; wait; add own ranges to the accumulators

A gradient that arrives for a bucket already launched in this round (re-entrant recompute, a second backward
before the first ended) waits in a fresh local buffer for the next round.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_

import torch

from hybrid import shims
from hybrid.collectives import ops
from hybrid.collectives.call import amid
from hybrid.collectives.ranges import named_range
from hybrid.errors import CollectiveError, ModelError
from hybrid.later_products import LaterProducts
from hybrid.sharding.arrivals import Arrivals, Stretch
from hybrid.sharding.bucket import Bucket
from hybrid.sharding.gradient_handle import GradientHandle, Unscaler, unscaler_of
from hybrid.sharding.gradient_sink import offer_sinks
from hybrid.sharding.tensors import HELD_ONCE, owns_its_memory
from hybrid.weight_gradients import WeightGradients

__all__ = ["Reducer"]

_GRAD = attrgetter("grad")


class Reducer:
    """Owns the hooks of all buckets and the state of the current round.

    Args:
        buckets: in launch order.
        groups: per bucket, the group over which its gradients are reduced now (the shard group, or every
            rank that shares the parameter at stage 0) and the group of replicas, reduced once per settlement.
        overlap: let collectives run beside the backward; else wait for each as soon as it is launched.
        max_in_flight: buckets whose collective may be under way while the next one fills.
        peers: the reducers of all models that are trained in this process, in the order of their wrapping.
        reduce_dtype: dtype in which gradients travel; None: that of the buckets.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        groups: Sequence[tuple[ops.Group, ops.Group]],
        overlap: bool,
        max_in_flight: int = 1,
        peers: Callable[[], Sequence[Reducer]] = tuple,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.buckets = tuple(buckets)
        self._groups = tuple(groups)
        self._max_in_flight = max_in_flight if overlap else 0
        self._peers = peers
        self._alone = True
        self._reduce_dtype = reduce_dtype
        # Set by the floor that can talk to the whole world: GradScaler's answer; whether a thing holds on any rank.
        self.unscaler: Unscaler | None = None
        self.holds_anywhere: Callable[[bool], bool] | None = None
        # Parameters that no rank had a gradient for in the last step, by bucket: not waited for in the next one.
        self._idle: list[list[bool]] = [[False] * len(bucket.parameters) for bucket in self.buckets]
        self.synchronise = True
        self.defer_end = False  # train_batch closes the round itself, right after its own backward
        self.dropped_by_hand = False  # somebody set `p.grad = None` since train_batch last looked
        self.saw_plain_backward = False  # since gradients were last empty: one that train_batch did not make
        self.rounds_since_settlement = 0
        self.chunk: int | None = None
        """Pipeline chunk whose backward runs: a round reduces its buckets only. None: all of them."""
        self._open = False
        self._round: list[int] = []  # indices of the buckets of this round, in order
        self._next = 0  # place in it
        self._missing = [0] * len(self.buckets)
        self._arrived: list[list[bool]] = [[] for _ in self.buckets]
        self._in_flight: deque[tuple[Bucket, torch.Tensor, torch.Tensor | None, ops.Handle]] = deque()
        unscale = unscaler_of(weakref.ref(self))
        self.handles = {
            fqn: GradientHandle.of(parameter, fqn=fqn, held_dtype=bucket.key.grad_dtype, unscaler=unscale)
            for bucket in self.buckets
            for fqn, parameter in zip(bucket.fqns, bucket.parameters, strict=True)
        }
        self._without = [[False] * len(bucket.parameters) for bucket in self.buckets]  # autograd brought no gradient
        # The same by bucket and position: these are asked for three times per parameter and step.
        self._handles = [[self.handles[fqn] for fqn in bucket.fqns] for bucket in self.buckets]
        self._arrivals = Arrivals(self.buckets)
        self._backward = self._arrivals.backward
        self._nodes: list[torch.autograd.graph.Node] = []
        self._removers = [
            remover
            for bucket in self.buckets
            for position in range(len(bucket.parameters))
            for remover in self._install(bucket, position)
        ]
        self._sinks = offer_sinks(self)

    # -- hooks -----------------------------------------------------------------------------------------

    def _install(self, bucket: Bucket, position: int) -> tuple[Callable[[], None], ...]:
        parameter = bucket.parameters[position]
        # On the accumulating node, not on the tensor: a tensor's hooks also run under torch.autograd.grad, which
        # accumulates nothing. Autograd holds the node weakly, so it is kept here.
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        self._nodes.append(node)
        handle = self._handles[bucket.index][position]
        before, after = self._arrivals.hooks(weakref.ref(self), bucket, position, handle)
        first = node.register_prehook(before)
        second = parameter.register_post_accumulate_grad_hook(after)
        return (first.remove, second.remove)

    def before_accumulation(self, index: int, position: int, gradient: torch.Tensor | None) -> tuple[None, ...] | None:
        """Autograd gives its own tensor away only if `grad` is None.

        And if somebody has set it to None or to another tensor since our handle was put there, that is what plain
        torch would go on from. Returns what takes the gradient's place, if anything does: a split backward leaves all
        gradients to its second half, so that a bucket is filled and reduced in one go.
        """
        bucket = self.buckets[index]
        parameter = bucket.parameters[position]
        left = WeightGradients.current()
        self._without[index][position] = gradient is None
        if left is None and gradient is not None:
            self._get_to_know_backward()
        if self._look_at_grad(bucket, position) is not None:
            parameter.grad = None
        if left is None or gradient is None or shims.has_gradient_hooks(parameter):
            return None
        left.add(torch.autograd.graph.get_gradient_edge(parameter).node, lambda: gradient)
        self._without[index][position] = True
        return (None,)

    def _get_to_know_backward(self) -> None:
        """Its first gradient has come; its end will be told, unless it raises."""
        if self._backward.has_raised():
            self._collect()
        if self._backward.is_known:
            return
        self.saw_plain_backward = self.saw_plain_backward or not self.defer_end
        if self.synchronise and not self._open:
            self._begin()
        self._backward.is_known = True
        self._backward.call_at_end(self._end_backward)

    def _end_backward(self) -> None:
        for bucket in self.buckets:
            bucket.unfinished.finish_all()
        self._collect()
        if self._open and not self.defer_end:
            self._finish_all_rounds()

    def after_accumulation(self, index: int, position: int) -> None:
        bucket, handle = self.buckets[index], self._handles[index][position]
        parameter = bucket.parameters[position]
        gradient = parameter.grad
        bucket.unfinished.finish(position)
        is_without, self._without[index][position] = self._without[index][position], False
        if gradient is None and not is_without and parameter.requires_grad:
            raise ModelError(
                f"the gradient of {bucket.fqns[position]!r} was taken out of p.grad during backward, by a "
                "post-accumulate hook from before distributed_model (an optimizer that steps in backward does so): it "
                "is this rank's gradient only, not the sum over the ranks. Remove it, and step after backward with "
                "the optimizer of hybrid.distributed_optimizer"
            )
        if gradient is None:  # hooks also fire when a custom function returned no gradient
            if bucket.shown[position]:
                parameter.grad = handle
            self._arrive(bucket, position)
            return
        parameter.grad = handle
        is_ours = bucket.is_one_parameter and sys.getrefcount(gradient) <= HELD_ONCE and owns_its_memory(gradient)
        bucket.accumulate(position, gradient.detach() if gradient.requires_grad else gradient, may_keep=is_ours)
        bucket.shown[position] = True
        self._arrive(bucket, position)

    def take(self, stretch: Stretch) -> None:
        """All the gradients that a stretch was waiting for are there, or no more will come in this backward."""
        bucket, start = self.buckets[stretch.index], stretch.positions.start
        gradients = stretch.take()
        for position in stretch.positions if bucket.unfinished else ():
            if gradients[position - start] is not None:
                bucket.unfinished.finish(position)
        with torch.no_grad():
            bucket.accumulate_all(start, gradients)
        if self._open and self.synchronise:
            arrived, stop = self._arrived[stretch.index], stretch.positions.stop
            before = arrived[start:stop]
            arrived[start:stop] = [b or g is not None for b, g in zip(before, gradients, strict=True)]
            self._missing[stretch.index] -= sum(arrived[start:stop]) - sum(before)
            if self._missing[stretch.index] == 0 and self._alone:
                self._launch_ready()

    def _collect(self) -> None:
        """Put what waits in stretches into the buckets; the backward that comes next is another one."""
        self._backward.is_known = False
        for stretch in self._arrivals.holding():
            self.take(stretch)
        if self._backward.has_raised():
            self._backward.forget()
            self._complete_all()
            for bucket in self.buckets:
                bucket.abandon_unfinished()
            self.adopt_all()  # what was dropped since then is to be gone before handles take its place

    def foresee_gradient(self, bucket: Bucket, position: int) -> None:
        """A layer is about to write an addend into the bucket itself; the hooks follow when the last one is there."""
        self._get_to_know_backward()
        if self._look_at_grad(bucket, position) is None:
            bucket.parameters[position].grad = self._handles[bucket.index][position]
        bucket.shown[position] = True

    def _look_at_grad(self, bucket: Bucket, position: int) -> torch.Tensor | None:
        """What `p.grad` is before a gradient is taken over; if it is not what we left there, that counts."""
        current = bucket.parameters[position].grad
        if current is not self._handles[bucket.index][position] and (current is not None or bucket.shown[position]):
            self.adopt(bucket, position)
        return current

    def adopt(self, bucket: Bucket, position: int) -> None:
        """Bring the bucket in line with what the user did to `p.grad`: None drops, a tensor of theirs is refused."""
        parameter = bucket.parameters[position]
        current = parameter.grad
        if current is None:
            if bucket.shown[position]:
                bucket.drop(position)
                self.dropped_by_hand = True
        elif current is not self.handles[bucket.fqns[position]]:
            raise ModelError(
                f"p.grad of {bucket.fqns[position]!r} was set by hand, where hybrid could not see it: this value would "
                "not be summed over the ranks. Scale the loss or use model.clip_grad_norm_/clip_grad_value_ instead"
            )

    def adopt_all(self) -> None:
        for bucket in self.buckets:
            self._adopt_bucket(bucket)

    def _adopt_bucket(self, bucket: Bucket) -> None:
        grads = map(_GRAD, bucket.parameters)
        if all(bucket.shown):
            stand = all(map(is_, grads, self._handles[bucket.index]))
        else:
            stand = not any(bucket.shown) and all(map(is_, grads, repeat(None)))
        if not stand:
            for position in range(len(bucket.parameters)):
                self._look_at_grad(bucket, position)

    def show_handles(self, bucket: Bucket) -> None:
        """Where any rank has a gradient, the parameter has its handle, elsewhere None."""
        if not (all(bucket.has_gradient_anywhere) and all(bucket.shown)):
            handles = self._handles[bucket.index]
            for parameter, handle, shows in zip(bucket.parameters, handles, bucket.has_gradient_anywhere, strict=True):
                parameter.grad = handle if shows else None
            bucket.shown[:] = bucket.has_gradient_anywhere

    def remove_hooks(self) -> None:
        for remove in self._removers:
            remove()

    # -- rounds ----------------------------------------------------------------------------------------

    def _arrive(self, bucket: Bucket, position: int) -> None:
        if not self.synchronise:
            return
        if not self._open:
            self._begin()
            self._backward.call_at_end(self._end_backward)
        later = LaterProducts.current()
        if later is None or not later.misses((self, bucket.index, position)):
            self._count_arrival(bucket, position)

    def arrive_later(self, index: int, position: int) -> None:
        """All products are there that a backward, over by now, has left for one gradient."""
        if self.synchronise:
            self._count_arrival(self.buckets[index], position)

    def _count_arrival(self, bucket: Bucket, position: int) -> None:
        arrived = self._arrived[bucket.index]
        if not arrived[position]:
            arrived[position] = True
            self._missing[bucket.index] -= 1
            if self._missing[bucket.index] == 0 and self._alone:
                self._launch_ready()

    def _begin(self) -> None:
        for bucket in self.buckets:  # what was dropped by hand is gone before more is reduced into its place
            if any(bucket.shown):
                self._adopt_bucket(bucket)
        self._open = True
        self._alone = self.defer_end or len(self._peers()) <= 1
        self._round = [b.index for b in self.buckets if self.chunk is None or b.key.chunk == self.chunk]
        self._next = 0
        self._arrived = [list(idle) for idle in self._idle]
        self._missing = [idle.count(False) for idle in self._idle]

    def expect(self, anywhere: Sequence[Sequence[bool]]) -> None:
        """Take over which parameters had a gradient on any rank in this step; equal on all ranks.

        One that nobody uses would else keep its bucket, and all behind it, from being reduced during backward. If it
        is used again, its gradient comes with the next round, which `reduce_all` makes if any rank needs one.
        """
        idle = [[not has_gradient for has_gradient in bucket] for bucket in anywhere]
        if idle != self._idle:
            self._collect()
            self._idle = idle
            self._arrivals.expect(idle)

    def _launch_ready(self) -> None:
        while self._next < len(self._round) and self._missing[self._round[self._next]] == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        while self._in_flight and len(self._in_flight) >= self._max_in_flight:
            self._complete_first()
        bucket = self.buckets[self._round[self._next]]
        for stretch in self._arrivals.holding(bucket):
            self.take(stretch)
        group, _ = self._groups[bucket.index]
        buffer = bucket.take_local(dtype=self._reduce_dtype, divisor=self.undo_scale(bucket))
        with named_range("reduce bucket", bucket.index):
            if bucket.partition.num_shards == 1:
                summed = None
                handle = ops.all_reduce(buffer, group=group, tag=bucket.index)
            else:
                summed = bucket.new_accumulator(buffer.dtype)
                handle = bucket.reduce_scatter(buffer, group=group, out=summed)
        self._in_flight.append((bucket, buffer, summed, handle))
        self._next += 1
        if self._max_in_flight == 0:
            self._complete_first()

    def undo_scale(self, bucket: Bucket) -> float:
        """Factor by which the reduced sums of a bucket are too small.

        A sum over N ranks in float16 leaves its range where no addend did; so they are divided before, by a power
        of two near the square root of N, and the rest of the way after.
        """
        if (self._reduce_dtype or bucket.key.grad_dtype) is not torch.float16:
            return 1.0
        group, replicas = self._groups[bucket.index]
        return float(2 ** math.ceil(math.log2(group.size * replicas.size) / 2))

    def _complete_first(self) -> None:
        bucket, buffer, summed, handle = self._in_flight.popleft()
        with named_range("end of reduce bucket", bucket.index):
            try:
                handle.wait()
            except CollectiveError as error:
                raise amid(
                    error,
                    f"reducing the gradients of {bucket.contents()} (every rank must make the same backward passes and "
                    "steps, at stage 3 through the same blocks in the same order)",
                ) from error.__cause__
            if summed is None:
                bucket.add_reduced(buffer)
            else:
                bucket.raw = summed
                bucket.give_up(buffer)

    def _complete_all(self) -> None:
        while self._in_flight:
            self._complete_first()

    def _finish_all_rounds(self) -> None:
        """End of a backward: close the open rounds of all models in one order, that of their wrapping.

        With several models in one backward their buckets may become full in another order on each rank, so none is
        launched before this moment.
        """
        for reducer in self._peers():
            if not reducer.defer_end:
                reducer.finish_round()
        self.finish_round()

    def finish_round(self) -> None:
        """Close the round that is open, if one is. Then every parameter has its handle: others may have used it."""
        self._collect()
        if not self._open:
            return
        while self._next < len(self._round):
            self._launch_next()
        self._complete_all()
        self._open = False
        self.rounds_since_settlement += 1
        for bucket in (self.buckets[index] for index in self._round):
            for position, parameter in enumerate(() if all(bucket.shown) else bucket.parameters):
                if parameter.grad is None:
                    parameter.grad = self._handles[bucket.index][position]
                    bucket.shown[position] = True

    def full_round(self) -> None:
        """One whole round now, whatever is there: the open one if a round is open, else a new one."""
        if not self._open:
            self._begin()
        self.finish_round()

    @property
    def is_open(self) -> bool:
        return self._open

    def waiting_bytes(self) -> int:
        """Of gradients that wait for others of their stretch."""
        return self._arrivals.waiting_bytes()

    def has_unreduced(self) -> bool:
        self._collect()
        return any(bucket.local is not None for bucket in self.buckets)

    def reduce_all(self) -> None:
        """Reduce all that is still local, and sum over the replicas; one round at least, also if nothing was used."""
        self.finish_round()
        self.adopt_all()
        for bucket in self.buckets:
            bucket.refuse_spoilt()
        if self.rounds_since_settlement == 0:
            self.full_round()
        more = self.has_unreduced()
        if self.holds_anywhere is not None and any(map(any, self._idle)):
            more = self.holds_anywhere(more)
        if more:
            self.full_round()
        self.rounds_since_settlement = 0
        under_way = []
        # Those that other pipeline stages hold too in an order of their own, in which all of these stages come to them.
        pairs = zip(self.buckets, self._groups, strict=True)
        for bucket, (_, replicas) in sorted(pairs, key=lambda pair: pair[0].tag if pair[0].key.is_over_stages else -1):
            if replicas.size > 1 and bucket.raw is not None:
                low = self._reduce_dtype is not None and bucket.raw.dtype != self._reduce_dtype
                sent = bucket.raw.to(self._reduce_dtype) if low else bucket.raw
                under_way.append((bucket, sent, ops.all_reduce(sent, group=replicas, tag=bucket.tag)))
        for bucket, sent, handle in under_way:
            handle.wait()
            if bucket.raw is not None and sent is not bucket.raw:
                bucket.raw.copy_(sent)
