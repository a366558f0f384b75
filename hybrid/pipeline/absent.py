"""Integers and booleans that did not cross: no number says of them that they are none, as NaN does of floats.

What operations outside units make of one is one too, of whatever type. It may go to units of chunks before, which do
not run; where it reaches one that does, or the output, the forward goes another way than the one that was looked at.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from hybrid import shims
from hybrid.errors import ModelError
from hybrid.pipeline.outline import tensors_by_path
from hybrid.precision.tree import map_tensors

__all__ = ["Absent", "check_present"]

# The values of the other arguments do not count.
_LIKE = {"expand_as", "view_as", "reshape_as", "type_as", "to", "new_zeros", "new_ones", "new_empty", "new_full"}
_DECIDES = {
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__int__", "__float__", "__index__"),
    *("__complex__", "__contains__", "__array__", "__iter__"),
}


class Absent(torch.Tensor):
    """A tensor without values where the forward of a model may hold it, not where it may use it."""

    unit: str

    @classmethod
    def of(cls, tensor: torch.Tensor, unit: str) -> Absent:
        """`unit`: which returned it."""
        absent = tensor.as_subclass(cls)
        absent.unit = unit
        return absent

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = tensors_by_path(args, kwargs)
        unit = next(getattr(t, "unit", "a unit") for t in given.values() if isinstance(t, Absent))
        if name in _DECIDES:
            raise ModelError(_said(unit, f"decides how it goes on ({name})"))
        with shims.plain_tensors():
            output = func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name in _LIKE and not isinstance(first, Absent):
            return output
        if first is not None and type(first) is torch.Tensor and _writes(name):
            cast(Any, first).__class__ = cls
            cast(Any, first).unit = unit
        return map_tensors(output, lambda t: Absent.of(t, unit) if type(t) is torch.Tensor else t)


def _writes(name: str) -> bool:
    """Whether a function writes into its first argument."""
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_")


def check_present(value: Any, where: str) -> None:
    """Raises ModelError: something absent among tensors that are used. `where`: what becomes of them."""
    for tensor in tensors_by_path((value,), {}).values():
        if isinstance(tensor, Absent):
            raise ModelError(_said(tensor.unit, where))


def _said(unit: str, what: str) -> str:
    return (
        f"integers or booleans that {unit!r} returns {what}, which they did not in the run on tensors without values: "
        "the forward of the model decides by values, sizes or numbers what it reads, and this stage did not get them. "
        "Give distributed_model(sample=...) inputs of the kind that you train with, or write the model as a "
        "hybrid.PipelineLayer"
    )
