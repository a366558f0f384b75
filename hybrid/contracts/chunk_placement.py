"""Which pipeline rank holds which chunk of a model: the one place that knows.

Chunks are numbered along the model; with 3 stages and 2 chunks each they lie

    round    rank 0  0  3        v    rank 0  0  5
             rank 1  1  4             rank 1  1  4
             rank 2  2  5             rank 2  2  3

In a V neighbours along the model are neighbours among the ranks, and where it turns (2, 3) they are on one rank:
nothing is sent there. The first rank holds the model's beginning and its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import lru_cache

__all__ = ["ChunkPlacement", "best_placement", "chunk_rank", "chunks_on"]


class ChunkPlacement(Enum):
    """How chunks lie on ranks; see the top of the file."""

    ROUND = "round"
    V = "v"

    def rule(self, num_stages: int) -> str:
        """For messages."""
        return f"chunk modulo {num_stages} stages" if self is ChunkPlacement.ROUND else "the chunks lie in a V"


def chunk_rank(chunk: int, num_stages: int, placement: ChunkPlacement = ChunkPlacement.ROUND) -> int:
    """The pipeline rank that holds this chunk."""
    if num_stages < 1 or chunk < 0:
        raise ValueError(f"chunk {chunk} of {num_stages} stages: the chunk must be at least 0, num_stages at least 1")
    leg, place = divmod(chunk, num_stages)
    return num_stages - 1 - place if placement is ChunkPlacement.V and leg % 2 else place


@lru_cache(maxsize=4096)
def chunks_on(
    rank: int, num_stages: int, num_chunks: int, placement: ChunkPlacement = ChunkPlacement.ROUND
) -> tuple[int, ...]:
    """The chunks that a pipeline rank holds, in the order of the model."""
    return tuple(chunk for chunk in range(num_chunks) if chunk_rank(chunk, num_stages, placement) == rank)


def best_placement(found: Mapping[tuple[int, int], int], num_stages: int) -> ChunkPlacement:
    """The placement that fits (rank, chunk) -> number of actions best; `ROUND` where both fit alike."""

    def num_misfits(placement: ChunkPlacement) -> int:
        return sum(
            count
            for (rank, chunk), count in found.items()
            if chunk < 0 or chunk_rank(chunk, num_stages, placement) != rank
        )

    return min(ChunkPlacement, key=num_misfits)
