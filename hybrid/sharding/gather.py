"""After the step: each rank's updated shard of the parameters goes to the others.

Gathered either before `step` returns, or (`overlap_param_gather`) while the next forward already runs: then a
parameter whose new value is still on its way is of a class that waits for its bucket as soon as anybody
touches it, in forward or elsewhere, so that no read can see an old or half-written value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import nn

from hybrid.collectives import ops
from hybrid.collectives.ranges import named_range
from hybrid.sharding.absence import AbsentParameter, mark_absent, mark_present
from hybrid.sharding.bucket import Bucket

__all__ = ["ParameterGather", "carry_masters"]


class _Waiter:
    """Keeper of the parameters of one bucket that is under way: bringing them means waiting."""

    def __init__(self, gather: ParameterGather, bucket: Bucket) -> None:
        self._gather = gather
        self._bucket = bucket

    def bring(self, parameter: nn.Parameter) -> None:
        self._gather.wait_for(self._bucket)


class ParameterGather:
    """Gathers buckets over their shard groups. `groups`: by the index of a bucket."""

    def __init__(self, groups: Sequence[ops.Group]) -> None:
        self._groups = tuple(groups)
        self._under_way: deque[tuple[Bucket, ops.Handle]] = deque()
        self._waiters: dict[int, _Waiter] = {}

    def start(self, buckets: Sequence[Bucket]) -> None:
        """Send the own shards of these buckets, in forward order (the reverse of the launch order of gradients)."""
        for bucket in sorted(buckets, key=lambda bucket: -bucket.index):
            group = self._groups[bucket.index]
            if group.size == 1:
                continue
            with named_range("gather bucket", bucket.index):
                handle = ops.all_gather(bucket.data, bounds=bucket.partition.bounds, group=group, tag=bucket.index)
            self._under_way.append((bucket, handle))

    def defer(self) -> None:
        """Let what is under way arrive while others go on: whoever touches a parameter of it waits."""
        for bucket, _ in self._under_way:
            self._waiters[bucket.index] = _Waiter(self, bucket)
            mark_absent(bucket.parameters, self._waiters[bucket.index])
        # A subclass of Parameter keeps its class and its behaviour; its bucket is waited for at once.
        last = -1
        for position, (bucket, _) in enumerate(self._under_way):
            if any(type(parameter) is not AbsentParameter for parameter in bucket.parameters):
                last = position
        for _ in range(last + 1):
            self._finish_first()

    def wait_for(self, bucket: Bucket) -> None:
        """Wait for one bucket, and for those sent before it: all ranks finish in the order of sending."""
        while any(other is bucket for other, _ in self._under_way):
            self._finish_first()

    def finish(self) -> None:
        while self._under_way:
            self._finish_first()

    def _finish_first(self) -> None:
        bucket, handle = self._under_way.popleft()
        with named_range("end of gather bucket", bucket.index):
            handle.wait()
        mark_present(bucket.parameters)
        self._waiters.pop(bucket.index, None)


def carry_masters(before: Sequence[Bucket], after: Sequence[Bucket], *, groups: Sequence[ops.Group]) -> None:
    """Give buckets that were cut anew the exact masters of the old ones, one whole bucket at a time. *Collective.*

    Which parameters lie together does not depend on the kind of the cut.

    Args:
        groups: the shard group of each old bucket, by its index.
    """
    for old, new in zip(before, after, strict=True):
        if old.master is None:
            continue
        whole = torch.zeros(old.partition.num_elements, dtype=old.master.dtype, device=old.data.device)
        whole[old.low : old.high].copy_(old.master)
        if groups[old.index].size > 1:
            ops.all_gather(whole, bounds=old.partition.bounds, group=groups[old.index], tag=old.index).wait()
        for position, fqn in enumerate(old.fqns):
            new.set_master(new.position_of[fqn], old.view(whole, position))
