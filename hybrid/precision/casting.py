"""What computes in low precision, and the casts at its borders.

    O1   parameters stay fp32; autocast casts in each operation
    O2   parameters are low precision, with fp32 masters in the optimizer; autocast for the rest. torch's own
         normalisation layers keep fp32 parameters and compute in fp32

Buffers stay as they are, unless a dtype is given for them (`cast_buffers`).

Modules named in `custom_fp32` keep fp32 parameters and compute without autocast: their inputs are cast to fp32, and
their outputs back where the inputs came in low precision. The model's own outputs are cast to fp32, so that a loss
outside the model is computed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hybrid.errors import ModelError
from hybrid.precision.tree import map_tensors

__all__ = [
    "LOW_PRECISION",
    "NORM_LAYERS",
    "autocasting",
    "cast_buffers",
    "check_buffers_to_cast",
    "compute_dtypes",
    "install_casts",
]

LOW_PRECISION = (torch.bfloat16, torch.float16)


def compute_dtypes(model: nn.Module, *, dtype: torch.dtype, custom_fp32: Sequence[str]) -> dict[str, torch.dtype]:
    """fqn -> dtype in which a parameter computes under O2: fp32 parameters outside `custom_fp32` become `dtype`.

    Raises:
        ModelError: a name in `custom_fp32` that is neither a module nor a class of the model; a tied parameter that
            belongs to an fp32 module and to another one.
    """
    kept = [*_fp32_modules(model, custom_fp32), *_norms(model)]
    result: dict[str, torch.dtype] = {}
    places: dict[int, list[tuple[str, bool]]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append((fqn, _inside(fqn, kept)))
    for fqn, parameter in model.named_parameters():
        in_fp32 = {inside for _, inside in places[id(parameter)]}
        if len(in_fp32) > 1:
            names = [name for name, _ in places[id(parameter)]]
            raise ModelError(f"tied parameter {names} is in custom_fp32 at one place and not at another; list both")
        if parameter.dtype == torch.float32 and in_fp32 == {False}:
            result[fqn] = dtype
    return result


def cast_buffers(model: nn.Module, *, dtype: torch.dtype, custom_fp32: Sequence[str]) -> None:
    """Give every floating point buffer `dtype`, but those of `custom_fp32` and of torch's normalisation layers.

    State dicts keep the types that the buffers had: a file is the plain model's. A tensor that is registered at
    several places stays one; buffers that are views of others part from them, as under `model.to(dtype)`.

    Raises:
        ModelError: a buffer that belongs to an fp32 module and to another one.
    """
    chosen, before = _buffers_to_cast(model, dtype, custom_fp32)
    for fqns in chosen:
        buffer = model.get_buffer(fqns[0])
        buffer.data = buffer.data.to(dtype)  # the same object, for whoever else holds it
    if chosen:
        model.register_state_dict_post_hook(_types_as_before({fqn: before[fqn] for fqns in chosen for fqn in fqns}))


def check_buffers_to_cast(model: nn.Module, *, dtype: torch.dtype, custom_fp32: Sequence[str]) -> None:
    """Of a model that is whole.

    Raises:
        ModelError: no buffer would change; as `cast_buffers`.
    """
    chosen, before = _buffers_to_cast(model, dtype, custom_fp32)
    if not chosen:
        name = str(dtype).removeprefix("torch.")
        stay = f"; {sorted(before)} belong to custom_fp32 or to normalisation layers, and stay" if before else ""
        raise ModelError(
            f"amp_configs.buffer_dtype = {name!r} would change no buffer of this model{stay}. Leave it out"
        )


def _buffers_to_cast(
    model: nn.Module, dtype: torch.dtype, custom_fp32: Sequence[str]
) -> tuple[list[list[str]], dict[str, torch.dtype]]:
    """(names of each buffer that changes, types of all that are not of this dtype)."""
    kept = [*_fp32_modules(model, custom_fp32), *_norms(model)]
    places: dict[int, list[str]] = {}
    before: dict[str, torch.dtype] = {}
    for fqn, buffer in model.named_buffers(remove_duplicate=False):
        # Types of one byte hold codes of quantised values: they are numbers only together with their scales.
        if buffer.is_floating_point() and buffer.dtype.itemsize > 1 and buffer.dtype != dtype:
            places.setdefault(id(buffer), []).append(fqn)
            before[fqn] = buffer.dtype
    chosen = {id_: fqns for id_, fqns in places.items() if not all(_inside(fqn, kept) for fqn in fqns)}
    for fqns in chosen.values():
        if any(_inside(fqn, kept) for fqn in fqns):
            raise ModelError(
                f"buffer {fqns} is one tensor, in a module that keeps fp32 (custom_fp32, or a normalisation layer) at "
                "one place and not at another; list both in custom_fp32"
            )
    return list(chosen.values()), before


def _types_as_before(before: dict[str, torch.dtype]) -> Callable[..., None]:
    def widen(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for fqn, dtype in before.items():
            if prefix + fqn in state:  # one that is not persistent is not
                state[prefix + fqn] = state[prefix + fqn].to(dtype)

    return widen


def install_casts(model: nn.Module, *, custom_fp32: Sequence[str], norms: bool) -> None:
    """Make the modules in `custom_fp32`, and with `norms` torch's normalisation layers, compute in fp32."""
    chosen = [*_fp32_modules(model, custom_fp32), *(_norms(model) if norms else ())]
    for module in dict.fromkeys(model.get_submodule(name) for name in chosen):  # one with two names once
        module.forward = _in_fp32(module.forward)


def autocasting(
    model: nn.Module, *, dtype: torch.dtype, device_type: str, is_output: Callable[[], bool] | None = None
) -> Callable[..., Any]:
    """A `forward` for the model: its own, under autocast, with fp32 outputs (where `is_output` says they are that)."""
    forward = model.forward

    def forward_in_low_precision(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            output = forward(*args, **kwargs)
        return output if is_output is not None and not is_output() else map_tensors(output, _to_fp32)

    return forward_in_low_precision


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


def _in_fp32(forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward_in_fp32(*args: Any, **kwargs: Any) -> Any:
        came_in: set[torch.dtype] = set()

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype in LOW_PRECISION:
                came_in.add(tensor.dtype)
                return tensor.float()
            return tensor

        args, kwargs = map_tensors(args, widen), map_tensors(kwargs, widen)
        device_type = next((t.device.type for t in args if isinstance(t, torch.Tensor)), "cpu")
        with torch.autocast(device_type, enabled=False):
            output = forward(*args, **kwargs)
        if len(came_in) != 1:
            return output
        (low,) = came_in
        return map_tensors(output, lambda tensor: tensor.to(low) if tensor.dtype == torch.float32 else tensor)

    return forward_in_fp32


NORM_LAYERS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


def _norms(model: nn.Module) -> list[str]:
    """Under all of their names."""
    return [name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, NORM_LAYERS)]


def _fp32_modules(model: nn.Module, wanted: Sequence[str]) -> list[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    classes = {name: {base.__name__ for base in type(module).__mro__} for name, module in modules.items()}
    unknown = [one for one in wanted if one not in modules and not any(one in names for names in classes.values())]
    if unknown:
        raise ModelError(
            f"amp_configs.custom_fp32 names {unknown}: no module and no class of the model; it has the classes "
            f"{sorted({type(module).__name__ for module in modules.values()})}"
        )
    chosen = {id(module) for name, module in modules.items() if name in wanted or classes[name] & set(wanted)}
    return [name for name, module in modules.items() if id(module) in chosen]


def _inside(fqn: str, modules: Sequence[str]) -> bool:
    return any(name == "" or fqn.startswith(f"{name}.") for name in modules)
