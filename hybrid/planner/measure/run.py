"""Forwards of a copy of a model on fake tensors: shapes and operations of the real graph, no memory, no arithmetic."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

# The class has no public home in torch 2.13; this is a public module that has it.
from torch.fx.passes.fake_tensor_prop import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hybrid.errors import PlanError
from hybrid.planner.measure.trace import Trace, tensors_in
from hybrid.precision.tree import map_tensors
from hybrid.recompute import install_recompute

__all__ = ["Calls", "Forward", "around"]

_FAKE_TENSORS = "torch._subclasses.fake_tensor"  # name of the logger
_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]  # the second where the first cannot: the trace tells


def around(number: int) -> str:
    """Name of the part of a model before block `number`."""
    return f"(around {number})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """A model and what it is called with.

    Args:
        model: of the user; only copies of it run.
        args, kwargs: of its forward; only shapes and types matter.
        blocks: names of the repeated blocks.
        styles: name of a parameter -> how tensor parallel cuts the layer that multiplies with it.
        dtype: of parameters and floating point inputs while measured.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    blocks: Sequence[str]
    styles: Mapping[str, str]
    dtype: torch.dtype

    def run(self, *, policy: Literal["none", "selective", "full"], is_flash: bool) -> Forward:
        """A forward, and another of twice the batch, which tells what does not grow with it.

        Raises:
            PlanError: it cannot run on fake tensors.
        """
        once, twice = (self._run(policy=policy, is_flash=is_flash, times_batch=times) for times in (1, 2))
        if len(once.trace.order) == len(twice.trace.order):
            for one, other in zip(once.trace.order, twice.trace.order, strict=True):
                one.is_fixed = one.num_bytes == other.num_bytes
        return once

    def _run(self, *, policy: Literal["none", "selective", "full"], is_flash: bool, times_batch: int) -> Forward:
        fakes = FakeTensorMode(allow_non_fake_inputs=True)  # a module may hold plain tensors as constants
        args, kwargs = map_tensors((self.args, dict(self.kwargs)), lambda one: _fake_input(one, fakes, self.dtype))
        batch = next(tensors_in((args, kwargs))).shape[0]
        if times_batch > 1:
            args, kwargs = map_tensors((args, kwargs), lambda one: _repeated(one, batch, times_batch, fakes))
        # Constructors and dropout draw nothing on fake tensors; what else a forward draws from is put back.
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), _young_objects() as collect, fakes:
            model = _fake_copy(self.model, fakes, self.dtype).train()
            if policy != "none":
                # Random state is some kilobytes per unit, and would be real memory here.
                install_recompute(model, self.blocks, policy=policy, preserve_rng=False)
            trace = Trace(model, (args, kwargs), self.styles)
            inputs = _follow(model, self.blocks, trace)
            kernels = _FUSED if is_flash else [SDPBackend.MATH]
            try:
                with (
                    _silent(_FAKE_TENSORS),
                    sdpa_kernel(kernels, set_priority=True),
                    saved_tensors_hooks(trace.saves, lambda tensor: tensor),
                    trace,
                    _KernelsOfGpus(trace, is_flash=is_flash),
                ):
                    result = model(*args, **kwargs)
            except Exception as error:
                reason = (str(error).splitlines() or [""])[0].rstrip(".")
                raise PlanError(
                    f"{type(self.model).__name__} cannot be measured: on fake tensors it raised "
                    f"{type(error).__name__}: {reason}. Operations whose shapes depend on values have none there; give "
                    "its configuration (config.json) or the name of a preset instead"
                ) from error
            roots = [one for one in tensors_in(result) if one.requires_grad]
            losses = [one for one in roots if one.numel() == 1]
            graph = [one.grad_fn for one in losses or roots]
            del result, roots, losses, model
            collect()
            trace.settle()
            if not graph:
                raise PlanError(f"{type(self.model).__name__} returned nothing that depends on its parameters")
            del graph
        return Forward(trace=trace, inputs=inputs, batch=batch * times_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What one forward did.

    Args:
        trace: operation by operation.
        inputs: block -> shape of the first floating point tensor that it was given.
        batch: samples.
    """

    trace: Trace
    inputs: Mapping[str, tuple[int, ...]]
    batch: int


class _KernelsOfGpus(TorchFunctionMode):
    """Calls that one kernel of a GPU answers and several of the CPU: norms, and fused attention with dropout."""

    def __init__(self, trace: Trace, *, is_flash: bool) -> None:
        super().__init__()
        self.trace, self.is_flash = trace, is_flash

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is rms_norm:
            return _fused_norm(self.trace, *_norm_arguments(*args, **kwargs))
        if func is scaled_dot_product_attention and self.is_flash:
            # The CPU's kernel takes no dropout; those of GPUs keep the random state instead of a mask.
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif kwargs.get("dropout_p"):
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """What torch logs, traceback and all, of an operation that fake tensors cannot do: our message tells it."""
    logger = logging.getLogger(name)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


@contextmanager
def _young_objects() -> Iterator[Callable[[], object]]:
    """No collection of garbage but the one that is called for: it looks only at what was made in here."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield lambda: gc.collect(0)
    finally:
        if is_on:
            gc.enable()


def _norm_arguments(input: torch.Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None) -> tuple[Any, ...]:
    return input, weight, len(normalized_shape)


def _fused_norm(*args: Any) -> Any:
    return _FusedNorm.apply(*args)  # type: ignore[no-untyped-call]


class _FusedNorm(torch.autograd.Function):
    """Shapes of the fused RMS norm, which saves its input and 1/deviation."""

    @staticmethod
    def forward(ctx: Any, trace: Trace, tensor: torch.Tensor, weight: torch.Tensor | None, num_dims: int) -> Any:
        shape = (*tensor.shape[: tensor.dim() - num_dims], *(1,) * num_dims)
        result, scale = trace.as_one_kernel(
            lambda: (torch.empty_like(tensor), tensor.new_empty(shape, dtype=torch.float32)),
            *([tensor] if weight is None else [tensor, weight]),
        )
        ctx.save_for_backward(tensor, weight, scale)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("a measured forward has no backward")


def _follow(model: nn.Module, blocks: Sequence[str], trace: Trace) -> dict[str, tuple[int, ...]]:
    """Let the trace know which block runs."""
    inputs: dict[str, tuple[int, ...]] = {}
    left = [0]
    trace.part = around(0)

    def entered(name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            trace.part = name
            trace.receives((args, kwargs))
            floating = [one for one in tensors_in((args, kwargs)) if one.is_floating_point()]
            inputs.setdefault(name, tuple(floating[0].shape) if floating else ())

        return enter

    def leave(*_: Any) -> None:
        left[0] += 1
        trace.part = around(left[0])

    for name in blocks:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(entered(name), with_kwargs=True, prepend=True)
        module.register_forward_hook(leave)
    return inputs


def _fake_copy(module: nn.Module, fakes: FakeTensorMode, dtype: torch.dtype) -> nn.Module:
    """With fake parameters and buffers; a copy, so that nothing that its forward stores stays in the model."""
    replaced: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        is_parameter = isinstance(tensor, nn.Parameter)
        fake = _fake(tensor, fakes, dtype if is_parameter and tensor.is_floating_point() else tensor.dtype)
        replaced[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
    return copy.deepcopy(module, replaced)


def _fake(tensor: torch.Tensor, fakes: FakeTensorMode, dtype: torch.dtype) -> torch.Tensor:
    """On the CPU, wherever the tensor is: the meta device would choose other kernels."""
    with fakes:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")


def _fake_input(tensor: torch.Tensor, fakes: FakeTensorMode, dtype: torch.dtype) -> torch.Tensor:
    return _fake(tensor, fakes, dtype if tensor.is_floating_point() else tensor.dtype)


def _repeated(tensor: torch.Tensor, batch: int, times: int, fakes: FakeTensorMode) -> torch.Tensor:
    if tensor.dim() == 0 or tensor.shape[0] != batch:
        return tensor
    with fakes:
        return torch.empty((batch * times, *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")
