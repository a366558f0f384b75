"""Gradients of weights computed apart from those of inputs: the two halves of a split backward.

    I   backward inside `WeightGradients.collecting()`: linear layers give the gradient of their input at once and keep
        what that of their weight needs (input and output gradient); every other gradient is computed and kept
    W   `WeightGradients.accumulate()`: one parameter after the other, in the order in which backward came to them

W enters the graph where the gradient of a parameter does (its accumulating node), so whoever waits there sees in W what
a whole backward would have shown him. It reads no weights: they may be cut and freed after I. Two calls of
`torch.autograd.grad` would do the same, and run all that is common to both halves twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional

from hybrid import gradient_sinks
from hybrid.errors import ModelError

__all__ = [
    "PutOff",
    "WeightGradients",
    "embedding",
    "linear",
    "splits",
    "splitting",
    "take_over_gradients",
    "weight_gradient",
]

_Compute = Callable[[], torch.Tensor]


class WeightGradients:
    """What one backward has left to do."""

    _current: WeightGradients | None = None  # of the backward that runs: autograd may run it in threads of its own

    def __init__(self) -> None:
        self._left: dict[Node, list[_Compute]] = {}

    @classmethod
    def current(cls) -> WeightGradients | None:
        """Those of the backward that runs now; None: it is a whole one."""
        return cls._current

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, a backward leaves the gradients of weights here."""
        before, WeightGradients._current = WeightGradients._current, self
        try:
            with splitting():
                yield
        finally:
            WeightGradients._current = before

    def add(self, node: Node, compute: _Compute) -> None:
        """`compute` gives an addend of the gradient that enters at `node`."""
        self._left.setdefault(node, []).append(compute)

    def accumulate(self) -> None:
        """Compute what is left; what it needed is freed parameter by parameter."""
        with torch.no_grad():
            while self._left:
                node = next(iter(self._left))
                first, *others = self._left.pop(node)
                gradient = first()
                for other in others:
                    gradient = gradient + other()
                torch.autograd.backward([GradientEdge(node, 0)], [gradient])


class _State:
    is_splitting = False


@contextlib.contextmanager
def splitting() -> Iterator[None]:
    """Inside, `linear` makes graphs whose backward must be a split one."""
    before, _State.is_splitting = _State.is_splitting, True
    try:
        yield
    finally:
        _State.is_splitting = before


def splits(weight: torch.Tensor) -> bool:
    """Whether the gradient of this weight is to be put off."""
    return _State.is_splitting and torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOff:
    """The gradient of a weight that is left to W."""

    node: Node
    dtype: torch.dtype
    is_transposed: bool

    @classmethod
    def of(cls, weight: torch.Tensor, *, is_transposed: bool) -> PutOff:
        """To be made in forward, while the weight is an ordinary tensor."""
        return cls(node=get_gradient_edge(weight).node, dtype=weight.dtype, is_transposed=is_transposed)

    def leave(self, gradient: torch.Tensor, tensor: torch.Tensor) -> None:
        """In backward: what it will be computed from, the gradient of the output and the input."""
        left = WeightGradients.current()
        if left is None:
            raise ModelError(
                "a linear layer is differentiated inside a forward or a loss (torch.autograd.grad, a penalty), "
                "and the schedule splits each backward: its weight's gradient would be left out; use schedule '1f1b'"
            )

        def compute() -> torch.Tensor:
            return weight_gradient(gradient, tensor, is_transposed=self.is_transposed).to(self.dtype)

        left.add(self.node, compute)


def linear(
    tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, is_transposed: bool = False
) -> torch.Tensor:
    """tensor @ weight.T + bias, (..., in) -> (..., out); a transposed weight (of a Conv1D) is (in, out).

    Where the backward will be split, the gradient of the weight is put off; else it may be written where it is to lie.
    """
    autocast = torch.is_autocast_enabled(tensor.device.type)
    if tensor.requires_grad and splits(weight):
        put_off = PutOff.of(weight, is_transposed=is_transposed)
        if autocast:  # what is kept is what the product reads
            dtype = torch.get_autocast_dtype(tensor.device.type)
            tensor, weight, bias = tensor.to(dtype), weight.detach().to(dtype), None if bias is None else bias.to(dtype)
        return gradient_sinks.product(tensor, weight, bias, is_transposed=is_transposed, leaves=put_off)
    sink = None
    if tensor.dtype == weight.dtype and not autocast:
        sink = gradient_sinks.sink_for(tensor, weight)
    if sink is None:
        return _product(tensor, weight, bias, is_transposed)
    return gradient_sinks.product(tensor, weight, bias, is_transposed=is_transposed, sink=sink)


def weight_gradient(gradient: torch.Tensor, tensor: torch.Tensor, *, is_transposed: bool) -> torch.Tensor:
    """That of the weight in `linear`, from those of the output and the input."""
    rows, inputs = gradient.reshape(-1, gradient.shape[-1]), tensor.reshape(-1, tensor.shape[-1]).conj()
    return inputs.t() @ rows if is_transposed else rows.t() @ inputs


def _product(
    tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool
) -> torch.Tensor:
    if not is_transposed:
        return functional.linear(tensor, weight, bias)
    rows = tensor.reshape(-1, tensor.shape[-1])
    product = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return product.view(*tensor.shape[:-1], weight.shape[1])


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
    """Rows of a table, as functional.embedding(ids, weight, padding_idx)."""
    sink = gradient_sinks.sink_for(ids, weight) if weight.device.type == "cpu" else None  # elsewhere sums have no order
    if sink is None:
        return functional.embedding(ids, weight, padding_idx)
    return gradient_sinks.embedding(ids, weight, padding_idx, sink)


# ---------------------------------------------------------------- plain layers


def take_over_gradients(model: nn.Module) -> None:
    """Let the plain linear layers and embeddings inside compute by `linear` and `embedding`.

    Those that compute in a way of their own keep it.
    """
    for module in model.modules():
        if "forward" in vars(module):
            continue
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            vars(module)["forward"] = _Linear(module, is_transposed=False)
        elif _is_conv1d(module):
            vars(module)["forward"] = _Linear(module, is_transposed=True)
        elif isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
            if module.max_norm is None and not module.scale_grad_by_freq and not module.sparse:
                vars(module)["forward"] = _Embedding(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Of transformers: a linear layer with a transposed weight (GPT-2)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


class _Linear:
    """The forward of a linear layer; an object, so that a copy of the layer has one that reads the copy's weight."""

    def __init__(self, module: nn.Module, *, is_transposed: bool) -> None:
        self._module, self._is_transposed = module, is_transposed

    def __call__(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        module: Any = self._module
        (tensor,) = (*args, *kwargs.values())  # nn.Linear and Conv1D have different names for it
        return linear(tensor, module.weight, module.bias, is_transposed=self._is_transposed)


class _Embedding:
    """The forward of an embedding; an object for the same reason."""

    def __init__(self, module: nn.Embedding) -> None:
        self._module = module

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return embedding(input, self._module.weight, self._module.padding_idx)
