"""Samples that come one after the other, without a length or an index: which of them each reader takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from hybrid.data.coordinate import replica

__all__ = ["DistributedIterable"]


class DistributedIterable(IterableDataset[Any]):
    """Every sample of `source` once over all data-parallel ranks and their DataLoader workers.

    Sample i goes to data-parallel rank i mod R, and there to worker (i div R) mod W. Ranks that compute parts of the
    same sample (tensor, pipeline) read the same ones. Ranks get numbers of samples that differ by one at most, so
    their numbers of batches may differ by one: `hybrid.even_batches` and `hybrid.evaluate` know how to end.

    Args:
        source: yields the same samples in the same order on every rank and worker, at each pass. What it costs to
            pass over a sample, every reader pays for every sample: cut large sources by files instead.
        num_replicas, rank: the data-parallel coordinate; by default that of the running job.

    Raises:
        BatchError: no job runs yet and no coordinate is given, or half of one.
    """

    def __init__(self, source: Iterable[Any], *, num_replicas: int | None = None, rank: int | None = None) -> None:
        coordinate = replica("DistributedIterable", num_replicas, rank)
        self.source = source
        self.num_replicas = coordinate.num_replicas
        self.rank = coordinate.rank

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return islice(iter(self.source), self.rank + self.num_replicas * index, None, self.num_replicas * count)
