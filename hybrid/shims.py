"""The private names of torch that have no public equivalent, each with its reason. Checked with torch 2.13.

Nothing else in the package touches a private name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

# torch 2.13: documented under this name, and in a module whose own name is private.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "AMP_UNSCALE",
    "ATTENTION_OPERATIONS",
    "CPU_ATTENTION",
    "CPU_ATTENTION_BACKWARD",
    "SCHEDULER_STEP_CALLED",
    "SCHEDULER_STEP_MARK",
    "UNSCALES_BY_ITSELF",
    "TorchDispatchMode",
    "call_at_end_of_backward",
    "forward_hooks",
    "give_memory",
    "has_backward_hooks",
    "in_backward",
    "is_new_result",
    "is_persistent",
    "memory_of",
    "unrecorded",
    "version_of",
]

# torch 2.13: learning-rate schedulers replace `optimizer.step` on the instance by a wrapper that carries this
# mark and sets this flag. An optimizer whose class already tracks the call carries the mark itself, so that a
# scheduler built before or after `distributed_optimizer` sees steps and warns only when there were none.
SCHEDULER_STEP_MARK = "_wrapped_by_lr_sched"
SCHEDULER_STEP_CALLED = "_opt_called"

# torch 2.13: what scaled_dot_product_attention becomes; selective recompute keeps these results. The operations
# have no public names.
ATTENTION_OPERATIONS = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)

# torch 2.13: torch.utils.flop_counter has formulas for attention on CUDA, and none for these two.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# torch 2.13: what torch.amp.GradScaler calls on a list of gradients, and the attribute by which fused optimizers
# tell it that they unscale by themselves. Ours are unscaled where they lie, in the shards, with one decision for
# the world, so gradient handles answer the call and the attribute is switched off. Neither has a public name.
AMP_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
UNSCALES_BY_ITSELF = "_step_supports_amp_scaling"


def unrecorded(start: Callable[[], Any]) -> Any:
    """What `start` returns; torch's profiler, if one runs in this thread, notes nothing of it.

    torch 2.13: a message that is begun while a profiler runs keeps an open record of it, and writes its end when it is
    completed or freed. If the profiler has stopped by then, that is memory of somebody else. Messages that are posted
    ahead do that always, so they must not be recorded; neither switch has a public name.
    """
    if not _profiler_enabled():
        return start()
    _enable_record_function(False)
    try:
        return start()
    finally:
        _enable_record_function(True)


_profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled
_enable_record_function: Callable[[bool], None] = torch.autograd._enable_record_function


def is_persistent(module: torch.nn.Module, buffer: str) -> bool:
    """Whether a module's own buffer is part of its state dict. torch 2.13 has no public way to ask."""
    return buffer not in module._non_persistent_buffers_set


def forward_hooks(module: torch.nn.Module) -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """A module's own pre-hooks and hooks, as it keeps them. torch 2.13 has no public way to ask."""
    return module._forward_pre_hooks, module._forward_hooks


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module itself has backward hooks. torch 2.13 has no public way to ask."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def memory_of(tensor: torch.Tensor) -> int:
    """A number for the memory in which a tensor lies: equal for all that share it, also while it is freed.

    torch 2.13: a storage has no public identity (its data pointer is 0 while it is freed), and there is no public way
    to ask a tensor without its class being asked first.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor.untyped_storage()._cdata)


def version_of(tensor: torch.Tensor) -> int | None:
    """How often the memory of a tensor was written to; None under inference mode. torch 2.13: no public name."""
    with torch._C.DisableTorchFunctionSubclass():
        return None if tensor.is_inference() else tensor._version


def is_new_result(tensor: torch.Tensor) -> bool:
    """Whether an operation with a gradient made the memory of this tensor, and nobody has written to it since.

    torch 2.13: neither the base of a view nor the version of a tensor has a public name.
    """
    if tensor.grad_fn is None:
        return False
    base = tensor._base if tensor._is_view() else tensor
    return base is not None and base.grad_fn is not None and base._version == 0


def in_backward() -> bool:
    """Whether this thread runs inside a backward pass. torch 2.13 has no public way to ask."""
    return torch._C._current_graph_task_id() != -1


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` once, when the backward pass that is running now ends without an error.

    torch 2.13 has no public hook for this moment; DistributedDataParallel and FSDP2 use the same call. It is
    not run when the backward raises, so callers must also finish at their next own call.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def give_memory(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """A parameter on the meta device becomes one over `values`, the same object to everybody who holds it.

    `.data` cannot change the device, and a new Parameter would leave optimizers and modules with the old. Public but
    for one call: torch 2.13's swap_tensors refuses what somebody refers to weakly, as nn.LSTM does to its parameters.
    """
    # Made of other memory first: a Parameter made of `values` would share their version counter, and every write to
    # the buffer under them would look like one to the parameter.
    real = torch.nn.Parameter(values.new_empty(0), requires_grad=parameter.requires_grad)
    real.data = values
    if weakref.getweakrefs(parameter):
        torch._C._swap_tensor_impl(parameter, real)
        return
    vars(real).update(vars(parameter))
    torch.utils.swap_tensors(parameter, real)
