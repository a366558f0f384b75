"""Forwards that take derivatives of their own modules: what crosses a cut then, nobody can follow."""

from __future__ import annotations

from hybrid import shims
from hybrid.errors import ModelError

__all__ = ["check_no_transform", "derivative_taken"]

_WAY = (
    "Put what is differentiated, and the derivative, into one module, which is cut as a whole, or train with ZeRO and "
    "without a pipeline"
)


def check_no_transform(unit: str) -> None:
    """Raises ModelError: a unit is called inside a transform of torch.func."""
    if shims.in_function_transform() or shims.in_forward_mode():
        raise ModelError(
            f"the forward of the model calls {unit!r} inside torch.func (vmap, grad, jacrev, jvp) or in forward mode, "
            f"and the stages of a pipeline can hand on its values, but not how they are transformed. {_WAY}"
        )


def derivative_taken(error: Exception, last: str) -> str:
    """What to say of an error of torch.autograd.grad in a forward, behind a call of unit `last`; "" of other errors."""
    if "differentiated Tensor" not in str(error):
        return ""
    return (
        f"the forward of the model takes a gradient (torch.autograd.grad) through {last!r}, and the stages of a "
        f"pipeline can hand on its values, but not its graph. {_WAY}"
    )
