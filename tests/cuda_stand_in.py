"""A process that takes its CPU for GPUs: what runs on CUDA alone can be run where there is none.

Inside of `cuda_stand_in` torch says that CUDA is there. Functions of `torch.cuda` take the arguments of torch's
documentation and nothing else, and answer as two devices of 80 GB would; a tensor asked for on `cuda:0` or `cuda:1` is
made on the CPU; groups that say NCCL are gloo's. So lines behind `device.type == "cuda"` run with real values, in their
real order, against the signatures of the real functions; how long a GPU takes, and what it does behind the host's
back, is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["MEMORY_BYTES", "Calls", "cuda_stand_in"]

NUM_DEVICES = 2
MEMORY_BYTES = 80 * 10**9


@dataclass
class Calls:
    """What was asked of `torch.cuda`, and of how many groups on NCCL."""

    names: list[str] = field(default_factory=list)
    current: int = 0
    num_nccl_groups: int = 0


class _OnTheCpu(TorchDispatchMode):
    """Operations that are asked for a tensor on `cuda` make it on the CPU; in a backward's hooks, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(_moved, args), **{name: _moved(value) for name, value in (kwargs or {}).items()})


class _BuiltOnTheCpu(TorchFunctionMode):
    """`torch.tensor` copies numbers to its device where no dispatch mode sees it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor:
            kwargs = {
                name: _moved(torch.device(value) if name == "device" else value) for name, value in kwargs.items()
            }
        return func(*args, **kwargs)


def _moved(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


@contextmanager
def cuda_stand_in(name: str = "NVIDIA H100 80GB HBM3", *, backend: str = "nccl") -> Iterator[Calls]:
    """Inside, this process has GPUs of this name.

    Args:
        name: as the driver gives it.
        backend: what `dist` says of the default group.
    """
    calls = Calls()

    def number(device: torch.device | int | str | None) -> int:
        """As torch reads a device: a number of its own, or the current one."""
        if device is None:
            return calls.current
        index = device if isinstance(device, int) else torch.device(device).index
        index = calls.current if index is None else index
        assert 0 <= index < NUM_DEVICES, f"invalid device ordinal {index}"
        return index

    def asked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.names.append(function.__name__)
            return function(*args, **kwargs)

        return call

    def set_device(device: torch.device | int | str) -> None:
        calls.current = number(device)

    def current_device() -> int:
        return calls.current

    def synchronize(device: torch.device | int | str | None = None) -> None:
        number(device)

    def get_device_name(device: torch.device | int | str | None = None) -> str:
        number(device)
        return name

    def get_device_properties(device: torch.device | int | str | None = None) -> Any:
        return SimpleNamespace(name=name, total_memory=MEMORY_BYTES, major=9, minor=0, index=number(device))

    def mem_get_info(device: torch.device | int | str | None = None) -> tuple[int, int]:
        number(device)
        return MEMORY_BYTES - 3 * 10**9, MEMORY_BYTES

    def memory_reserved(device: torch.device | int | str | None = None) -> int:
        number(device)
        return 2 * 10**9

    def max_memory_reserved(device: torch.device | int | str | None = None) -> int:
        number(device)
        return 4 * 10**9

    def max_memory_allocated(device: torch.device | int | str | None = None) -> int:
        number(device)
        return 10**9

    def empty_cache() -> None: ...

    def manual_seed(seed: int) -> None: ...

    def initial_seed() -> int:
        return 7

    def get_rng_state(device: torch.device | int | str = "cuda") -> torch.Tensor:
        number(device)
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(new_state: torch.Tensor, device: torch.device | int | str = "cuda") -> None:
        number(device)

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or "V100" not in name

    real_group, real_backend = dist.new_group, dist.get_backend

    def new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        calls.num_nccl_groups += backend == "nccl"
        return real_group(*args, backend="gloo" if backend == "nccl" else backend, **kwargs)

    def get_backend(group: Any = None) -> str:
        return backend if group is None else real_backend(group)

    functions = (
        *(set_device, current_device, synchronize, get_device_name, get_device_properties, mem_get_info),
        *(memory_reserved, max_memory_reserved, max_memory_allocated, empty_cache, manual_seed, initial_seed),
        *(get_rng_state, set_rng_state, is_bf16_supported),
    )
    with ExitStack() as stack:
        for function in functions:
            stack.enter_context(mock.patch.object(torch.cuda, function.__name__, asked(function)))
        for known, answer in (("is_available", True), ("device_count", NUM_DEVICES), ("is_initialized", True)):
            stack.enter_context(mock.patch.object(torch.cuda, known, lambda answer=answer: answer))
        stack.enter_context(mock.patch.object(torch.cuda, "_lazy_init", return_value=None))  # the first use starts CUDA
        stack.enter_context(mock.patch.object(torch.random, "fork_rng", _fork_rng(torch.random.fork_rng)))
        stack.enter_context(mock.patch.object(dist, "new_group", new_group))
        stack.enter_context(mock.patch.object(dist, "get_backend", get_backend))
        stack.enter_context(_OnTheCpu())
        stack.enter_context(_BuiltOnTheCpu())
        yield calls


def _fork_rng(real: Callable[..., Any]) -> Callable[..., Any]:
    """The CPU's generator alone: the stand-in's devices have none."""

    def fork_rng(devices: Any = None, enabled: bool = True, device_type: str = "cuda") -> Any:
        assert devices is not None, "without devices torch saves the generators of all GPUs"
        return real(devices=[], enabled=enabled)

    return fork_rng
