"""Which buckets are whole on this rank, and how one becomes so: the mechanism below stage 3's `Unsharder`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

from hybrid.collectives import ops
from hybrid.collectives.call import amid
from hybrid.errors import CollectiveError
from hybrid.sharding.bucket import Bucket
from hybrid.sharding.gather_order import GatherOrder

__all__ = ["GatheredBuckets", "ShardedState"]

_ALIKE = (
    "at stage 3 every rank must run the same blocks, in the same order and as often; call one that this rank has no "
    "data for on no samples, or use stage 2, where ranks may differ"
)


class ShardedState(enum.Enum):
    """What of a bucket's parameters is in memory on this rank."""

    FREED = "the own shard, B/N"
    ARRIVING = "the own shard and the whole buffer, under way, B/N + B"
    WHOLE = "the own shard and the whole buffer, B/N + B"


class GatheredBuckets:
    """Gathers and frees; who needs what is not decided here.

    Args:
        buckets: by their index.
        groups: per bucket, its shard group.
        contents: index -> what lies in that bucket, for a message.
    """

    def __init__(
        self, buckets: Sequence[Bucket], groups: Sequence[ops.Group], *, contents: Callable[[int], str]
    ) -> None:
        self._groups = tuple(groups)
        self._contents = contents
        self._state = [ShardedState.FREED] * len(buckets)
        self._handles: dict[int, ops.Handle] = {}
        # None has a second rank where a rank's own part, which is all of it, comes from the host.
        self.order = GatherOrder(next((group for group in self._groups if group.size > 1), self._groups[0]))
        self.peak_whole = 0
        self._bytes = 0
        self.most_bytes = 0
        """Of whole parameters at a time, since `forget_most`."""

    def forget_most(self) -> None:
        """Count the most bytes at a time anew."""
        self.most_bytes = self._bytes

    def start(self, bucket: Bucket) -> bool:
        """Begin to gather a bucket; False where it is there, or under way."""
        if self._state[bucket.index] is not ShardedState.FREED:
            return False
        bucket.allocate_data()
        self._bytes += bucket.data.untyped_storage().nbytes()
        self.most_bytes = max(self.most_bytes, self._bytes)
        self.order.note(bucket.index)
        group = self._groups[bucket.index]
        with bucket.after_allocation():
            self._handles[bucket.index] = ops.all_gather(
                bucket.data, bounds=bucket.partition.bounds, group=group, tag=bucket.index
            )
        self._state[bucket.index] = ShardedState.ARRIVING
        whole = sum(state is not ShardedState.FREED for state in self._state)
        self.peak_whole = max(self.peak_whole, whole)
        return True

    def arrive(self, bucket: Bucket) -> None:
        """Wait for a bucket that is under way.

        Raises:
            CollectiveError: another rank is gone, or gathers something else; with the block's name.
        """
        if self._state[bucket.index] is not ShardedState.ARRIVING:
            return
        # Where it fails, messages may still come into the buffer: it keeps its memory, and its values are nobody's.
        self._state[bucket.index] = ShardedState.FREED
        try:
            self._handles.pop(bucket.index).wait()
        except CollectiveError as error:
            raise amid(error, f"gathering {self._contents(bucket.index)} ({_ALIKE})") from error.__cause__
        bucket.arrive()
        self._state[bucket.index] = ShardedState.WHOLE

    def free(self, bucket: Bucket) -> None:
        """Take the memory of a whole bucket away."""
        self._bytes -= bucket.data.untyped_storage().nbytes()
        bucket.free_data()
        self._state[bucket.index] = ShardedState.FREED

    def is_freed(self, bucket: Bucket) -> bool:
        return self._state[bucket.index] is ShardedState.FREED

    def is_whole(self, bucket: Bucket) -> bool:
        return self._state[bucket.index] is ShardedState.WHOLE

    def states(self) -> Mapping[int, ShardedState]:
        return dict(enumerate(self._state))

    def check_order(self, total: float) -> None:
        """Compare over the world what each rank gathered since the last time. *Collective* where `total` is not 0.

        Args:
            total: the sum over the world of `order.term()`.

        Raises:
            CollectiveError: ranks of one group gathered different blocks.
        """
        if total == 0.0:
            self.order.forget()
            return
        found = self.order.difference()
        self.order.forget()
        where = "another group of ranks"
        if found is not None:
            number, indices = found
            each = [
                f"rank {rank} {'none' if index is None else self._contents(index)}" for rank, index in indices.items()
            ]
            where = f"gather {number + 1} since the last step: {', '.join(each)}"
        raise CollectiveError(f"the ranks did not gather the same parameters ({_ALIKE}); {where}")
