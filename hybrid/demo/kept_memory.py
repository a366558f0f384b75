"""The memory that operations take and that is held still: of a forward, what it keeps for backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hybrid import shims

__all__ = ["KeptMemory"]


class KeptMemory(shims.TorchDispatchMode):
    """Notes the memory that operations inside it take; `num_bytes` is how much of it is held still.

    Around a forward: what it keeps for backward. torch's hooks for saved tensors would not show what selective
    recompute holds by itself. Parameters do not count: they were there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._taken: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if StorageWeakRef(storage) not in given:  # else a view, or written in place
                self._taken[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def num_bytes(self) -> int:
        return sum(size for storage, size in self._taken.items() if not storage.expired())


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
