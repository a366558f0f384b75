"""Every exception that a user of `hybrid` can meet.

    HybridError                      catch this to catch all of them
    ├── StrategyError  (ValueError)  a setting is wrong, contradicts another, or cannot work on this world size
    ├── LaunchError    (RuntimeError) the launch variables or the start of the process group are wrong
    ├── ModelError     (ValueError)  this model cannot be trained under this strategy
    ├── OptimizerError (ValueError)  this optimizer cannot be used with this model or strategy
    ├── PlanError      (ValueError)  nothing can be planned: an unknown model or device, nothing fits, no layout left
    ├── BatchError     (ValueError)  a batch does not have the form that the call needs
    ├── GradientAccessError (RuntimeError) a gradient was read that lives, reduced, in another place
    ├── CheckpointError (RuntimeError) a checkpoint could not be written, is damaged, or does not fit
    └── CollectiveError (RuntimeError) ranks did not meet in a collective, or one of them is gone

A message says what, both numbers, which parameter, axis or rank, and the nearest fix.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "BatchError",
    "CheckpointError",
    "CollectiveError",
    "GradientAccessError",
    "HybridError",
    "LaunchError",
    "ModelError",
    "OptimizerError",
    "PlanError",
    "StrategyError",
]


class HybridError(Exception):
    """Base class of every error that `hybrid` raises on purpose."""


def _listed(problems: tuple[str, ...], what: str) -> str:
    if len(problems) == 1:
        return problems[0]
    lines = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return f"{len(problems)} problems in {what}:{lines}"


class StrategyError(HybridError, ValueError):
    """One or more settings are wrong; `problems` holds one sentence for each of them."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(_listed(self.problems, "the strategy"))

    def __reduce__(self) -> tuple[type[StrategyError], tuple[tuple[str, ...]]]:
        return (type(self), (self.problems,))


class PlanError(HybridError, ValueError):
    """A model, a cluster or a request for a plan is wrong, or nothing fits; `problems` holds a sentence for each."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(_listed(self.problems, "the request"))

    def __reduce__(self) -> tuple[type[PlanError], tuple[tuple[str, ...]]]:
        return (type(self), (self.problems,))


class LaunchError(HybridError, RuntimeError):
    """A launch variable is missing, contradictory or impossible, or the processes could not meet."""


class ModelError(HybridError, ValueError):
    """The model cannot be trained under this strategy; the message names the module or parameter."""


class OptimizerError(HybridError, ValueError):
    """The optimizer cannot be used with this model or strategy."""


class BatchError(HybridError, ValueError):
    """The batch does not have the form or the size that the call needs."""


class GradientAccessError(HybridError, RuntimeError):
    """`p.grad` was used after the gradient had been reduced and cut; the message says how to read it."""


class CollectiveError(HybridError, RuntimeError):
    """A collective did not complete: a rank is gone, or not all ranks entered it within the timeout."""


class CheckpointError(HybridError, RuntimeError):
    """A checkpoint could not be written, is missing or damaged, or does not fit the model and the optimizer."""
