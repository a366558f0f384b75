"""What torch.cuda and torch.Tensor say of devices, on the stand-in of `cuda_devices`.

Functions take the arguments of torch's documentation and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tests.cuda_streams import HOST, Event, Stream, joined

if TYPE_CHECKING:
    from tests.cuda_devices import Machine

__all__ = ["MEMORY_BYTES", "Generator", "install"]

MEMORY_BYTES = 80 * 10**9
_HOST = torch.device("cpu")
_RealGenerator = torch.Generator


class Generator(_RealGenerator):
    """Of a GPU: a seed and an offset, of 16 bytes together."""

    def __new__(cls, device: Any = "cpu") -> Any:
        device = torch.device(device)
        return _RealGenerator() if device.type == "cpu" else super().__new__(cls)

    def __init__(self, device: Any = "cpu") -> None:
        self._device, self._seed, self._offset = torch.device(device), 67280421310721, 0

    @property
    def device(self) -> torch.device:
        return self._device

    def manual_seed(self, seed: int) -> Generator:
        self._seed, self._offset = seed % 2**64, 0
        return self

    def seed(self) -> int:
        self.manual_seed(_RealGenerator().seed())
        return self._seed

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> Generator:
        assert offset % 4 == 0, "offset must be a multiple of 4"
        self._offset = offset
        return self

    def get_state(self) -> torch.Tensor:
        raw = self._seed.to_bytes(8, "little") + self._offset.to_bytes(8, "little")
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> Generator:
        if new_state.device.type != "cpu" or new_state.dtype != torch.uint8:
            raise TypeError("RNG state must be a torch.ByteTensor")
        raw = new_state.numpy().tobytes()
        if len(raw) != 16:
            raise RuntimeError("RNG state is wrong size")
        self._seed, self._offset = int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")
        return self

    def next_seed(self) -> int:
        self._offset += 4
        return (self._seed * 0x9E3779B1 + self._offset) % 2**63


def install(machine: Machine, stack: ExitStack) -> None:
    """Until the stack is left."""

    def patch(owner: Any, name: str, value: Any) -> None:
        stack.enter_context(mock.patch.object(owner, name, value))

    for function in _functions(machine):
        patch(torch.cuda, function.__name__, function)
    for name, answer in (("is_available", True), ("is_initialized", True), ("device_count", machine.num_devices)):
        patch(torch.cuda, name, lambda answer=answer: answer)
    patch(torch.cuda, "_lazy_init", lambda: None)
    patch(torch.cuda, "_initialized", True)  # torch.utils.checkpoint asks this
    patch(torch.cuda, "_is_in_bad_fork", lambda: False)
    patch(torch.cuda, "default_generators", machine.generators)
    patch(torch.cuda, "Stream", _registered(machine))
    patch(torch.cuda, "Event", Event)
    patch(torch, "Generator", Generator)
    _tensors(machine, patch)
    _autocast(machine, patch)


def _registered(machine: Machine) -> type[Stream]:
    class Made(Stream):
        def __init__(self, device: Any = None, priority: int = 0) -> None:
            super().__init__(device, priority)
            machine.all_streams.append(self)

    return Made


def _functions(machine: Machine) -> list[Callable[..., Any]]:
    def set_device(device: Any) -> None:
        machine.own.device = machine.index(device)

    def current_device() -> int:
        return machine.current

    def synchronize(device: Any = None) -> None:
        machine.index(device)
        machine.host_waits["torch.cuda.synchronize"] += 1
        HOST.join(joined(machine.all_streams))

    def current_stream(device: Any = None) -> Stream:
        return machine.streams[machine.index(device)]

    def default_stream(device: Any = None) -> Stream:
        return machine.compute[machine.index(device)]

    def set_stream(stream: Stream) -> None:
        machine.streams[stream.device_index], machine.own.device = stream, stream.device_index

    @contextmanager
    def stream(stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before, current = machine.streams[stream.device_index], machine.current
        set_stream(stream)
        try:
            yield
        finally:
            machine.streams[stream.device_index], machine.own.device = before, current

    @contextmanager
    def device(device: Any) -> Iterator[None]:
        before = machine.current
        if device is not None and device != -1:
            machine.own.device = machine.index(device)
        try:
            yield
        finally:
            machine.own.device = before

    def get_device_name(device: Any = None) -> str:
        machine.index(device)
        return machine.name

    def get_device_properties(device: Any = None) -> Any:
        index = machine.index(device)
        return SimpleNamespace(
            name=machine.name, total_memory=MEMORY_BYTES, major=9, minor=0, index=index, multi_processor_count=132
        )

    def get_device_capability(device: Any = None) -> tuple[int, int]:
        machine.index(device)
        return 9, 0

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        machine.index(device)
        return MEMORY_BYTES - 3 * 10**9, MEMORY_BYTES

    def memory_reserved(device: Any = None) -> int:
        return 2 * 10**9 + 0 * machine.index(device)

    def max_memory_reserved(device: Any = None) -> int:
        return 4 * 10**9 + 0 * machine.index(device)

    def memory_allocated(device: Any = None) -> int:
        return 10**9 + 0 * machine.index(device)

    def max_memory_allocated(device: Any = None) -> int:
        return 10**9 + 0 * machine.index(device)

    def reset_peak_memory_stats(device: Any = None) -> None:
        machine.index(device)

    def memory_stats(device: Any = None) -> dict[str, Any]:
        machine.index(device)
        return {"allocated_bytes.all.peak": 10**9}

    def empty_cache() -> None: ...

    def manual_seed(seed: int) -> None:
        machine.generators[machine.current].manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for generator in machine.generators:
            generator.manual_seed(seed)

    def initial_seed() -> int:
        return machine.generators[machine.current].initial_seed()

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return machine.generators[machine.index(device)].get_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        machine.generators[machine.index(device)].set_state(new_state)

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or "V100" not in machine.name

    return [value for name, value in locals().items() if name != "machine"]


def _tensors(machine: Machine, patch: Callable[[Any, str, Any], None]) -> None:
    """What tensors and storages say of their device, and the ways from one to another."""
    tensor_class, storage_class = torch.Tensor, torch.UntypedStorage
    real_to, real_numpy, real_tolist = tensor_class.to, tensor_class.numpy, tensor_class.tolist
    real_tensor, real_as_tensor, real_resize = torch.tensor, torch.as_tensor, storage_class.resize_
    real_groups = torch._C._group_tensors_by_device_and_dtype
    where = machine.where

    class Moved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, device: Any, dtype: Any, non_blocking: bool) -> torch.Tensor:
            ctx.to = where(tensor), tensor.dtype
            machine.own.moves = True
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    return torch.ops.aten._to_copy.default(
                        tensor, device=device, dtype=dtype, non_blocking=non_blocking
                    )
            finally:
                machine.own.moves = False

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient.to(*ctx.to), None, None, None

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = kwargs.pop("copy", False)
        other = args[0] if args and isinstance(args[0], torch.Tensor) else kwargs.pop("other", None)
        if other is not None:
            args, kwargs = (), {"device": other.device, "dtype": other.dtype, **kwargs}
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        here = self.device
        device = here if device is None else machine.device(device)
        if here == device or "meta" in (here.type, device.type):
            if device.type == "meta":
                return real_to(self, device, dtype=dtype or self.dtype)
            if here.type == "meta":
                return torch.empty_like(self, device=device, dtype=dtype or self.dtype)
            kwargs = {} if layout is None else {"memory_format": layout}
            return real_to(self, dtype=dtype or self.dtype, copy=copy, **kwargs)
        return Moved.apply(self, device, dtype or self.dtype, bool(non_blocking))

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
        return self.to(torch.device("cuda", machine.index(device)), non_blocking=non_blocking)

    def cpu(self: torch.Tensor, memory_format: Any = None) -> torch.Tensor:
        return self.to(_HOST)

    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if where(self).type == "cuda" and not force:
            raise TypeError(f"can't convert {where(self)} device type tensor to numpy. Use Tensor.cpu() first")
        machine.work([self], [], name="numpy", on_host=True)
        return real_numpy(self.cpu() if force else self)

    def tolist(self: torch.Tensor) -> Any:
        if where(self).type == "cuda":
            machine.waits("tolist")
        else:
            machine.work([self], [], name="tolist", on_host=True)
        return real_tolist(self)

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        if where(self).type != "cpu":
            raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
        return torch.empty(self.shape, dtype=self.dtype, pin_memory=True).copy_(self)

    def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
        held = machine.held(self)
        return held is not None and held.pinned

    def record_stream(self: torch.Tensor, stream: Stream) -> None:
        held = machine.held(self)
        assert held is not None
        assert held.device is not None
        held.recorded.add(stream.number)

    real_device = torch._C.TensorBase.device.__get__
    ordinary = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]

    def device_of(self: torch.Tensor) -> torch.device:
        kind = type(self)
        own = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
        if own not in ordinary and torch._C._is_torch_function_enabled():
            device = kind.__torch_function__(real_device, (kind,), (self,), {})  # a class that has its say in it
            if device.type != "cpu":
                return device
        return where(self)

    patch(tensor_class, "to", to)
    patch(tensor_class, "cuda", cuda)
    patch(tensor_class, "cpu", cpu)
    patch(tensor_class, "numpy", numpy)
    patch(tensor_class, "tolist", tolist)
    patch(tensor_class, "pin_memory", pin_memory)
    patch(tensor_class, "is_pinned", is_pinned)
    patch(tensor_class, "record_stream", record_stream)
    patch(tensor_class, "device", property(device_of))
    patch(tensor_class, "is_cuda", property(lambda self: self.device.type == "cuda"))
    patch(tensor_class, "is_cpu", property(lambda self: self.device.type == "cpu"))
    patch(tensor_class, "get_device", lambda self: -1 if self.device.type == "cpu" else self.device.index or 0)

    real_attention = torch.nn.functional.scaled_dot_product_attention

    def attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        machine.own.is_composed = where(query).type == "cuda"
        try:
            return real_attention(query, *args, **kwargs)
        finally:
            machine.own.is_composed = False

    patch(torch.nn.functional, "scaled_dot_product_attention", attention)

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        def make(data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
            result = function(data, dtype=dtype, **kwargs) if not isinstance(data, torch.Tensor) else data.to(
                dtype=dtype or data.dtype, copy=function is real_tensor
            )  # fmt: skip
            requires_grad = kwargs.get("requires_grad", False)
            if device is None or machine.device(device) == result.device:
                return result
            return result.detach().to(device).requires_grad_(requires_grad)

        return make

    patch(torch, "tensor", made(real_tensor))
    patch(torch, "as_tensor", made(real_as_tensor))

    def resize_(self: Any, size: int) -> Any:
        held = vars(self).get("held")
        if held is not None and size < self.nbytes():
            held.free()
        if held is not None and size > self.nbytes() and held.device is not None:
            held.owner = machine.streams[held.device.index]
        return real_resize(self, size)

    def clone(self: Any) -> Any:
        result, held = storage_class(self.nbytes()).copy_(self), vars(self).get("held")
        if held is not None and held.device is not None:
            result.held = type(held)(held.device, machine.streams[held.device.index], machine.found)
        return result

    def storage_device(self: Any) -> torch.device:
        held = vars(self).get("held")
        real = torch._C.StorageBase.device.__get__(self)
        return real if held is None or held.device is None else held.device

    patch(storage_class, "resize_", resize_)
    patch(storage_class, "clone", clone)
    patch(storage_class, "device", property(storage_device))

    def groups(lists: Any, with_indices: bool) -> Any:
        found = real_groups(lists, with_indices)
        result = {}
        for (device, dtype), value in found.items():
            first = next((one for column in value[0] for one in column if one is not None), None)
            result[device if first is None else first.device, dtype] = value
        return result

    patch(torch._C, "_group_tensors_by_device_and_dtype", groups)


def _autocast(machine: Machine, patch: Callable[[Any, str, Any], None]) -> None:
    """That of CUDA is torch's for the CPU, under which the values are; that of the CPU does nothing to them."""
    real = {
        name: getattr(torch, name)
        for name in ("set_autocast_enabled", "set_autocast_dtype", "is_autocast_enabled", "get_autocast_dtype")
    }

    def set_autocast_enabled(device_type: Any, enabled: bool | None = None) -> None:
        if enabled is None or device_type == "cuda":
            real["set_autocast_enabled"]("cpu", device_type if enabled is None else enabled)
        else:
            machine.autocast["enabled"] = enabled

    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        if device_type == "cuda":
            real["set_autocast_dtype"]("cpu", dtype)
        else:
            machine.autocast["dtype"] = dtype

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return real["is_autocast_enabled"]("cpu") if device_type == "cuda" else machine.autocast["enabled"]

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        return real["get_autocast_dtype"]("cpu") if device_type == "cuda" else machine.autocast["dtype"]

    for function in (set_autocast_enabled, set_autocast_dtype, is_autocast_enabled, get_autocast_dtype):
        patch(torch, function.__name__, function)
