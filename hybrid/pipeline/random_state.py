"""The generators that a forward draws from without saying so: torch's, Python's `random` and numpy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["kept_generators", "set_generators"]


@contextmanager
def kept_generators(device: torch.device | None = None) -> Iterator[None]:
    """Inside, they may be drawn from and set; afterwards they go on as before. `device`: whose is kept too."""
    numpy = sys.modules.get("numpy")  # a model that draws from it has imported it
    states = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        if numpy and states[1] is not None:
            numpy.random.set_state(states[1])


def set_generators(seed: int, device: torch.device) -> None:
    """Set all of them to what follows from a seed below 2**63."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed % 2**32)
