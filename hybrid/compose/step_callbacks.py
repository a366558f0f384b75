"""Who is told of each step of a wrapped model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hybrid.profile.step_record import StepCallback, StepRecord

if TYPE_CHECKING:
    from hybrid.compose.runtime import Runtime
    from hybrid.compose.train_step import StepResult

__all__ = ["StepCallbacks"]


class StepCallbacks:
    """Of one wrapped model, in the order in which they were added."""

    def __init__(self) -> None:
        self._callbacks: dict[int, tuple[StepCallback, int]] = {}
        self._keys = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def add(self, callback: StepCallback, *, first_step: int) -> Callable[[], None]:
        """Returns what removes it again; doing that twice is no error."""
        key = next(self._keys)
        self._callbacks[key] = (callback, first_step)
        return lambda: self._callbacks.pop(key, None) and None

    def tell(self, runtime: Runtime, result: StepResult, lr: tuple[Any, ...]) -> None:
        """An exception in a callback is the caller's."""
        for key, (callback, step) in list(self._callbacks.items()):
            self._callbacks[key] = (callback, step + 1)
            callback(
                StepRecord(
                    step=step,
                    rank=runtime.mesh.rank,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    lr=lr,
                    seconds=result.seconds,
                    skipped=result.skipped,
                    totals=result.totals,
                    read_memory=lambda: _memory(runtime),
                )
            )


def _memory(runtime: Runtime) -> dict[str, int]:
    device = runtime.mesh.device
    peak = {"peak": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}
    return {**runtime.memory_bytes(), **peak}
