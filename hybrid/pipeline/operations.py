"""What an operation of torch takes, gives and writes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hybrid import shims

__all__ = ["statistics_of", "tensors_in", "written_by"]


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
