"""The dtype of an optimizer's state: torch's own optimizers want it in that of what they step on."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["in_precision"]


def in_precision(values: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Per-parameter state, its numbers of one dim or more in the stepped dtype, as torch's `load_state_dict` gives it.

    State that was made from a low-precision parameter would lose what its fp32 master keeps; state of another run's
    dtype does not go together with the gradient in one operation. Steps and integers stay.
    """
    return {key: value if key == "step" else _cast(value, dtype) for key, value in values.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        is_number = value.dim() > 0 and (value.is_floating_point() or value.is_complex())
        return value.to(dtype) if is_number and value.is_complex() == dtype.is_complex else value
    if type(value) is list:
        return [_cast(item, dtype) for item in value]
    return value
