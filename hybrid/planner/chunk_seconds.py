"""What the pipeline chunks of a layout take per micro-batch, by the phases of its schedule.

forward    F
backward   B, or its half I where the schedule splits it
weights    W; nothing where it does not
later      of B what follows when the gradient for the chunk before has been sent
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hybrid.contracts.chunk_placement import ChunkPlacement, chunks_on
from hybrid.contracts.schedule_choice import schedule_placement, schedule_splits_backward
from hybrid.planner.data_parallel import ChunkState, StateSeconds
from hybrid.planner.job import Candidate

__all__ = ["ChunkSeconds", "PricedChunk", "placed"]


@dataclass(frozen=True, slots=True)
class PricedChunk:
    """Of one chunk and micro-batch, without what it waits for; `parts` of all phases together."""

    forward: float
    backward: float
    weights: float
    later: float
    parts: tuple[tuple[str, float], ...]
    state: ChunkState


@dataclass(frozen=True, slots=True)
class ChunkSeconds:
    """Per chunk of the model, in its order."""

    forward: Sequence[float]
    backward: Sequence[float]
    weights: Sequence[float]
    later: Sequence[float]

    @classmethod
    def plain(cls, chunks: Sequence[PricedChunk]) -> ChunkSeconds:
        """Without waiting for anything."""
        return cls(
            [c.forward for c in chunks],
            [c.backward for c in chunks],
            [c.weights for c in chunks],
            [c.later for c in chunks],
        )

    @classmethod
    def waiting(
        cls, chunks: Sequence[PricedChunk], states: Sequence[StateSeconds], candidate: Candidate
    ) -> ChunkSeconds:
        """With what they wait for gathers and reductions; `states`: of each pipeline rank."""
        found = cls.plain(chunks)
        forward, backward, weights = list(found.forward), list(found.backward), list(found.weights)
        reducing = weights if schedule_splits_backward(candidate.schedule) else backward
        for own, state in zip(placed(candidate, len(chunks)), states, strict=True):
            for turn, chunk in enumerate(own):
                forward[chunk] += state.forward_gathers[turn]
                backward[chunk] += state.backward_gathers[turn]
                reducing[chunk] += state.reductions[turn]
        # Gradients that are reduced as they come have little memory at a time: none may wait.
        every = candidate.grad_reduce == "every_micro_batch" or candidate.num_micro_batches == 1
        later = [0.0] * len(chunks) if candidate.zero_stage >= 2 and every else found.later
        return cls(forward, backward, weights, later)

    def with_messages(self, shown: Sequence[float]) -> ChunkSeconds:
        """With what each chunk waits for its messages, half of it forward and half backward."""
        if not any(shown):
            return self
        return ChunkSeconds(
            [a + b / 2 for a, b in zip(self.forward, shown, strict=True)],
            [a + b / 2 for a, b in zip(self.backward, shown, strict=True)],
            self.weights,
            self.later,
        )

    def of_rank(self, own: Sequence[int]) -> float:
        """All work of a rank with these chunks on one micro-batch."""
        return sum(self.forward[chunk] + self.backward[chunk] + self.weights[chunk] for chunk in own)


def placed(candidate: Candidate, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """The chunks of each pipeline rank."""
    return _placed(candidate.pp, num_chunks, schedule_placement(candidate.schedule) is ChunkPlacement.V)


@lru_cache(maxsize=1024)
def _placed(pp: int, num_chunks: int, is_v: bool) -> tuple[tuple[int, ...], ...]:
    placement = ChunkPlacement.V if is_v else ChunkPlacement.ROUND
    return tuple(chunks_on(rank, pp, num_chunks, placement) for rank in range(pp))
