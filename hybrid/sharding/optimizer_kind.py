"""What an optimizer must see at once to make the right update: elements, whole parameters, or all of them.

For torch's own optimizers a list says it. One that the engine has never heard of is tried on small copies of its
parameters: each pair of parameters steps once with the others and once alone, and must end at the same values.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid import shims
from hybrid.sharding.random_sources import undisturbed

__all__ = ["Scope", "Trial", "known_scope", "needs_closure", "try_out", "unwrapped_step"]


class Scope(enum.Enum):
    """What one update depends on."""

    ELEMENT = "the element's own gradient and state"
    PARAMETER = "the whole parameter"
    ALL = "all parameters together"


_KNOWN: dict[type[torch.optim.Optimizer], Scope] = {
    torch.optim.Adadelta: Scope.ELEMENT,
    torch.optim.Adagrad: Scope.ELEMENT,
    torch.optim.Adam: Scope.ELEMENT,
    torch.optim.AdamW: Scope.ELEMENT,
    torch.optim.Adamax: Scope.ELEMENT,
    torch.optim.ASGD: Scope.ELEMENT,
    torch.optim.NAdam: Scope.ELEMENT,
    torch.optim.RAdam: Scope.ELEMENT,
    torch.optim.RMSprop: Scope.ELEMENT,
    torch.optim.Rprop: Scope.ELEMENT,
    torch.optim.SGD: Scope.ELEMENT,
    torch.optim.Adafactor: Scope.PARAMETER,
    torch.optim.Muon: Scope.PARAMETER,
    torch.optim.LBFGS: Scope.ALL,
    torch.optim.SparseAdam: Scope.PARAMETER,
}

# What a subclass may define and still update as its base does: how it is built and shown.
_HARMLESS = frozenset({"__init__", "__repr__", "__str__", "__doc__", "__module__", "__qualname__", "__annotations__"})
_HARMLESS_IN_LATER_PYTHONS = frozenset(
    {"__firstlineno__", "__static_attributes__", "__annotate__", "__annotate_func__"}
)


def known_scope(optimizer: torch.optim.Optimizer) -> Scope | None:
    """The scope of an optimizer of torch, or of a subclass that only builds or shows itself in another way.

    None for any other: a subclass may do anything in its step.
    """
    for cls in type(optimizer).__mro__:
        if cls in _KNOWN:
            return _KNOWN[cls]
        if set(vars(cls)) - _HARMLESS - _HARMLESS_IN_LATER_PYTHONS:
            return None
    return None


def unwrapped_step(cls: type) -> Callable[..., Any]:
    """The step function that a class has, without the hook wrapper that torch puts around it."""
    step: Callable[..., Any] = next(c.__dict__["step"] for c in cls.__mro__ if "step" in c.__dict__)
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


@functools.lru_cache(maxsize=64)  # asked in every step
def needs_closure(step: Callable[..., Any]) -> bool:
    """Whether a step function cannot be called without a closure."""
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a trial has shown.

    couples: whether the update of one parameter changed with the others'.
    draws: whether the step drew random numbers.
    sends: the operation by which the step wanted to talk to other ranks; else empty.
    error: why there could be no trial; else empty, and nothing else holds then.
    """

    couples: bool = False
    draws: bool = False
    sends: str = ""
    error: str = ""


_STEPS = 3
_MOST_ELEMENTS = 4096  # a parameter up to this size is copied in its own shape
_MOST_PER_DIM = 8  # of a larger one
_MOST_ALIKE = 3
_LARGE = 1e4  # gradients above any threshold that a global norm may be clipped at
_TRIAL_RATE = 0.1  # a schedule may have set the rate to 0, at which nothing shows


class _Sends(Exception):
    """The step begins to talk to other ranks."""


class _Alone(shims.TorchDispatchMode):
    """Inside, nothing is sent to other ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _Sends(str(func))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _Toy:
    """A small copy: its group, its values, and its gradient in each step."""

    group: int
    original: nn.Parameter
    values: torch.Tensor
    gradients: tuple[torch.Tensor, ...]


def try_out(optimizer: torch.optim.Optimizer, *, device: torch.device) -> Trial:
    """Let copies of the optimizer step on small copies of some of its parameters, on `device`.

    The optimizer, its parameters and all random states stay as they are. What its class keeps outside the
    instance is not copied.
    """
    toys = _toys(optimizer, device)
    if not toys:
        return Trial()
    try:
        with undisturbed(optimizer, device) as has_drawn, _Alone():
            together = _run(optimizer, toys)
            if has_drawn():
                return Trial(draws=True)
            alone = [_run(optimizer, [toy])[0] for toy in toys]
    except _Sends as operation:
        return Trial(sends=str(operation))
    except Exception as error:
        return Trial(error=f"{type(error).__name__}: {error}".strip().partition("\n")[0])
    alike = (torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True) for a, b in zip(together, alone, strict=True))
    return Trial(couples=not all(alike))


def _toys(optimizer: torch.optim.Optimizer, device: torch.device) -> list[_Toy]:
    """Two copies of the first parameter of each number of dims in each group; the second with large gradients.

    Of groups that differ in numbers alone the first few will do.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype=dtype, device=device)

    toys = []
    alike: Counter[str] = Counter()
    for index, group in enumerate(optimizer.param_groups):
        kind = repr({key: value for key, value in group.items() if isinstance(value, bool | str | None)})
        alike[kind] += 1
        if alike[kind] > _MOST_ALIKE:
            continue
        seen: set[int] = set()
        for parameter in group["params"]:
            if parameter.dim() in seen or parameter.numel() == 0:
                continue
            seen.add(parameter.dim())
            shape = _toy_shape(parameter)
            dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            for scale in (1.0, _LARGE):
                gradients = tuple(draw(shape, dtype, scale) for _ in range(_STEPS))
                toys.append(_Toy(index, parameter, draw(shape, dtype, 1.0), gradients))
    return toys


def _toy_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    return shape if parameter.numel() <= _MOST_ELEMENTS else tuple(min(size, _MOST_PER_DIM) for size in shape)


def _run(optimizer: torch.optim.Optimizer, toys: list[_Toy]) -> list[torch.Tensor]:
    """The values of the toys after some steps of a copy of the optimizer that has only them, and groups with them."""
    parameters = [nn.Parameter(toy.values.clone()) for toy in toys]
    # Whatever in the optimizer refers to one of its parameters refers to a toy in the copy.
    replaced: dict[int, Any] = {id(p): parameters[0] for group in optimizer.param_groups for p in group["params"]}
    replaced |= {id(toy.original): parameter for toy, parameter in zip(toys, parameters, strict=True)}
    state: defaultdict[Any, Any] = defaultdict(dict)
    for toy, parameter in zip(toys, parameters, strict=True):
        if toy.original in optimizer.state:
            own = optimizer.state[toy.original]
            state[parameter] = {key: _toy_state(value, toy, replaced) for key, value in own.items()}
    groups = []
    for index in sorted({toy.group for toy in toys}):
        options = {k: v for k, v in optimizer.param_groups[index].items() if k not in ("params", "param_names")}
        group = _copied(options, replaced)
        group["params"] = [p for toy, p in zip(toys, parameters, strict=True) if toy.group == index]
        if "param_names" in optimizer.param_groups[index]:
            group["param_names"] = [str(place) for place in range(len(group["params"]))]
        if isinstance(group.get("lr"), int | float):
            group["lr"] = _TRIAL_RATE
        elif isinstance(group.get("lr"), torch.Tensor):
            group["lr"].fill_(_TRIAL_RATE)
        replaced[id(optimizer.param_groups[index])] = group
        replaced[id(optimizer.param_groups[index]["params"])] = group["params"]
        groups.append(group)
    replaced |= {id(optimizer.state): state, id(optimizer.param_groups): groups}
    copy = object.__new__(type(optimizer))
    vars(copy).update({name: _copied(value, replaced) for name, value in vars(optimizer).items()})
    step = unwrapped_step(type(optimizer))

    def give_gradients(number: int) -> torch.Tensor:
        for toy, parameter in zip(toys, parameters, strict=True):
            parameter.grad = toy.gradients[number].clone()
        return torch.ones(())

    for number in range(_STEPS):
        give_gradients(number)
        step(copy, functools.partial(give_gradients, number)) if needs_closure(step) else step(copy)
    return [parameter.detach() for parameter in parameters]


def _toy_state(value: Any, toy: _Toy, replaced: Mapping[int, Any]) -> Any:
    """State from earlier training: of the toy's size, if it is shaped like the parameter."""
    if isinstance(value, torch.Tensor) and value.shape == toy.original.shape:
        for dim, size in enumerate(toy.values.shape):
            value = value.narrow(dim, 0, size)
    return _copied(value, replaced)


def _copied(value: Any, replaced: Mapping[int, Any]) -> Any:
    """Plain containers and tensors are copied, to any depth; anything else (functions, models) is shared."""
    if id(value) in replaced:
        return replaced[id(value)]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, set):
        return type(value)(_copied(item, replaced) for item in value)
    if type(value) is tuple:
        return tuple(_copied(item, replaced) for item in value)
    if type(value) in (dict, OrderedDict, defaultdict):
        copy: Any = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
        for key, item in value.items():
            copy[_copied(key, replaced)] = _copied(item, replaced)
        return copy
    return value
