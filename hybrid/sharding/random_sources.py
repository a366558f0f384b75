"""Random numbers that an optimizer's step may draw: torch's, Python's and NumPy's, and from generators of its own."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["undisturbed"]

_Source = tuple[Callable[[], Any], Callable[[Any], Any]]  # read its state, write it back


@contextmanager
def undisturbed(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[Callable[[], bool]]:
    """Afterwards every source is as before; yields a function that says whether something was drawn since."""
    sources: list[_Source] = [(random.getstate, random.setstate), (_numpy_state, np.random.set_state)]
    values = [*vars(optimizer).values(), *(value for group in optimizer.param_groups for value in group.values())]
    sources += [own for value in values if (own := _own_source(value)) is not None]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        before = [read() for read, _ in sources]

        def digest() -> bytes:
            on_device = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b""
            states = [state.numpy() if isinstance(state := read(), torch.Tensor) else state for read, _ in sources]
            return torch.get_rng_state().numpy().tobytes() + on_device + pickle.dumps(states)

        begin = digest()
        try:
            yield lambda: digest() != begin
        finally:
            for (_, write), state in zip(sources, before, strict=True):
                write(state)


def _numpy_state() -> Any:
    return np.random.get_state(legacy=False)


def _own_source(value: Any) -> _Source | None:
    """Of a generator object."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None
