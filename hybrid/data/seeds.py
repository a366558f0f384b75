"""Random numbers of a data loader: other ones on each data-parallel rank, the same where ranks read one sample."""

from __future__ import annotations

import numpy
import torch

from hybrid.data.coordinate import replica
from hybrid.errors import BatchError

__all__ = ["loader_generator"]


def loader_generator(
    seed: int, *, epoch: int = 0, num_replicas: int | None = None, rank: int | None = None
) -> torch.Generator:
    """A generator for `DataLoader(generator=...)`, from (seed, epoch, data-parallel rank) alone.

    The loader seeds `random`, numpy and torch in its workers from it. Without one it draws from torch's own
    generator, whose state differs between the stages of a pipeline, and is the same on all data-parallel ranks of a
    script that seeds them alike: ranks of one sample would augment it differently, or all ranks their samples alike.

    Args:
        seed: of the run.
        epoch: for other numbers in each epoch where the loader is made anew for each; one loader goes on by itself.
        num_replicas, rank: the data-parallel coordinate; by default that of the running job.

    Raises:
        BatchError: a negative seed or epoch; no job runs yet and no coordinate is given, or half of one.
    """
    if seed < 0 or epoch < 0:
        raise BatchError(f"loader_generator: seed is {seed} and epoch is {epoch}; expected 0 or more")
    coordinate = replica("loader_generator", num_replicas, rank)
    key = numpy.random.SeedSequence((seed, epoch, coordinate.rank)).generate_state(1, numpy.uint64)
    return torch.Generator().manual_seed(int(key[0]) >> 1)
