"""The surroundings in which each layer is built: its own random state, and the defaults of the list's construction."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

__all__ = ["BuildDevice", "BuildSettings"]

BuildDevice = Literal["real", "meta"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """Under which defaults layers are built, whenever that will be.

    Args:
        seed: each layer's own seed comes from it and the layer's index.
        dtype: torch's default dtype.
        device: torch's default device.
    """

    seed: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def now(cls, seed: int | None) -> BuildSettings:
        """Those in force now; without a seed one is drawn, on the CPU wherever layers will be."""
        if seed is None:
            seed = int(torch.randint(2**62, (), device="cpu").item())
        device = torch.get_default_device()
        # Nothing is built at construction, which is all that `with torch.device("meta"):` around it can have meant.
        device = torch.device("cpu") if device.type == "meta" else device
        return cls(seed=seed, dtype=torch.get_default_dtype(), device=device)

    def seed_of(self, index: int) -> int:
        """The first 63 bits of a hash of the base seed and the index: neighbours have nothing in common."""
        return int.from_bytes(hashlib.sha256(f"{self.seed}/{index}".encode()).digest()[:8], "big") >> 1

    @contextmanager
    def building(self, index: int, *, device: BuildDevice) -> Iterator[None]:
        """Inside, layer `index` is built as in every other process; random states are those of before afterwards."""
        seed, dtype = self.seed_of(index), torch.get_default_dtype()
        python, numpy = random.getstate(), np.random.get_state()
        # Seeded one by one: torch.manual_seed would leave a seed in waiting for devices that nobody has used yet.
        gpus = [torch.cuda.current_device()] if device == "real" and torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=gpus), torch.device("meta" if device == "meta" else self.device):
            try:
                random.seed(seed)
                np.random.seed(seed % 2**32)
                torch.default_generator.manual_seed(seed)
                if gpus:
                    torch.cuda.manual_seed(seed)
                torch.set_default_dtype(self.dtype)
                yield
            finally:
                torch.set_default_dtype(dtype)
                random.setstate(python)
                np.random.set_state(numpy)
