"""One call of a unit without values: on fake tensors, or, where that cannot be, on zeros and what the inputs say."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NoReturn

import torch
from torch import nn

from hybrid import shims
from hybrid.errors import ModelError
from hybrid.pipeline.attributes import Slot, changed_slots, contents, state_of
from hybrid.pipeline.costs import CPU_ATTENTION_FLOPS, flop_counter
from hybrid.pipeline.outline import tensors_by_path
from hybrid.pipeline.skeleton import FakeTensorMode, fake_like
from hybrid.precision.tree import map_tensors

__all__ = ["fake_input", "run_without_values"]

# (operation, positional, keyword arguments) -> None
_Note = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


def run_without_values(
    name: str,
    unit: nn.Module,
    own: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    fakes: FakeTensorMode,
    known: Mapping[int, torch.Tensor],
    note: _Note,
) -> tuple[Any, int, set[Slot]]:
    """(what a unit returns, its flops, attributes that it changed if a copy of it ran in its place).

    Args:
        name, unit: the unit, with fake parameters.
        own: its call.
        args, kwargs: with fake tensors.
        fakes: their mode.
        known: of the fake integers and booleans that the model's inputs alone decide, by id, the real ones.
        note: is told every operation inside.

    Raises:
        ModelError: the unit runs in neither way, or writes into a container that it is given.
    """
    counter = flop_counter(_FLOPS)
    given = contents((args, kwargs), versions=False)
    changed: set[Slot] = set()
    try:
        with fakes, _Inside(note), counter, shims.quiet_fakes():
            output, flops = own(*args, **kwargs), counter.get_total_flops()
        is_written = contents((args, kwargs), versions=False) != given
    except Exception as error:
        if contents((args, kwargs), versions=False) != given:
            _refuse_written(name)
        try:
            output, flops, changed, is_written = _on_zeros(unit, args, kwargs, fakes, known)
        except Exception as other:
            raise ModelError(
                f"with this sample {name!r} runs neither on tensors without values nor on zeros, so what it returns is "
                f"not known before the training ({_in_a_line(error)}; on zeros {_in_a_line(other)}). A sample must be "
                "what the model is called with, in shapes and types: a dict of its arguments, a tuple of them, or one. "
                "If one process runs it: write the model as a hybrid.PipelineLayer, or set pipeline_configs.degree = 1"
            ) from error
    if is_written:
        _refuse_written(name)
    return output, flops, changed


def _refuse_written(name: str) -> NoReturn:
    raise ModelError(
        f"{name!r} writes into a list, dict or object that it is given: on the other stages of a pipeline, where it "
        "does not run, that stays as it was. Return what it adds"
    )


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


class _Inside(shims.TorchDispatchMode):
    """Shows what operations inside a unit read."""

    def __init__(self, note: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._note(func, args, kwargs or {})
        if func is shims.GROUPED_PRODUCT.default:
            left, right = args[:2]  # torch 2.13 knows the result on fake tensors in bfloat16 only
            if left.dim() == 2 and right.dim() == 3:
                wanted = args[4] if len(args) > 4 else (kwargs or {}).get("out_dtype")
                return left.new_empty(left.shape[0], right.shape[2], dtype=wanted)
        return func(*args, **(kwargs or {}))


def _on_zeros(
    unit: nn.Module, args: Any, kwargs: Any, fakes: FakeTensorMode, known: Mapping[int, torch.Tensor]
) -> tuple[Any, int, set[Slot], bool]:
    """A copy of the unit with zeros everywhere: the memory and the time of the unit, and values that mean nothing.

    With the masks and lengths of the sample first, which say how large things are; zeros will do where a sample has
    shapes and types only. Returns what `run_without_values` does, and whether it wrote into a container that it was
    given.
    """
    if known:
        try:
            return _on_zeros_and(known, unit, args, kwargs, fakes)
        except Exception:  # what is wrong without them is told
            pass
    return _on_zeros_and({}, unit, args, kwargs, fakes)


def _on_zeros_and(
    known: Mapping[int, torch.Tensor], unit: nn.Module, args: Any, kwargs: Any, fakes: FakeTensorMode
) -> tuple[Any, int, set[Slot], bool]:
    tensors = [*unit.parameters(), *unit.buffers()]
    zeros = {id(tensor): _zeros_like(tensor) for tensor in (*tensors, *tensors_by_path(args, kwargs).values())}
    zeros |= {key: tensor.clone() for key, tensor in known.items()}
    real = copy.deepcopy(unit, {id(tensor): zeros[id(tensor)] for tensor in tensors})
    copied_args, copied_kwargs = (map_tensors(value, lambda t: zeros[id(t)]) for value in (args, kwargs))
    before, given = state_of(real.named_modules()), contents((copied_args, copied_kwargs), versions=False)
    counter = flop_counter(_FLOPS)
    with counter:
        output = real(*copied_args, **copied_kwargs)
    changed = changed_slots(before, state_of(real.named_modules()))
    is_written = contents((copied_args, copied_kwargs), versions=False) != given
    # What it returned as it came goes on as what the caller had.
    back = {id(zeros[id(tensor)]): tensor for tensor in tensors_by_path(args, kwargs).values()}
    for tensor in tensors_by_path((output,), {}).values():
        if id(tensor) not in back:
            back[id(tensor)] = fake_input(tensor, fakes)
    output = map_tensors(output, lambda tensor: back[id(tensor)])
    return output, counter.get_total_flops(), changed, is_written


def _grouped_flops(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """[tokens, k] × [groups, k, n], each token with one group."""
    return 2 * prod(left) * right[-1]


_FLOPS: dict[Any, Callable[..., int]] = {**CPU_ATTENTION_FLOPS, shims.GROUPED_PRODUCT: _grouped_flops}


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(zeros, requires_grad=tensor.requires_grad)
    return zeros.requires_grad_().clone() if tensor.requires_grad else zeros


def fake_input(tensor: torch.Tensor, fakes: FakeTensorMode) -> torch.Tensor:
    fake = fake_like(tensor, fakes)
    return fake.requires_grad_().clone() if tensor.requires_grad else fake
