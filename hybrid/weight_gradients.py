"""Gradients of weights computed apart from those of inputs: the two halves of a split backward.

    I   backward inside `WeightGradients.collecting()`: linear layers give the gradient of their input at once and keep
        what that of their weight needs (input and output gradient); every other gradient is computed and kept
    W   `WeightGradients.accumulate()`: one parameter after the other, in the order in which backward came to them

W enters the graph where the gradient of a parameter does (its accumulating node), so whoever waits there sees in W what
a whole backward would have shown him; what a linear layer has kept, by a node before it that computes the product, or
writes it where it is to lie (`gradient_sinks`). It reads no weights: they may be cut and freed after I. Two calls of
`torch.autograd.grad` would do the same, and run all that is common to both halves twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional

from hybrid import gradient_sinks
from hybrid.cpu_products import fast_product, matrix_product
from hybrid.errors import ModelError

__all__ = [
    "PutOff",
    "Rows",
    "WeightGradients",
    "embedding",
    "linear",
    "splits",
    "splitting",
    "take_over_gradients",
    "weight_gradient",
]

_Compute = Callable[[], torch.Tensor]


@dataclass(slots=True)
class _Left:
    """Of one parameter: gradients, and nodes that compute some."""

    gradients: list[_Compute] = field(default_factory=list)
    products: list[torch.Tensor] = field(default_factory=list)


class WeightGradients:
    """What one backward has left to do."""

    _current: WeightGradients | None = None  # of the backward that runs: autograd may run it in threads of its own

    def __init__(self) -> None:
        self._left: dict[Node, _Left] = {}

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
        self._left.setdefault(node, _Left()).gradients.append(compute)

    def add_product(self, node: Node, product: torch.Tensor) -> None:
        """A backward from `product` comes to `node` with an addend, or has put it where it belongs."""
        self._left.setdefault(node, _Left()).products.append(product)

    def accumulate(self) -> None:
        """Compute what is left; what it needed is freed parameter by parameter."""
        with torch.no_grad():
            while self._left:
                node = next(iter(self._left))
                left = self._left.pop(node)
                edges = [get_gradient_edge(product) for product in left.products]
                gradients = [product.detach() for product in left.products]
                if left.gradients:
                    first, *others = left.gradients
                    gradient = first()
                    for other in others:
                        gradient = gradient + other()
                    edges.append(GradientEdge(node, 0))
                    gradients.append(gradient)
                torch.autograd.backward(edges, gradients)


class _State:
    is_splitting = False


@contextlib.contextmanager
def splitting(wanted: bool = True) -> Iterator[None]:
    """Inside, `linear` makes graphs whose backward must be a split one; or, if that is not wanted, a whole one."""
    before, _State.is_splitting = _State.is_splitting, wanted
    try:
        yield
    finally:
        _State.is_splitting = before


def splits(weight: torch.Tensor) -> bool:
    """Whether the gradient of this weight is to be put off."""
    return _State.is_splitting and torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a parameter that serve as a weight of their own."""

    parameter: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOff:
    """The gradient of a weight that is left to W."""

    node: Node
    product: torch.Tensor
    """Without elements: behind it is the node that computes the gradient, and behind that one `node`."""
    factors: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(
        cls, tensor: torch.Tensor, weight: torch.Tensor, *, is_transposed: bool, part_of: Rows | None = None
    ) -> PutOff | None:
        """To be made in forward, where `tensor` meets the weight, which is an ordinary tensor there.

        Args:
            part_of: where the weight lies, if it is a part of a parameter.

        Returns:
            None if the gradient of this weight is not to be put off.
        """
        whole = weight if part_of is None else part_of.parameter
        if not splits(whole):
            return None
        factors: list[tuple[torch.Tensor, torch.Tensor]] = []
        sink = gradient_sinks.sink_for(tensor, whole)
        product = cast(torch.Tensor, _WeightProduct.apply(whole, factors, sink, is_transposed, part_of))
        return cls(node=get_gradient_edge(whole).node, product=product, factors=factors)

    def leave(self, gradient: torch.Tensor, tensor: torch.Tensor) -> None:
        """In backward: what it will be computed from, the gradient of the output and the input."""
        left = WeightGradients.current()
        if left is None:
            raise ModelError(
                "a linear layer is differentiated inside a forward or a loss (torch.autograd.grad, a penalty), "
                "and the schedule splits each backward: its weight's gradient would be left out; use schedule '1f1b'"
            )
        inputs = tensor.detach() if gradient_sinks.stays(tensor) else tensor.detach().clone()  # of a gathered parameter
        self.factors.append((gradient.detach(), inputs))
        left.add_product(self.node, self.product)


class _WeightProduct(torch.autograd.Function):
    """Its backward, in W, is the gradient of a weight from what a layer has left."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        factors: list[tuple[torch.Tensor, torch.Tensor]],
        sink: gradient_sinks.Sink | None,
        is_transposed: bool,
        part_of: Rows | None,
    ) -> torch.Tensor:
        ctx.factors, ctx.sink, ctx.is_transposed = factors, sink, is_transposed
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        ctx.rows = None if part_of is None else (part_of.start, part_of.stop)
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, tensor = ctx.factors.pop()
        gradient, tensor = gradient.reshape(-1, gradient.shape[-1]), tensor.reshape(-1, tensor.shape[-1]).conj()
        factors = (tensor.t(), gradient) if ctx.is_transposed else (gradient.t(), tensor)
        product = gradient_sinks.write_product(ctx.sink, *factors, rows=ctx.rows)
        if product is not None and ctx.rows is not None:
            start, stop = ctx.rows
            part, product = product, product.new_zeros(ctx.shape)
            product[start:stop] = part
        return (None if product is None else product.to(ctx.dtype)), None, None, None, None


def linear(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_transposed: bool = False,
    part_of: Rows | None = None,
) -> torch.Tensor:
    """tensor @ weight.T + bias, (..., in) -> (..., out); a transposed weight (of a Conv1D) is (in, out).

    Where the backward will be split, the gradient of the weight is put off; else it may be written where it is to lie.

    Args:
        part_of: where the weight lies, if it is no parameter itself.
    """
    autocast = torch.is_autocast_enabled(tensor.device.type)
    put_off = None
    if tensor.requires_grad:
        put_off = PutOff.of(tensor, weight, is_transposed=is_transposed, part_of=part_of)
    if put_off is not None:
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
    return matrix_product(inputs.t(), rows) if is_transposed else matrix_product(rows.t(), inputs)


def _product(
    tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool
) -> torch.Tensor:
    product = fast_product(tensor, weight if is_transposed else weight.t(), bias)
    if product is not None:
        return product
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

    Those that compute in a way of their own keep it. Copies and pickles of a layer are of its own class again.
    """
    for module in model.modules():
        if "forward" in vars(module) or "weight" not in dict(module.named_parameters(recurse=False)):
            continue
        kind: type[Any] | None = None
        if type(module).forward is nn.Linear.forward and not isinstance(module, _NEVER_CALLED):
            kind = _Linear
        elif _is_conv1d(module):
            kind = _Conv1D
        elif type(module).forward is nn.Embedding.forward:
            kind = _Embedding
        if kind is not None:
            module.__class__ = _class_of(type(module), kind)


# torch's attention reads the weight of its last layer, which it never calls.
_NEVER_CALLED = nn.modules.linear.NonDynamicallyQuantizableLinear


def _is_conv1d(module: nn.Module) -> bool:
    """Of transformers: a linear layer with a transposed weight (GPT-2)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


_classes: dict[tuple[type, type], type[nn.Module]] = {}


def _class_of(plain: type[nn.Module], kind: type[Any]) -> type[nn.Module]:
    """The layer's class with another forward, and the same name: settings choose modules by it."""
    if (plain, kind) not in _classes:
        described = {"__module__": plain.__module__, "__doc__": plain.__doc__, "taken_over": plain}
        _classes[plain, kind] = type(plain.__name__, (kind, plain), described)
    return _classes[plain, kind]


class _TakenOver:
    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        plain = vars(type(self)).get("taken_over")
        # Of the plain class, in words that a process without this package understands.
        return reduced if plain is None else (object.__new__, (plain,), *reduced[2:])


class _Linear(_TakenOver):
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if not (_State.is_splitting or gradient_sinks.has_sink(weight)):
            return functional.linear(input, weight, self.bias)
        return linear(input, weight, self.bias)


class _Conv1D(_TakenOver):
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, is_transposed=True)


class _Embedding(_TakenOver):
    weight: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        module: Any = self
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return nn.Embedding.forward(module, input)
        return embedding(input, self.weight, module.padding_idx)
