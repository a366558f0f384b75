"""Checkpoints (recompute) in a model's own code: which of them something runs in."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple, NoReturn

from torch.utils.checkpoint import CheckpointFunction

from hybrid import shims
from hybrid.errors import ModelError
from hybrid.pipeline.flow import Flow, crossing_values

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


def check_told_apart(flow: Flow, chunks: Sequence[range]) -> None:
    """That each chunk knows which call of a unit comes again in a backward, without the random state too.

    Calls of its own are all alike then: the unit runs again. Of those of chunks before, one comes whose value crossed.

    Raises:
        ModelError: it cannot.
    """
    crossing = crossing_values(flow, chunks)
    calls: dict[str, list[int]] = {}
    for index in sorted(flow.checkpointed):
        calls.setdefault(flow.calls[index].unit, []).append(index)
    for unit in {flow.calls[index].unit: None for index in sorted(flow.unkept)}:
        for chunk, own in enumerate(chunks):
            came = {place[0] for place in crossing[chunk - 1]} if chunk else set()
            num_came = len(came.intersection(calls[unit]))
            if num_came > 1 or (num_came and any(index in own for index in calls[unit])):
                refuse_alike(unit, len(calls[unit]))


def refuse_alike(unit: str, num_calls: int) -> NoReturn:
    raise ModelError(
        f"checkpoints (recompute) in the model's own code cover {num_calls} calls of {unit!r}, in several chunks of "
        "the pipeline, and which of them comes again in backward cannot be told without the random state: leave "
        "preserve_rng_state=True, or use strategy.recompute"
    )
