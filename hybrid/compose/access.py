"""Whole values of single parameters and gradients, whatever the stage. All collective: every rank calls them alike."""

from __future__ import annotations

import torch

from hybrid.compose import context
from hybrid.compose.runtime import Runtime
from hybrid.errors import GradientAccessError, ModelError
from hybrid.sharding import state_view

__all__ = ["full_gradient", "full_parameter", "set_full_parameter"]


def full_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of the whole value of a parameter of a wrapped model. *Collective.*

    Raises:
        ModelError: the parameter belongs to no wrapped model.
    """
    runtime, fqn = _find(parameter)
    with runtime.engine.whole([fqn]):
        return runtime.whole(fqn, parameter.detach()).clone()


def set_full_parameter(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Give a parameter of a wrapped model a new value, fp32 master included. *Collective*, same value on every rank.

    Raises:
        ModelError: the parameter belongs to no wrapped model, or the value has another shape.
    """
    runtime, fqn = _find(parameter)
    if tuple(value.shape) != runtime.global_shape(fqn):
        raise ModelError(
            f"set_full_parameter({fqn!r}): the value has shape {tuple(value.shape)}, the parameter "
            f"{runtime.global_shape(fqn)}"
        )
    value = runtime.part(fqn, value)
    with runtime.engine.whole([fqn]), torch.no_grad():
        parameter.copy_(value)
    bucket = runtime.engine.bucket_of.get(fqn)
    if bucket is not None:
        bucket.set_master(bucket.position_of[fqn], value)


def full_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The whole gradient of a parameter of a wrapped model, as one process would have it; None without one.

    *Collective.*

    Raises:
        GradientAccessError: the parameter belongs to no wrapped model.
    """
    try:
        runtime, fqn = _find(parameter)
    except ModelError as error:
        raise GradientAccessError(str(error)) from None
    bucket = runtime.engine.bucket_of.get(fqn)
    if bucket is None:
        return None
    runtime.synchronise()
    gradient = dict(state_view.bucket_gradients(runtime.engine, bucket))[fqn]
    return None if gradient is None else runtime.whole(fqn, gradient)


def _find(parameter: torch.Tensor) -> tuple[Runtime, str]:
    for runtime in context.runtimes():
        fqn = runtime.engine.fqn_of.get(id(parameter))
        if fqn is not None:
            return runtime, fqn
    raise ModelError(f"a parameter of shape {tuple(parameter.shape)} belongs to no model given to distributed_model")
