"""Whether random numbers decide how a forward goes on, as LayerDrop does: `if torch.rand([]) < p: continue`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hybrid import shims
from hybrid.pipeline.operations import tensors_in

__all__ = ["Chance"]

_COMPARES = ("lt", "le", "gt", "ge")


class Chance:
    """Listens to the operations of one forward outside its units."""

    def __init__(self) -> None:
        self.decides = False
        """Whether the forward has asked whether something drawn is true."""
        self._drawn: set[int] = set()

    def note(self, func: Any, args: tuple[Any, ...], read: Iterable[torch.Tensor], output: Any) -> None:
        """An operation; the caller keeps the memory."""
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        if not is_drawn and not self._drawn:
            return
        given = list(read)
        if not is_drawn:
            is_drawn = any(shims.memory_of(tensor) in self._drawn for tensor in given)
        name = func.overloadpacket.__name__
        if is_drawn and name in _COMPARES and isinstance(args[1], int | float) and not 0 < args[1] < 1:
            is_drawn = False  # a layer that is dropped with probability 0
        if is_drawn and name in {"_local_scalar_dense", "is_nonzero"} and given[0].dtype is torch.bool:
            self.decides = True
        for tensor in tensors_in(output):
            if is_drawn:
                self._drawn.add(shims.memory_of(tensor))
            else:
                self._drawn.discard(shims.memory_of(tensor))
