"""`p.grad` after the reduction: metadata works, and nothing that reads values gets a wrong one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from hybrid.errors import GradientAccessError
from hybrid.sharding.gradient_handle import GradientHandle

FQN = "blocks.3.mlp.weight"


def no_unscaler(*_: Any) -> None:
    raise AssertionError("no loss scaler is at work here")


def handle_of(parameter: nn.Parameter, fqn: str = FQN, unscaler: Any = no_unscaler) -> GradientHandle:
    return GradientHandle.of(parameter, fqn=fqn, held_dtype=parameter.dtype, unscaler=unscaler)


def parameter_with_handle(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3, 4, dtype=dtype))
    parameter.grad = handle_of(parameter)
    return parameter


def plain() -> torch.Tensor:
    return torch.zeros(3, 4)


Use = Callable[[nn.Parameter, Any], Any]

READS: dict[str, Use] = {
    "+": lambda p, g: g + 1,
    "reflected +": lambda p, g: 1 + g,
    "norm": lambda p, g: g.norm(),
    "linalg.vector_norm": lambda p, g: torch.linalg.vector_norm(g),
    "sum": lambda p, g: g.sum(),
    "isfinite": lambda p, g: g.isfinite(),
    "torch.isnan": lambda p, g: torch.isnan(g),
    "any": lambda p, g: g.any(),
    "item": lambda p, g: g.item(),
    "float": lambda p, g: float(g),
    "bool": lambda p, g: bool(g),
    "tolist": lambda p, g: g.tolist(),
    "numpy": lambda p, g: g.numpy(),
    "numpy.asarray": lambda p, g: numpy.asarray(g),
    "data": lambda p, g: g.data,
    "detach": lambda p, g: g.detach(),
    "clone": lambda p, g: g.clone(),
    "cpu": lambda p, g: g.cpu(),
    "to": lambda p, g: g.to(torch.float64),
    "index": lambda p, g: g[0],
    "iterate": lambda p, g: list(g),
    "view": lambda p, g: g.view(-1),
    "flatten": lambda p, g: g.flatten(),
    "transpose": lambda p, g: g.T,
    "equal": lambda p, g: torch.equal(g, plain()),
    "==": lambda p, g: g == plain(),
    "argument": lambda p, g: plain().add_(g),
    "keyword argument": lambda p, g: torch.add(plain(), other=g),
    "copied from": lambda p, g: plain().copy_(g),
    "cat": lambda p, g: torch.cat([plain(), g]),
    "stack in a tuple": lambda p, g: torch.stack((g, plain())),
    "einsum": lambda p, g: torch.einsum("ij->i", g),
    "linear": lambda p, g: nn.functional.linear(torch.ones(2, 4), g),
    "foreach_norm": lambda p, g: torch._foreach_norm([plain(), g]),
    "foreach_add_": lambda p, g: torch._foreach_add_([plain()], [g]),
    "foreach_addcmul_": lambda p, g: torch._foreach_addcmul_([plain()], [plain()], [g]),
    "data_ptr": lambda p, g: g.data_ptr(),
    "untyped_storage": lambda p, g: g.untyped_storage(),
    "dlpack": lambda p, g: torch.from_dlpack(g),
    "parameters_to_vector": lambda p, g: nn.utils.parameters_to_vector([g]),
    "all_reduce": lambda p, g: torch.distributed.all_reduce(g),
    "pickle": lambda p, g: pickle.dumps(g),
    "torch.save": lambda p, g: torch.save({"grad": g}, io.BytesIO()),
}

WRITES: dict[str, Use] = {
    "mul_": lambda p, g: g.mul_(0.5),
    "zero_": lambda p, g: g.zero_(),
    "copy_": lambda p, g: g.copy_(plain()),
    "setitem": lambda p, g: g.__setitem__(0, 1.0),
    "out": lambda p, g: torch.add(plain(), plain(), out=g),
    "foreach_mul_": lambda p, g: torch._foreach_mul_([g], 2.0),
    "foreach_zero_": lambda p, g: torch._foreach_zero_([g]),
}

HELPERS: dict[str, Use] = {
    "clip_grad_norm_": lambda p, g: nn.utils.clip_grad_norm_([p], 1.0),
    "clip_grad_norm_ foreach": lambda p, g: nn.utils.clip_grad_norm_([p], 1.0, foreach=True),
    "clip_grad_norm_ no foreach": lambda p, g: nn.utils.clip_grad_norm_([p], 1.0, foreach=False),
    "clip_grad_norm_ inf": lambda p, g: nn.utils.clip_grad_norm_([p], 1.0, norm_type=float("inf")),
    "clip_grad_value_": lambda p, g: nn.utils.clip_grad_value_([p], 1.0),
    "clip_grad_value_ no foreach": lambda p, g: nn.utils.clip_grad_value_([p], 1.0, foreach=False),
    "get_total_norm": lambda p, g: nn.utils.get_total_norm([g]),
    "clip_grads_with_norm_": lambda p, g: nn.utils.clip_grads_with_norm_([p], 1.0, torch.tensor(3.0)),
    "SGD": lambda p, g: torch.optim.SGD([p], lr=0.1).step(),
    "SGD foreach": lambda p, g: torch.optim.SGD([p], lr=0.1, foreach=True).step(),
    "SGD fused": lambda p, g: torch.optim.SGD([p], lr=0.1, fused=True).step(),
    "AdamW": lambda p, g: torch.optim.AdamW([p], weight_decay=0.0).step(),
    "AdamW foreach": lambda p, g: torch.optim.AdamW([p], weight_decay=0.0, foreach=True).step(),
    "AdamW fused": lambda p, g: torch.optim.AdamW([p], fused=True).step(),
    "Adafactor": lambda p, g: torch.optim.Adafactor([p]).step(),
    "plain zero_grad to zero": lambda p, g: torch.optim.SGD([p], lr=0.1).zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("name", [*READS, *WRITES, *HELPERS])
def test_every_use_of_the_values_raises_with_the_name_and_the_way(name: str) -> None:
    """Protects against clipping, logging or stepping on zeros, or on one rank's part, without a word."""
    parameter = parameter_with_handle()
    before = parameter.detach().clone()
    with pytest.raises(GradientAccessError) as caught:
        {**READS, **WRITES, **HELPERS}[name](parameter, parameter.grad)
    message = str(caught.value)
    assert repr(FQN) in message
    assert "model.named_gradients()" in message
    assert torch.equal(parameter.detach(), before)


def test_the_first_of_several_gradients_is_named() -> None:
    """Protects the message where a helper gets all gradients at once, nested as it likes."""
    parameters = {f"layer.{place}": nn.Parameter(torch.ones(2)) for place in range(3)}
    handles = [handle_of(parameter, fqn) for fqn, parameter in parameters.items()]
    with pytest.raises(GradientAccessError, match=r"layer\.0"):
        torch._foreach_norm(handles)
    with pytest.raises(GradientAccessError, match=r"layer\.2"):
        torch.add(torch.ones(2), torch.ones(2), out=handles[2])


METADATA: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda t: t.shape,
    "size": lambda t: t.size(),
    "size of a dim": lambda t: t.size(1),
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
    "layout": lambda t: t.layout,
    "ndim": lambda t: t.ndim,
    "dim": lambda t: t.dim(),
    "numel": lambda t: t.numel(),
    "nelement": lambda t: t.nelement(),
    "torch.numel": torch.numel,
    "len": len,
    "element_size": lambda t: t.element_size(),
    "itemsize": lambda t: t.itemsize,
    "nbytes": lambda t: t.nbytes,
    "storage_offset": lambda t: t.storage_offset(),
    "get_device": lambda t: t.get_device(),
    "is_sparse": lambda t: t.is_sparse,
    "is_cuda": lambda t: t.is_cuda,
    "is_cpu": lambda t: t.is_cpu,
    "is_meta": lambda t: t.is_meta,
    "is_floating_point": lambda t: t.is_floating_point(),
    "torch.is_floating_point": torch.is_floating_point,
    "is_complex": lambda t: t.is_complex(),
    "requires_grad": lambda t: t.requires_grad,
    "grad_fn": lambda t: t.grad_fn,
    "grad": lambda t: t.grad,
    "is_leaf": lambda t: t.is_leaf,
}


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_metadata_is_that_of_a_real_gradient(name: str, dtype: torch.dtype) -> None:
    """Protects code that only asks whether there is a gradient and what it looks like."""
    parameter = parameter_with_handle(dtype)
    real = torch.zeros_like(parameter)
    assert METADATA[name](parameter.grad) == METADATA[name](real)


def test_the_dtype_is_that_of_the_gradient_that_is_held() -> None:
    """Protects loss scalers, which group gradients by dtype: an fp32 gradient of a bf16 weight is an fp32 one."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    handle = GradientHandle.of(parameter, fqn=FQN, held_dtype=torch.float32, unscaler=no_unscaler)
    assert handle.dtype == torch.float32


def test_a_loss_scaler_reaches_the_gradients_by_name() -> None:
    """Protects GradScaler: its unscaling goes to the gradients where they are, all of them in one call."""
    asked: list[tuple[list[str], float]] = []

    def unscaler(fqns: list[str], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        asked.append((fqns, inverse_scale.item()))
        found_inf.fill_(1.0)

    parameters = [nn.Parameter(torch.ones(size)) for size in (2, 3)]
    for place, parameter in enumerate(parameters):
        parameter.grad = handle_of(parameter, f"layer.{place}", unscaler)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert asked == [(["layer.0", "layer.1"], 0.125)]
    # It found an overflow, so the step is left out.
    assert scaler.step(optimizer) is None
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_a_handle_has_a_gradients_place_and_no_memory() -> None:
    """Protects the memory of stage 2: one element stands for the whole shape."""
    parameter = nn.Parameter(torch.ones(1000, 1000))
    handle = handle_of(parameter)
    parameter.grad = handle
    assert parameter.grad is handle
    assert isinstance(parameter.grad, torch.Tensor)
    with torch._C.DisableTorchFunctionSubclass():
        assert handle.untyped_storage().nbytes() == 4


def test_a_handle_is_hashable_and_compares_by_identity() -> None:
    """Protects sets and dicts of gradients, which must not compare values."""
    one, other = parameter_with_handle().grad, parameter_with_handle().grad
    assert len({one, other}) == 2
    assert one in {one: 1}


def test_printing_says_where_the_gradient_is() -> None:
    """Protects debugging: print(p.grad) and a parameter in a debugger say how to read it, and never raise."""
    text = repr(parameter_with_handle().grad)
    assert FQN in text
    assert "(3, 4)" in text
    assert "hybrid.full_gradient" in text
    assert str(parameter_with_handle().grad) == text


def test_a_copied_parameter_has_no_gradient() -> None:
    """Protects deepcopy of a layer (moving averages): the copy is a parameter without a gradient."""
    module = nn.Linear(4, 3)
    module.weight.grad = handle_of(module.weight)
    copied = copy.deepcopy(module)
    assert copied.weight.grad is None
    assert torch.equal(copied.weight, module.weight)


def test_a_module_may_convert_itself_to_what_it_is() -> None:
    """As routers do inside a forward; between two micro-batches the gradient has nothing to change."""
    module = nn.Linear(3, 2)
    for fqn, parameter in module.named_parameters():
        parameter.grad = handle_of(parameter, fqn)
    handle, memory = module.weight.grad, module.weight.data_ptr()
    for converted in (
        module.to(torch.float32),
        module.to("cpu", torch.float32),
        module.float(),
        module.type(torch.float32),
    ):
        assert converted.weight.grad is handle
        assert converted.weight.data_ptr() == memory
    with pytest.raises(GradientAccessError, match="'weight'"):
        module.to(torch.bfloat16)


@pytest.mark.parametrize("zero", ["module", "optimizer", "by hand"])
def test_a_handle_is_taken_away_like_a_gradient(zero: str) -> None:
    """Protects zero_grad in all its spellings."""
    module = nn.Linear(4, 3)
    module.weight.grad = handle_of(module.weight)
    if zero == "module":
        module.zero_grad()
    elif zero == "optimizer":
        torch.optim.SGD(module.parameters(), lr=0.1).zero_grad()
    else:
        module.weight.grad = None
    assert module.weight.grad is None


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3, 4)])
def test_handles_exist_for_every_shape(shape: tuple[int, ...]) -> None:
    """Protects scalars and empty parameters."""
    handle = handle_of(nn.Parameter(torch.ones(shape)))
    assert tuple(handle.shape) == shape
    with pytest.raises(GradientAccessError):
        handle.sum()
