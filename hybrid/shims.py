"""The private names of torch that have no public equivalent, each with its reason. Checked with torch 2.13.

Nothing else in the package touches a private name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

# torch 2.13: documented under this name, and in a module whose own name is private.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "AMP_UNSCALE",
    "ATTENTION_OPERATIONS",
    "SCHEDULER_STEP_CALLED",
    "SCHEDULER_STEP_MARK",
    "UNSCALES_BY_ITSELF",
    "TorchDispatchMode",
    "call_at_end_of_backward",
    "give_memory",
    "in_backward",
    "is_persistent",
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

# torch 2.13: what torch.amp.GradScaler calls on a list of gradients, and the attribute by which fused optimizers
# tell it that they unscale by themselves. Ours are unscaled where they lie, in the shards, with one decision for
# the world, so gradient handles answer the call and the attribute is switched off. Neither has a public name.
AMP_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
UNSCALES_BY_ITSELF = "_step_supports_amp_scaling"


def is_persistent(module: torch.nn.Module, buffer: str) -> bool:
    """Whether a module's own buffer is part of its state dict. torch 2.13 has no public way to ask."""
    return buffer not in module._non_persistent_buffers_set


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
