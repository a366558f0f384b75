"""What an operation of torch takes, gives and writes to, and whether it is part of a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from hybrid import shims

__all__ = ["checkpoint_around", "statistics_of", "tensors_in", "written_by"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Of what an operation takes or gives: tensors and lists of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for place, name in shims.written_arguments(func):
        found += tensors_in(args[place] if place < len(args) else kwargs.get(name))
    return found


def statistics_of(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Running mean and variance that a normalisation updates; not all of its schemas say so."""
    is_training = "batch_norm" in func.overloadpacket.__name__ and len(args) > 5 and args[5] is True
    return [tensor for tensor in args[3:5] if isinstance(tensor, torch.Tensor)] if is_training else []


def checkpoint_around() -> tuple[FrameType | None, bool]:
    """(the innermost call of torch's checkpoint that this runs in, whether it is the kind that is a function)."""
    frame = inspect.currentframe()
    is_reentrant = False
    while frame is not None:
        code = frame.f_code
        is_reentrant |= code is CheckpointFunction.forward.__code__
        if code.co_name == "checkpoint" and code.co_filename == _FILE:
            return frame, is_reentrant
        frame = frame.f_back
    return None, is_reentrant


_FILE = CheckpointFunction.forward.__code__.co_filename
