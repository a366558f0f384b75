"""What a training step tells those who ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

__all__ = ["StepCallback", "StepRecord"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step, equal on all ranks but for `rank`, `seconds` and `memory_bytes`.

    Tensors are 0-d and on the device: nothing waits for it until somebody reads `loss.item()`, `tokens` or `samples`.
    """

    step: int
    """Number of the step, from the callback's `first_step`; steps that were skipped count."""
    rank: int
    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    """Before clipping."""
    lr: tuple[float | torch.Tensor, ...]
    """Of each param group, in this step."""
    seconds: float
    """Wall time of the call on this rank; on a GPU that of the host."""
    skipped: bool
    """No update: no sample in the whole batch, or an overflow under loss scaling."""
    totals: torch.Tensor = field(repr=False)
    """(loss sum, weight, samples, tokens), summed over the world."""
    read_memory: Callable[[], Mapping[str, int]] = field(repr=False)

    @property
    def samples(self) -> int:
        """Of the whole world's batch."""
        return int(self.totals[2].item())

    @property
    def tokens(self) -> int:
        """Of the whole world's batch, counted as in `StepResult`."""
        return int(self.totals[3].item())

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """On this rank now: parameters, gradients, optimizer_state, and on a GPU the device's `peak`."""
        return self.read_memory()


#: What `model.add_step_callback` takes.
StepCallback = Callable[[StepRecord], object]
