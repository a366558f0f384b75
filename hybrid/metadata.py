"""The calls on a tensor that read no values: what may go on while a tensor's values are elsewhere."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["METADATA_CALLS"]

_PROPERTIES = [
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "is_sparse",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_quantized",
    "is_leaf",
    "requires_grad",
    "grad_fn",
    "grad",
    "retains_grad",
    "itemsize",
    "nbytes",
]
_METHODS = [
    "size",
    "dim",
    "numel",
    "nelement",
    "element_size",
    "stride",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "__len__",
    "__hash__",
    "storage_offset",
    "get_device",
]

# `__torch_function__` receives a property's getter, and a method as the descriptor found on the class.
METADATA_CALLS: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES]
    + [getattr(torch.Tensor, name) for name in _METHODS]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)
