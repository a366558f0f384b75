"""Products of small matrices by oneDNN, wherever the tests run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from hybrid import cpu_products

__all__ = ["small_products_by_onednn"]


@contextlib.contextmanager
def small_products_by_onednn(wanted: bool = True) -> Iterator[None]:
    """Jobs that are joined inside take oneDNN for matrices of any size; unwanted, nothing changes.

    Where torch comes without oneDNN the products stay torch's.
    """
    if not wanted or not torch.backends.mkldnn.is_available():
        yield
        return
    usual, word = cpu_products._State.least_multiplications, os.environ.get(cpu_products.VARIABLE)
    cpu_products._State.least_multiplications = 1
    os.environ[cpu_products.VARIABLE] = "1"
    try:
        yield
    finally:
        cpu_products._State.least_multiplications = usual
        cpu_products.take(False)
        if word is None:
            del os.environ[cpu_products.VARIABLE]
        else:
            os.environ[cpu_products.VARIABLE] = word
