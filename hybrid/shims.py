"""The private names of torch that have no public equivalent, each with its reason. Checked with torch 2.13.

Nothing else in the package touches a private name.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from types import FrameType
from typing import Any

import torch

# torch 2.13: documented under this name, and in a module whose own name is private.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "ADD_TO_EACH",
    "AMP_UNSCALE",
    "ATTENTION_OPERATIONS",
    "COPIES_SHALLOW",
    "COPY_TO_EACH",
    "CPU_ATTENTION",
    "CPU_ATTENTION_BACKWARD",
    "GROUPED_PRODUCT",
    "ONEDNN_PRODUCT",
    "RESHAPED_PRODUCT",
    "SCHEDULER_STEP_CALLED",
    "SCHEDULER_STEP_MARK",
    "UNSCALES_BY_ITSELF",
    "TorchDispatchMode",
    "call_at_end_of_backward",
    "drop_hooks",
    "forward_hooks",
    "give_memory",
    "has_backward_hooks",
    "has_gradient_hooks",
    "in_backward",
    "in_forward_mode",
    "in_function_transform",
    "is_compiled",
    "is_compiler_error",
    "is_new_result",
    "is_persistent",
    "is_sole_user_of_memory",
    "is_view",
    "keeps_graph",
    "keeps_random_state",
    "memory_of",
    "own_parts",
    "plain_result",
    "plain_tensors",
    "quiet_fakes",
    "returns_view",
    "saves_through_hooks",
    "state_dict_hooks",
    "unrecorded",
    "users_of_memory",
    "version_of",
    "will_run",
    "written_arguments",
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

# torch 2.13: (input, weight, bias, "none", (), "") -> input @ weight.T + bias by oneDNN, of any strides, and with no
# gradient of its own. torch's compiler calls it; torch.nn.functional.linear takes oneDNN for other types than fp32.
ONEDNN_PRODUCT = torch.ops.mkldnn._linear_pointwise.default

# torch 2.13: the last operation of a linear layer without a bias, on more than two dims. No public name.
RESHAPED_PRODUCT = torch.ops.aten._unsafe_view.default

# torch 2.13: what torch.nn.functional.grouped_mm becomes. No public name.
GROUPED_PRODUCT = torch.ops.aten._grouped_mm

# torch 2.13: what torch.nn.Module.to asks before it puts a converted gradient in the place of one. No public name.
COPIES_SHALLOW = torch._has_compatible_shallow_copy_type

# torch 2.13: `target.copy_(source)` and `target.add_(source)` over two lists, in one call. Neither has a public name.
COPY_TO_EACH = torch._foreach_copy_
ADD_TO_EACH = torch._foreach_add_

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


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module was compiled by its user: by torch.compile(module), or by module.compile().

    torch 2.13: the class of the first has no public name, and the second leaves a private mark only. Where torch's
    compiler was never loaded, nothing is compiled.
    """
    compiler = sys.modules.get("torch._dynamo")
    is_wrapped = compiler is not None and isinstance(module, compiler.OptimizedModule)
    return is_wrapped or module._compiled_call_impl is not None


def is_compiler_error(error: BaseException) -> bool:
    """Whether torch's compiler could not compile something. torch 2.13: its exceptions have no public names."""
    compiler = sys.modules.get("torch._dynamo")
    return compiler is not None and isinstance(error, compiler.exc.TorchDynamoException)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDictHooks:
    """The hooks of an optimizer's state dict, in the order in which they run."""

    before_saving: tuple[Callable[..., Any], ...]
    after_saving: tuple[Callable[..., Any], ...]
    before_loading: tuple[Callable[..., Any], ...]
    after_loading: tuple[Callable[..., Any], ...]


def state_dict_hooks(optimizer: torch.optim.Optimizer) -> StateDictHooks:
    """What was registered on an optimizer, to be run where its `state_dict` is not torch's own.

    torch 2.13 has no public way to ask.
    """
    return StateDictHooks(
        before_saving=tuple(optimizer._optimizer_state_dict_pre_hooks.values()),
        after_saving=tuple(optimizer._optimizer_state_dict_post_hooks.values()),
        before_loading=tuple(optimizer._optimizer_load_state_dict_pre_hooks.values()),
        after_loading=tuple(optimizer._optimizer_load_state_dict_post_hooks.values()),
    )


def is_persistent(module: torch.nn.Module, buffer: str) -> bool:
    """Whether a module's own buffer is part of its state dict. torch 2.13 has no public way to ask."""
    return buffer not in module._non_persistent_buffers_set


def forward_hooks(module: torch.nn.Module) -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """A module's own pre-hooks and hooks, as it keeps them. torch 2.13 has no public way to ask."""
    return module._forward_pre_hooks, module._forward_hooks


# A module's own parameters and children, as it keeps them. torch 2.13: the public ways build a name for each.
own_parts: Callable[[torch.nn.Module], tuple[dict[str, Any], dict[str, Any]]] = attrgetter("_parameters", "_modules")


# torch 2.13: there is no public way to ask a tensor for its hooks.
def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether somebody else than the reducer, which has one, watches this parameter's gradient."""
    with torch._C.DisableTorchFunctionSubclass():  # one whose values are elsewhere would have them brought
        after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
        return bool(parameter._backward_hooks) or (after is not None and len(after) > 1)


def drop_hooks(module: torch.nn.Module) -> None:
    """Take all hooks of its calls from a module. torch 2.13 has no public way to find them."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    for registered in (*hooks, module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs):
        registered.clear()
    module._forward_hooks_always_called.clear()


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module itself has backward hooks. torch 2.13 has no public way to ask."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def keeps_random_state(frame: FrameType) -> bool:
    """Whether a running call of torch's checkpoint keeps the random state.

    torch 2.13: what was asked for is nowhere but in a local variable of the call. Without it: yes, the default.
    """
    return bool(frame.f_locals.get("preserve", True))


def memory_of(tensor: torch.Tensor) -> int:
    """A number for the memory in which a tensor lies: equal for all that share it, also while it is freed.

    torch 2.13: a storage has no public identity (its data pointer is 0 while it is freed), and there is no public way
    to ask a tensor without its class being asked first.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor.untyped_storage()._cdata)


def users_of_memory(tensor: torch.Tensor) -> int:
    """How many tensors, in Python or below it, share this one's storage. torch 2.13: no public name."""
    storage = tensor.untyped_storage()  # which counts as one more
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def is_sole_user_of_memory(tensor: torch.Tensor) -> bool:
    """Whether no other tensor, in Python or below it, shares this one's storage."""
    return users_of_memory(tensor) == 1


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


# torch 2.13: no public way to ask whether grad, vmap, jvp and the like of torch.func are under way.
def in_function_transform() -> bool:
    """Whether this code runs inside a transform of torch.func."""
    return _top_transform() is not None


_top_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack


def in_backward() -> bool:
    """Whether this thread runs inside a backward pass. torch 2.13 has no public way to ask."""
    return torch._C._current_graph_task_id() != -1


def will_run(node: torch.autograd.graph.Node) -> bool:
    """Inside a backward pass: whether it comes to this node, so that a gradient which enters there counts.

    torch 2.13 has no public way to ask; it answers with an error under torch.autograd.grad, which takes the gradient of
    a parameter without accumulating it.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def saves_through_hooks() -> bool:
    """Whether what autograd saves now goes through hooks, as under recompute. torch 2.13: no public way to ask."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def in_forward_mode() -> bool:
    """Whether derivatives are being computed in forward mode. torch 2.13 has no public way to ask."""
    return torch.autograd.forward_ad._current_level >= 0


def keeps_graph() -> bool:
    """Inside a backward pass: whether another one may go the same way (retain_graph). torch 2.13: no public name."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor of which this one is a view. torch 2.13: no public name."""
    return bool(tensor._is_view())


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


def written_arguments(operation: Any) -> list[tuple[int, str]]:
    """(place, name) of the arguments that an operation writes to. torch 2.13: its schema has no public name."""
    arguments = enumerate(operation._schema.arguments)
    return [(place, arg.name) for place, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]


def returns_view(operation: Any) -> bool:
    """Whether a result of an operation shares memory with an argument. torch 2.13: its schema has no public name."""
    return any(result.alias_info is not None for result in operation._schema.returns)


# Inside, a tensor is what it is to an operation, whatever its class answers. torch 2.13: no public name.
plain_tensors: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunctionSubclass

# (operation, classes, arguments) -> what the operation gives so. torch 2.13: no public name.
plain_result: Callable[..., Any] = torch._C._disabled_torch_function_impl


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Inside, torch logs nothing of operations that fail on tensors without values: who runs them says so.

    torch 2.13: the logger has the name of a private module.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
