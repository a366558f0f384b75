"""A loss function runs on the last stage, which has the layers of its own: one that looks for others is refused.

sum(p.square().sum() for p in model.parameters())     would be a penalty on the weights of one stage
the same over a list from before distributed_model    would add zeros for all others, which have no values here
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from hybrid import shims
from hybrid.errors import ModelError
from hybrid.metadata import METADATA_CALLS
from hybrid.pipeline.operations import tensors_in

__all__ = ["LossScope", "ParameterElsewhere", "free"]

_WAY = (
    "Take weight_decay of the optimizer for a penalty on squares; the loss function may read what the last stage "
    "holds, by name; for more, train with ZeRO and without a pipeline"
)


class LossScope:
    """Whether a loss function runs."""

    def __init__(self) -> None:
        self._runs = False

    @contextmanager
    def running(self) -> Iterator[None]:
        self._runs = True
        try:
            yield
        finally:
            self._runs = False

    def first_elsewhere(self, like: nn.Parameter) -> Iterator[nn.Parameter]:
        """What `model.parameters()` begins with while the loss function runs: with a device and a dtype, no values."""
        if self._runs:
            yield _elsewhere(
                nn.Parameter(torch.empty(0, dtype=like.dtype, device=like.device), requires_grad=False),
                "the first of model.parameters() is on another stage of the pipeline",
            )

    def check_walk(self, what: str) -> None:
        """`what` (a layer) comes up where somebody goes through all modules or parameters.

        Raises:
            ModelError: the loss function does.
        """
        if self._runs:
            raise ModelError(
                f"the loss function goes through the modules or parameters of the model (parameters(), modules()), and "
                f"{what} is on another stage of the pipeline: what it adds up of them would be left out. For a "
                f"device or a dtype take those of its first argument (output.device). {_WAY}"
            )


class ParameterElsewhere(nn.Parameter):
    """A parameter that only other stages hold, in the hands of somebody here: it has no values."""

    home: str  # it is, and on which stage

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _HARMLESS:
            given = tensors_in((*args, *(kwargs or {}).values()))
            home = next(one.home for one in given if isinstance(one, ParameterElsewhere))
            raise ModelError(f"{home}, and has no values on this rank. {_WAY}")
        with shims.plain_tensors():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with shims.plain_tensors():
            copy = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        with shims.plain_tensors():
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


_HARMLESS = METADATA_CALLS | {
    getattr(torch.Tensor, "grad").__set__,  # noqa: B009
    getattr(torch.Tensor, "requires_grad").__set__,  # noqa: B009
    torch.Tensor.requires_grad_,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
}


def free(parameters: dict[str, nn.Parameter]) -> None:
    """Give up the memory of parameters that other objects may still hold (an optimizer). The keys say where."""
    for where, parameter in parameters.items():
        if not parameter.is_meta:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        if type(parameter) is nn.Parameter:
            _elsewhere(parameter, where)


def _elsewhere(parameter: nn.Parameter, home: str) -> nn.Parameter:
    parameter.__class__ = ParameterElsewhere
    cast(ParameterElsewhere, parameter).home = home
    return parameter
