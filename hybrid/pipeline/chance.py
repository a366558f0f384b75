"""Whether random numbers may decide how a forward goes on, as LayerDrop does: `if torch.rand([]) < p: continue`.

Those of torch are followed up to where the forward asks for one; of Python's and numpy's only that they were drawn is
known. Whether they decide is for other forwards to tell, with other numbers.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch

from hybrid import shims
from hybrid.pipeline.operations import tensors_in

__all__ = ["Chance", "python_generators"]

_COMPARES = ("lt", "le", "gt", "ge")


def python_generators() -> tuple[object, bytes]:
    """The state of Python's generator and of numpy's: it changes with every number that is drawn."""
    numpy = sys.modules.get("numpy")  # a model that draws from it has imported it
    return random.getstate(), pickle.dumps(numpy.random.get_state()) if numpy else b""


class Chance:
    """Listens to the operations of one forward outside its units."""

    def __init__(self) -> None:
        self.decides = False
        """Whether the forward has asked what was drawn, or whether it is true."""
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
        if is_drawn and name in {"_local_scalar_dense", "is_nonzero"}:
            self.decides = True
        for tensor in tensors_in(output):
            if is_drawn:
                self._drawn.add(shims.memory_of(tensor))
            else:
                self._drawn.discard(shims.memory_of(tensor))
