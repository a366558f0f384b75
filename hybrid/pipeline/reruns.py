"""Units that a checkpoint of the model's own runs again in backward: which of their calls that is, and what it returns.

The code around a unit in a checkpoint runs again as well, on a stage that has the unit and on the one behind the cut:

    checkpoint(lambda x: dropout(block(x)), x)     the stage behind has what `block` returned, and drops out of that

A unit may be called several times. The random state before a call tells them apart: it is another before each, and a
checkpoint brings it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hybrid.pipeline.chunk_run import ChunkRun
from hybrid.pipeline.own_checkpoints import refuse_alike

__all__ = ["Rerun", "Reruns"]

_Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """A call in a forward that is to come again.

    Args:
        index: its number in the forward.
        state: of torch's generator before it.
        is_kept: whether a checkpoint brings that state back.
        elsewhere: of a call of an earlier chunk, what has come from there.
    """

    index: int
    state: torch.Tensor
    is_kept: bool
    elsewhere: ChunkRun | None


class Reruns:
    """Those of the micro-batches that are between forward and backward."""

    def __init__(self) -> None:
        self.place: _Key = (0, 0)
        """(chunk, micro-batch) whose backward runs."""
        self._has_begun = False
        """Whether some backward of this step has: what an earlier step ended with is to come in this one."""
        self.is_inside = False
        """Whether a unit runs again."""
        self._noted: dict[_Key, dict[str, list[Rerun]]] = {}

    def note(self, run: ChunkRun, index: int) -> None:
        """A unit is about to be called in a forward, inside a checkpoint."""
        if not torch.is_grad_enabled():
            return
        noted = self._noted.setdefault((run.chunk, run.micro_batch), {})
        unit = run.way.flow.calls[index].unit
        elsewhere = run.as_received(index) if index < run.calls.start else None
        is_kept = index not in run.way.flow.unkept
        again = Rerun(index=index, state=torch.random.get_rng_state(), is_kept=is_kept, elsewhere=elsewhere)
        noted.setdefault(unit, []).append(again)

    def begin_backward(self, chunk: int, micro_batch: int) -> None:
        """What was noted for the backward before this one goes."""
        if self._has_begun and self.place != (chunk, micro_batch):
            self._noted.pop(self.place, None)
        self.place, self._has_begun = (chunk, micro_batch), True

    def clear(self) -> None:
        """A step ends, or has failed."""
        self._noted.clear()
        self.is_inside = self._has_begun = False

    def find(self, unit: str) -> Rerun | None:
        """The call of a unit that comes again now; None where none was noted.

        Raises:
            ModelError: it may be one of several.
        """
        noted = self._noted.get(self.place, {}).get(unit, [])
        if len(noted) < 2:
            return noted[0] if noted else None
        state = torch.random.get_rng_state()
        alike = [again for again in noted if again.is_kept and torch.equal(again.state, state)]
        if len(alike) != 1 and not all(again.is_kept for again in noted):
            # Without the state calls of this chunk draw nothing that is to come again, so one is as good as another.
            alike = [again for again in noted if again.elsewhere is None][:1]
            alike += [again for again in noted if again.elsewhere is not None and again.elsewhere.has_received()]
        if len(alike) != 1:
            refuse_alike(unit, len(noted))
        return alike[0]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A unit runs again: units in it are part of it."""
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False
