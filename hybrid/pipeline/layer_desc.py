"""A layer of a pipeline as a description: what to build, not yet built."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from hybrid.errors import ModelError

__all__ = ["FunctionLayer", "LayerDesc", "SharedLayerDesc", "checked_layers", "layer_name"]


class LayerDesc:
    """`LayerDesc(nn.Linear, 4, 4, bias=False)`: the layer is built later, and only where it runs.

    Args:
        layer_class: class of the module, or a function that returns the module (or a plain function of one value).
        args, kwargs: what to build it with.

    Raises:
        ModelError: a `layer_class` that is a built module, or cannot be called.
    """

    def __init__(self, layer_class: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        kind = type(self).__name__
        if isinstance(layer_class, nn.Module):
            raise ModelError(
                f"{kind} takes a class and what to build it with, not the built module {type(layer_class).__name__}; "
                f"write {kind}({type(layer_class).__name__}, ...), or put the module itself into the list"
            )
        if not callable(layer_class):
            raise ModelError(
                f"{kind} takes a class or a function that returns a module, not {_shown(layer_class)}; "
                f"write for example {kind}(nn.Linear, 4, 4)"
            )
        self.layer_class = layer_class
        self.args = args
        self.kwargs = kwargs

    def make(self) -> nn.Module:
        """Build it. What is no module but can be called becomes a `FunctionLayer`."""
        made = self.layer_class(*self.args, **self.kwargs)
        if isinstance(made, nn.Module):
            return made
        if isinstance(made, type) or not callable(made):
            raise ModelError(f"{self!r} gave {_shown(made)}; it must give a module or a function of one value")
        return FunctionLayer(made)

    def __repr__(self) -> str:
        given = [*map(_short, self.args), *(f"{key}={_short(value)}" for key, value in self.kwargs.items())]
        return f"{type(self).__name__}({', '.join([layer_name(self), *given])})"


class SharedLayerDesc(LayerDesc):
    """A layer that shares one parameter with every layer of the same key: a head that uses the embedding's weight.

        SharedLayerDesc("embed", nn.Embedding, vocab, width),
        ...
        SharedLayerDesc("embed", nn.Embedding, vocab, width, forward_func=lambda layer, x: x @ layer.weight.T)

    Each is a layer of its own; only the parameter is one, which starts from the values of the first. Other parameters
    of the layer are not shared.

    Args:
        key: which layers belong together.
        layer_class, args, kwargs: as for `LayerDesc`. Classes may differ, if the parameter has the same shape.
        forward_func: `forward_func(layer, value)` is the layer's forward, inside its hooks; None leaves it its own.
        shared_weight_attr: the parameter, by its name in the layer (dotted if it lies deeper).

    Raises:
        ModelError: as `LayerDesc`; a key or attribute that is no name; a `forward_func` that cannot be called.
    """

    def __init__(
        self,
        key: str,
        layer_class: Callable[..., Any],
        *args: Any,
        forward_func: Callable[[Any, Any], Any] | None = None,
        shared_weight_attr: str = "weight",
        **kwargs: Any,
    ) -> None:
        if not isinstance(key, str) or not key:
            raise ModelError(
                f"SharedLayerDesc takes the key first, a name such as 'embed', not {_shown(key)}; "
                "write SharedLayerDesc('embed', nn.Embedding, ...)"
            )
        super().__init__(layer_class, *args, **kwargs)
        if not isinstance(shared_weight_attr, str) or not shared_weight_attr:
            raise ModelError(
                f"SharedLayerDesc {key!r}: shared_weight_attr names one parameter, such as 'weight', "
                f"not {_shown(shared_weight_attr)}"
            )
        if forward_func is not None and not callable(forward_func):
            raise ModelError(
                f"SharedLayerDesc {key!r}: forward_func must be a function (layer, value) -> value, "
                f"not {_shown(forward_func)}"
            )
        self.key = key
        self.forward_func = forward_func
        self.shared_weight_attr = shared_weight_attr

    def make(self) -> nn.Module:
        """Build it; with a `forward_func`, that is the module's `forward` from then on."""
        made = super().make()
        if self.forward_func is not None and getattr(made.forward, "function", None) is not self.forward_func:
            made.forward = _ForwardByFunction(made, self.forward_func)
        return made

    def is_built_like(self, other: SharedLayerDesc) -> bool:
        """Whether both surely build the same."""
        if self.layer_class is not other.layer_class or self.shared_weight_attr != other.shared_weight_attr:
            return False
        try:
            return bool(self.args == other.args and self.kwargs == other.kwargs)
        except (RuntimeError, ValueError):  # tensors and arrays have no one answer
            return False

    def owner_of_shared(self, module: nn.Module) -> tuple[nn.Module, str]:
        """The (sub)module that holds the shared parameter, and its name there.

        Raises:
            ModelError: the layer has no such parameter.
        """
        path, _, name = self.shared_weight_attr.rpartition(".")
        try:
            module.get_parameter(self.shared_weight_attr)
        except AttributeError:
            known = ", ".join(fqn for fqn, _ in module.named_parameters()) or "no parameters"
            raise ModelError(
                f"SharedLayerDesc {self.key!r}: {layer_name(self)} has no parameter {self.shared_weight_attr!r} to "
                f"share; it has {known} (set shared_weight_attr)"
            ) from None
        return module.get_submodule(path), name


class _ForwardByFunction:
    """`forward` of a layer that a function runs: so all that goes around a module's forward goes around it as well.

    What the function itself asks of the layer, by calling it, is the layer's own forward.
    """

    def __init__(self, layer: nn.Module, function: Callable[[Any, Any], Any]) -> None:
        self.layer = layer
        self.function = function
        self._own = vars(layer).get("forward")
        self._is_inside = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            # Of the class that the layer has by now: tensor parallel gives it another one.
            own = self._own if self._own is not None else functools.partial(type(self.layer).forward, self.layer)
            return own(*args, **kwargs)
        self._is_inside = True
        try:
            return self.function(self.layer, *args, **kwargs)
        finally:
            self._is_inside = False


class FunctionLayer(nn.Module):
    """A function of one value as a layer; it has no parameters."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)

    def extra_repr(self) -> str:
        return layer_name(self.function)


def layer_name(layer: Any) -> str:
    """Name of the class or function that a layer is, or will be built from."""
    if isinstance(layer, FunctionLayer):
        return layer_name(layer.function)
    if isinstance(layer, LayerDesc):
        return layer_name(layer.layer_class)
    if isinstance(layer, functools.partial):
        return layer_name(layer.func)
    name = type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", None)
    return str(name or type(layer).__name__)


def checked_layers(layers: Iterable[Any], *, list_class: type[nn.Module]) -> list[LayerDesc | nn.Module]:
    """The layers as descriptions and modules, for a model of `list_class`.

    Raises:
        ModelError: nothing to build, or something that is no layer; all of these in one error.
    """
    if isinstance(layers, str | bytes | LayerDesc) or not isinstance(layers, Iterable):
        raise ModelError(f"PipelineLayer takes a list of layers, not {_shown(layers)}; write PipelineLayer([...])")
    given = list(layers)
    if not given:
        raise ModelError("PipelineLayer was given an empty list; it needs at least one layer")
    problems = [problem for index, layer in enumerate(given) if (problem := _problem(index, layer, list_class))]
    if problems:
        raise ModelError("; ".join(problems))
    if problems := _held_twice(given):
        raise ModelError("; ".join(problems))
    return [layer if isinstance(layer, LayerDesc | nn.Module) else FunctionLayer(layer) for layer in given]


def _problem(index: int, layer: Any, list_class: type[nn.Module]) -> str:
    if isinstance(layer, list_class):
        return f"layer {index} is a {list_class.__name__} itself: put its layers into this list"
    if isinstance(layer, type):
        return f"layer {index} is the class {layer.__name__}, not built: write LayerDesc({layer.__name__}, ...)"
    if not callable(layer) and not isinstance(layer, LayerDesc):
        return f"layer {index} is {_shown(layer)}: a layer is a LayerDesc, a module or a function of one value"
    function = layer.forward_func if isinstance(layer, SharedLayerDesc) else layer
    if function is not None and not isinstance(function, LayerDesc | nn.Module):
        for held in _used_by(function):
            if isinstance(held, list_class | nn.Parameter) or (
                isinstance(held, nn.Module) and any(True for _ in held.parameters())
            ):
                return (
                    f"layer {index}, the function {layer_name(function)}, uses the parameters of a "
                    f"{type(held).__name__} that is no part of it, which no optimizer would see and other stages do "
                    "not have: make it a module, or tie layers with SharedLayerDesc"
                )
    return ""


def _used_by(function: Any) -> Iterator[Any]:
    """What a callable visibly holds or refers to: bound object, closure, globals it names, attributes, arguments."""
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        yield from _used_by(function.func)
    elif inspect.ismethod(function):
        yield function.__self__
        yield from _used_by(function.__func__)
    elif inspect.isfunction(function):
        yield from function.__defaults__ or ()
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # a variable that has no value yet
                yield cell.cell_contents
        for instruction in dis.get_instructions(function):
            if instruction.opname == "LOAD_GLOBAL":
                yield function.__globals__.get(instruction.argval)
    elif not inspect.isbuiltin(function):
        yield from getattr(function, "__dict__", {}).values()


def _held_twice(layers: list[Any]) -> list[str]:
    """Built modules must share no parameter: two stages would have one each, and nothing says that they are one."""
    first: dict[int, tuple[int, str]] = {}
    problems = []
    for index, layer in enumerate(layers):
        for name, parameter in _held(layer):
            holder, known = first.setdefault(id(parameter), (index, name))
            if holder != index:
                problems.append(
                    f"layers {holder} and {index} hold the same parameter ({known or 'given'}, {name or 'given'}): "
                    "describe both as SharedLayerDesc(key, ...)"
                )
                break
    return problems


def _held(layer: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that are there already: of a module, or among what a layer will be built with."""
    if isinstance(layer, LayerDesc):
        for value in (*layer.args, *layer.kwargs.values()):
            yield from _held(value)
    elif isinstance(layer, nn.Parameter):
        yield "", layer
    elif isinstance(layer, nn.Module):
        yield from layer.named_parameters()


def _shown(value: Any) -> str:
    return f"{_short(value)} ({type(value).__name__})"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    if callable(value) and not isinstance(value, nn.Module | functools.partial):
        return layer_name(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
