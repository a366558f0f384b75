"""What `p.grad` is while the gradient itself lives in a bucket: right in shape, without memory, and loud.

A user's `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` must never clip nothing, or one rank's part,
without a word. So `p.grad` is neither None nor a partial value: asking for its shape works, using its values
raises with the name and the way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hybrid import shims
from hybrid.errors import GradientAccessError
from hybrid.metadata import METADATA_CALLS

if TYPE_CHECKING:
    from hybrid.sharding.reduce import Reducer

__all__ = ["GradientHandle", "Unscaler", "unscaler_of"]


# (fqns, found_inf, inverse_scale): unscale these gradients in place, set found_inf to 1 if one is not finite.
Unscaler = Callable[[list[str], torch.Tensor, torch.Tensor], None]


def unscaler_of(reducer: weakref.ref[Reducer]) -> Unscaler:
    """What a handle asks. It holds no reducer: autograd holds `p.grad` where no garbage collector looks."""

    def unscale(fqns: list[str], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        owner = reducer()
        assert owner is not None and owner.unscaler is not None
        owner.unscaler(fqns, found_inf, inverse_scale)

    return unscale


_DTYPE: Any = getattr(torch.Tensor, "dtype").__get__  # noqa: B009
_REPLACING: frozenset[Any] = frozenset((getattr(torch.Tensor, "data").__set__, shims.COPIES_SHALLOW))  # noqa: B009
_CONVERSIONS = frozenset(
    getattr(torch.Tensor, name) for name in ("to", "type", "float", "double", "half", "bfloat16", "type_as")
)


class GradientHandle(torch.Tensor):
    """A tensor of one expanded element that stands for the gradient of the parameter `fqn`."""

    fqn: str
    held_dtype: torch.dtype
    unscaler: Unscaler | None

    @staticmethod
    def of(
        parameter: torch.Tensor,
        *,
        fqn: str,
        held_dtype: torch.dtype | None = None,
        unscaler: Unscaler | None = None,
    ) -> GradientHandle:
        """The handle for one parameter; made once, it costs one element.

        Args:
            held_dtype: dtype of the gradient in its bucket, and what `p.grad.dtype` says; None: the parameter's.
            unscaler: answers `torch.amp.GradScaler`; None: unscaling raises like any other use.
        """
        # Some calls reach the memory without asking the class: they must not find a number there.
        one = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
        handle: GradientHandle = one.expand(parameter.shape).as_subclass(GradientHandle)
        handle.fqn = fqn
        handle.held_dtype = parameter.dtype if held_dtype is None else held_dtype
        handle.unscaler = unscaler
        return handle

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _DTYPE:
            return args[0].held_dtype
        if func is shims.AMP_UNSCALE and args[0][0].unscaler is not None:
            gradients, found_inf, inverse_scale = args
            gradients[0].unscaler([gradient.fqn for gradient in gradients], found_inf, inverse_scale)
            return None
        if func in METADATA_CALLS:
            return super().__torch_function__(func, types, args, kwargs or {})
        if func in _CONVERSIONS and _changes_nothing(func, args, kwargs or {}):
            return args[0]
        if func in _REPLACING and args[0] is args[1]:  # what module.to(...) does then
            return True if func is shims.COPIES_SHALLOW else None
        name = getattr(func, "__name__", str(func))
        if name == "__get__" and hasattr(func, "__self__"):
            name = getattr(func.__self__, "__name__", name)
        raise GradientAccessError(
            f"{name}: the gradient of {_first_fqn(args, kwargs)!r} is not in `p.grad`: it is summed over the ranks "
            "and cut. Clip with model.clip_grad_norm_(max_norm) or model.clip_grad_value_(value), "
            "read it with hybrid.full_gradient(p) or model.named_gradients() (every rank must call them)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = tuple(self.shape)
        return f"<gradient of {self.fqn!r}, shape {shape}: held by hybrid, read it with hybrid.full_gradient(p)>"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise GradientAccessError(
            f"the gradient of {self.fqn!r} cannot be saved through `p.grad`; save model.named_gradients() instead"
        )


def _changes_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a conversion leaves a gradient as it is: `module.to(dtype)` inside a forward, to the dtype it has."""
    handle, *others = args
    if not isinstance(handle, GradientHandle):
        return False
    with shims.plain_tensors():
        like = torch.empty((), dtype=handle.dtype, device=handle.device).expand(handle.shape)
    return func(like, *others, **kwargs) is like


def _first_fqn(*values: Any) -> str:
    stack = list(values)
    while stack:
        value = stack.pop(0)
        if isinstance(value, GradientHandle):
            return value.fqn
        if isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list | tuple):
            stack.extend(value)
    return "a parameter"
