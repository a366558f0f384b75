"""Optimizers of every kind that the checks tell apart, named as the page names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["OPTIMIZERS"]


class Plain(torch.optim.Optimizer):
    """One that torch does not have: steps along the gradient of each parameter, at the parameter's length."""

    def __init__(self, params: Any, **more: Any) -> None:
        super().__init__(params, {"lr": 0.1, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.update(parameter, parameter.grad), alpha=group["lr"])

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * parameter.norm()


class Noisy(Plain):
    def update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.randn_like(gradient)


class Remembering(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.last = {parameter: torch.zeros_like(parameter) for parameter in self.param_groups[0]["params"]}


class Around(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)


OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW, SGD and others that update each element by itself": torch.optim.AdamW,
    "Adafactor, Muon and others that need whole parameters": torch.optim.Adafactor,
    "LBFGS and others that need all parameters at once": torch.optim.LBFGS,
    "one whose step draws random numbers": Noisy,
    "one that keeps a table of parameters beside its state": Remembering,
    "one around another optimizer": Around,
    "SparseAdam": torch.optim.SparseAdam,
    "differentiable = True": lambda params: torch.optim.SGD(params, lr=0.1, differentiable=True),
    "capturable = True": lambda params: torch.optim.AdamW(params, capturable=True),
}
