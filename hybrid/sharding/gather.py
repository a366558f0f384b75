"""After the step: each rank's updated shard of the parameters goes to the others.

Gathered either before `step` returns, or (`overlap_param_gather`) while the next forward already runs: then a
parameter whose new value is still on its way is of a class that waits for its bucket as soon as anybody
touches it, in forward or elsewhere, so that no read can see an old or half-written value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hybrid.collectives import ops
from hybrid.sharding.bucket import Bucket
from hybrid.sharding.metadata import METADATA_CALLS

__all__ = ["ParameterGather", "PendingParameter"]

# Metadata, and what puts a gradient there or takes it away.
_HARMLESS: frozenset[Any] = METADATA_CALLS | {getattr(torch.Tensor, "grad").__set__, torch.Tensor.data_ptr}  # noqa: B009


class PendingParameter(nn.Parameter):
    """The class of a parameter while its new value is on its way; any use of the value waits for it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _HARMLESS:
            for parameter in _pending_in((args, kwargs)):
                waiter = _waiters.get(id(parameter))
                if waiter is not None:  # else it came with the bucket of an argument before it
                    waiter.arrive()
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


class _Waiter:
    """Leads from a pending parameter to the gather that brings it. One per bucket under way."""

    def __init__(self, gather: ParameterGather, bucket: Bucket) -> None:
        self.gather = gather
        self.bucket = bucket

    def arrive(self) -> None:
        self.gather.wait_for(self.bucket)


# id of a pending parameter -> its waiter. Entries live only while the bucket, which holds the parameter, is
# under way; a parameter object has no room of its own for this once its class is swapped.
_waiters: dict[int, _Waiter] = {}


def _pending_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if type(item) is PendingParameter:
            found.append(item)
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
    return found


class ParameterGather:
    """Gathers buckets over their shard groups. `groups`: per bucket, its shard group."""

    def __init__(self, buckets: Sequence[Bucket], *, groups: Sequence[ops.Group]) -> None:
        self._buckets = tuple(buckets)
        self._groups = tuple(groups)
        self._under_way: deque[tuple[Bucket, ops.Handle]] = deque()

    def start(self, buckets: Sequence[Bucket]) -> None:
        """Send the own shards of these buckets, in forward order (the reverse of the launch order of gradients)."""
        for bucket in sorted(buckets, key=lambda bucket: -bucket.index):
            group = self._groups[bucket.index]
            if group.size == 1:
                continue
            handle = ops.all_gather(bucket.data, bounds=bucket.partition.bounds, group=group, tag=bucket.index)
            self._under_way.append((bucket, handle))

    def defer(self) -> None:
        """Let what is under way arrive while others go on: whoever touches a parameter of it waits."""
        for bucket, _ in self._under_way:
            waiter = _Waiter(self, bucket)
            for parameter in bucket.parameters:
                if type(parameter) is nn.Parameter:
                    parameter.__class__ = PendingParameter
                    _waiters[id(parameter)] = waiter
        # A subclass of Parameter keeps its class and its behaviour; its bucket is waited for at once.
        last = -1
        for position, (bucket, _) in enumerate(self._under_way):
            if any(type(parameter) is not PendingParameter for parameter in bucket.parameters):
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
        handle.wait()
        for parameter in bucket.parameters:
            if type(parameter) is PendingParameter:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]
                _waiters.pop(id(parameter), None)
