"""Checkpoints (recompute) in a model's own code: which of them something runs in."""

from __future__ import annotations

import inspect
from types import FrameType
from typing import NamedTuple, NoReturn

from torch.utils.checkpoint import CheckpointFunction

from hybrid import shims
from hybrid.errors import ModelError

__all__ = ["Checkpoints", "check_told_apart", "checkpoints_around", "refuse_alike"]

_FILE = CheckpointFunction.forward.__code__.co_filename


class Checkpoints(NamedTuple):
    """Calls of torch's checkpoint in which something runs."""

    outermost: FrameType
    is_reentrant: bool
    """Whether one of them is of the kind that is a function."""
    keep_random_state: bool


def checkpoints_around() -> Checkpoints | None:
    """Those in which this runs, if any."""
    found: Checkpoints | None = None
    is_reentrant, keep = False, True
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        is_function = code is CheckpointFunction.forward.__code__
        is_reentrant |= is_function
        if is_function or (code.co_name == "checkpoint" and code.co_filename == _FILE):
            keep = keep and shims.keeps_random_state(frame)
            found = Checkpoints(frame, is_reentrant, keep)
        frame = frame.f_back
    return found


def check_told_apart(unit: str, kept: dict[str, list[bool]], keeps_random_state: bool) -> None:
    """A unit is called in a checkpoint of a forward.

    Args:
        kept: of the calls before, by unit, whether their checkpoints keep the random state.

    Raises:
        ModelError: it is called several times, and not all of its checkpoints do.
    """
    calls = kept.setdefault(unit, [])
    calls.append(keeps_random_state)
    if len(calls) > 1 and not all(calls):
        refuse_alike(unit, len(calls))


def refuse_alike(unit: str, num_calls: int) -> NoReturn:
    raise ModelError(
        f"checkpoints (recompute) in the model's own code cover {num_calls} calls of {unit!r}, and which of them comes "
        "again in backward cannot be told without the random state: leave preserve_rng_state=True, or use "
        "strategy.recompute"
    )
