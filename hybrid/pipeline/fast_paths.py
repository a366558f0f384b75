"""The kernels of torch's transformer layers for inference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["slow_paths"]


@contextmanager
def slow_paths() -> Iterator[None]:
    """Without them: they return nested tensors, which do not cross from stage to stage."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
