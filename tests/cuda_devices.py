"""A stand-in for CUDA on which the whole engine runs: values on the CPU, each with the GPU that it would be on.

    with cuda_devices(num_devices=4) as machine:
        ...                                      # torch.cuda is there; the default group is NCCL's
    assert machine.problems() == []

Storages carry a mark (`Held`): `tensor.device` and its like answer by it, in every thread. An operation on tensors of
two devices fails as on CUDA, a collective on NCCL with a tensor of the host as on NCCL (`cuda_groups`). Memory that is
used by two streams without a wait in between, or goes back to the allocator too early, is a fault (`cuda_streams`).
Random numbers come from a generator for each device, whose state is a seed and an offset. Backwards run in a thread of
their own, as the engine does for a GPU. What is not seen: kernels that give other values, and how long anything takes.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import hybrid.materialize.writing  # noqa: F401 (tables of torch's methods, made before they are replaced)
import hybrid.tensor.logits_values  # noqa: F401
from hybrid.collectives.autograd import IMPLEMENTATIONS
from tests import cuda_functions
from tests.cuda_streams import HOST, Held, Race, Stream, range_of

__all__ = ["Machine", "cuda_devices"]

aten = torch.ops.aten
_HOST = torch.device("cpu")
# They make a tensor and write nothing into it.
_EMPTY = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
# A tensor of the host is taken by these beside those of a GPU.
_TAKES_BOTH = {"aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "aten::_index_put_impl_"}
_TAKES_BOTH |= {"aten::index_put", "aten::set_", "aten::detach", "aten::alias", "aten::record_stream"}
_WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2"}
_device_of = torch._C.TensorBase.device.__get__
_ORDINARY = torch.Tensor.__torch_dispatch__
_layout_of = torch._C.TensorBase.layout.__get__
_storage_of = torch._C.TensorBase.untyped_storage


class _OfThread(threading.local):
    """What each thread has of its own: a new one begins with the first device and the compute streams."""

    def __init__(self, compute: list[Stream]) -> None:
        self.device, self.streams = 0, list(compute)
        self.moves = False
        """Whether a tensor is being copied to another device."""
        self.is_composed = False
        """Whether an operation runs that is made of others and makes tensors where its own are."""


class Machine(TorchDispatchMode):
    """The devices of this process, and what was asked of them."""

    def __init__(self, num_devices: int, *, name: str) -> None:
        super().__init__()
        self.name, self.num_devices = name, num_devices
        self.compute = [Stream(index=index, name=f"the compute stream of cuda:{index}") for index in range(num_devices)]
        self.own = _OfThread(self.compute)
        self.all_streams = list(self.compute)
        self.generators = tuple(cuda_functions.Generator(f"cuda:{index}") for index in range(num_devices))
        self.found: list[str] = []
        self.host_waits: Counter[str] = Counter()
        self.autocast: dict[str, Any] = {"enabled": False, "dtype": torch.bfloat16}

    @property
    def current(self) -> int:
        return self.own.device

    @property
    def streams(self) -> list[Stream]:
        return self.own.streams

    def problems(self) -> list[str]:
        """What was seen where nobody could raise."""
        return list(dict.fromkeys(self.found))

    def index(self, device: Any = None) -> int:
        """As torch reads a device: a number, or the current one."""
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        index = self.current if index is None else index
        if not 0 <= index < self.num_devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return index

    def device(self, device: Any) -> torch.device:
        device = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
        return torch.device("cuda", self.index(device)) if device.type == "cuda" else device

    def stream(self) -> Stream:
        return self.streams[self.current]

    def held(self, tensor: torch.Tensor) -> Held | None:
        with torch._C.DisableTorchFunctionSubclass():
            return vars(_storage_of(tensor)).get("held")

    def where(self, tensor: torch.Tensor) -> torch.device:
        with torch._C.DisableTorchFunctionSubclass():
            device = _device_of(tensor)
            if device.type != "cpu" or _layout_of(tensor) != torch.strided:
                return device
        held = self.held(tensor)
        return _HOST if held is None or held.device is None else held.device

    def mark(self, tensor: torch.Tensor, device: torch.device | None, *, pinned: bool = False) -> Held:
        """Say where the storage of a new tensor lies."""
        with torch._C.DisableTorchFunctionSubclass():
            storage = _storage_of(tensor)
            held = vars(storage).get("held")
            if held is None:
                owner = None if device is None else self.streams[device.index]
                held = Held(device, owner, self.found, pinned=pinned, num_bytes=storage.nbytes())
                storage.held = held  # type: ignore[attr-defined]
        return held

    def waits(self, why: str) -> None:
        """The host waits for the current stream."""
        self.host_waits[_named(why)] += 1
        self.stream().synchronize()

    # -- operations ------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        if func in IMPLEMENTATIONS:
            with self:
                return IMPLEMENTATIONS[func](*args, **kwargs)
        given = list(_tensors((*args, *kwargs.values())))
        if any(_device_of(one).type != "cpu" or type(one).__torch_dispatch__ is not _ORDINARY for one in given):
            return func(*args, **kwargs)
        if name.startswith("c10d::"):
            return func(*args, **kwargs)  # looked at by cuda_groups
        if name == "aten::_to_copy" and not self.own.moves:
            kwargs.pop("device", None)  # C++ says where the values are; who asks for another device comes by `to`
        elif "device" in kwargs and (self.own.is_composed or _asked_by() == "_engine_run_backward"):
            kwargs["device"] = None if given else torch.device("cuda", self.current)  # likewise, from a formula
        places = [self.where(one) for one in given]
        device = self._device_of_result(name, func, given, places, kwargs)
        pinned = bool(kwargs.pop("pin_memory", False))
        if kwargs.get("device") is not None:
            if torch.device(kwargs["device"]).type == "meta":
                return func(*args, **kwargs)
            kwargs["device"] = _HOST
        before = {_key(one) for one in given}
        if torch.Tag.nondeterministic_seeded in func.tags:
            result = self._drawn(func, args, kwargs, device)
        else:
            result = func(*args, **kwargs)
        made = [one for one in _tensors((result,)) if _device_of(one).type == "cpu"]
        for one in made:
            if device.type == "cuda" and _key(one) not in before:
                self.mark(one, device)
            elif pinned:
                self.mark(one, None, pinned=True)
        if not func.is_view and name not in ("aten::detach", "aten::set_", "aten::alias"):
            self._note(name, func, args, kwargs, given, [] if name in _EMPTY else made)
        if name in _WAITS and any(place.type == "cuda" for place in places):
            self.waits(name)
        return result

    def _device_of_result(
        self, name: str, func: Any, given: list[torch.Tensor], places: list[torch.device], kwargs: dict[str, Any]
    ) -> torch.device:
        """As torch finds it, or refuses."""
        if kwargs.get("device") is not None:
            return self.device(kwargs["device"])
        on_gpu = [place for place in places if place.type == "cuda"]
        if not on_gpu:
            return _HOST
        if len(set(on_gpu)) > 1 and name not in _TAKES_BOTH:
            raise RuntimeError(f"Expected all tensors to be on the same device, but got {set(on_gpu)} ({name})")
        if name in _TAKES_BOTH:
            if places[0].type == "cpu" and name.startswith(("aten::index", "aten::_index")):
                raise RuntimeError(f"indices should be either on cpu or on the same device ({name})")
            return places[0]
        if "_foreach" in name or "_fused" in name:
            steps = name.startswith("aten::_fused")
            large = [one for one, place in zip(given, places, strict=True) if place.type == "cpu" and one.dim()]
            if large or (steps and any(place.type == "cpu" for place in places)):
                raise RuntimeError(f"Expected all tensors to be on the same device ({name})")
            return on_gpu[0]
        alone = torch.Tag.pointwise in func.tags or name in ("aten::fill_", "aten::where", "aten::masked_fill_")
        for one, place in zip(given, places, strict=True):
            if place.type == "cpu" and (one.dim() or not alone or (one is given[0] and name.endswith("_"))):
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{on_gpu[0]} and cpu! ({name}, a tensor of shape {tuple(one.shape)})"
                )
        return on_gpu[0]

    def _note(
        self, name: str, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], made: list[torch.Tensor]
    ) -> None:
        """Who uses which memory, and how."""
        written = {_key(one): one for one in made}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written |= {_key(one): one for one in _tensors((value,))}
        for argument in func._schema.arguments:
            if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
                written |= {_key(one): one for one in _tensors((kwargs[argument.name],))}
        everything = [*given, *(one for one in made if not any(one is other for other in given))]
        on_gpu = any(self.where(one).type == "cuda" for one in everything)
        if not on_gpu and all(self.held(one) is None for one in everything):
            return
        self.work(
            [one for one in given if name not in _EMPTY and not any(one is other for other in written.values())],
            list(written.values()), name=name, on_host=not on_gpu,
        )  # fmt: skip
        if on_gpu and name in ("aten::copy_", "aten::_to_copy"):
            self._end_copy(args, kwargs, everything)

    def _end_copy(self, args: Any, kwargs: Any, everything: list[torch.Tensor]) -> None:
        """A copy between the host and a device keeps the host, unless its memory is pinned and it was asked not to."""
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        for one in everything:
            if self.where(one).type == "cpu":
                held = self.held(one)
                if not non_blocking:
                    self.waits("a copy between the host and a device")
                elif held is None or not held.pinned:
                    self.stream().synchronize()  # it goes through pinned memory of the driver's, or keeps the host

    def work(
        self, reads: list[torch.Tensor], writes: list[torch.Tensor], *, name: str, on_host: bool = False,
        stream: Stream | None = None,
    ) -> None:  # fmt: skip
        """A piece of work of a stream, or of the host."""
        worker = HOST if on_host else stream or self.stream()
        if isinstance(worker, Stream):
            worker.begin()
        for tensors, does_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                held = self.held(tensor)
                if held is None and not on_host and self.where(tensor).type == "cpu":
                    held = self.mark(tensor, None)
                if held is not None:
                    held.use(worker, range_of(tensor), writes=does_write, what=_named(name))

    def _drawn(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """With the generator of the device."""
        asked = kwargs.get("generator")
        if asked is not None and asked.device.type != device.type:
            raise RuntimeError(f"Expected a '{device.type}' device type for generator but found '{asked.device.type}'")
        if device.type == "cpu":
            return func(*args, **kwargs)
        generator = self.generators[device.index] if asked is None else asked
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(generator.next_seed())
        try:
            return func(*args, **(kwargs | ({"generator": None} if "generator" in kwargs else {})))
        finally:
            torch.default_generator.set_state(state)


def _asked_by() -> str:
    """The function that called the operation; a formula of autograd is called by the engine."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(("eval_frame.py", "_compile.py")):
        frame = frame.f_back
    return frame.f_code.co_name


def _named(name: str) -> str:
    """The operation and the line of the library that asked for it."""
    for frame in reversed(traceback.extract_stack(limit=40)):
        if "/hybrid/" in frame.filename:
            return f"{name} ({frame.filename.rpartition('/hybrid/')[2]}:{frame.lineno})"
    return name


def _key(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return int(_storage_of(tensor)._cdata)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@contextmanager
def cuda_devices(
    num_devices: int = 4, *, name: str = "NVIDIA H100 80GB HBM3", in_threads: bool = True
) -> Iterator[Machine]:
    """Inside, this process has GPUs.

    Args:
        in_threads: whether backwards run in another thread than their caller, as they do for tensors of a GPU.
    """
    from tests import cuda_groups

    machine = Machine(num_devices, name=name)
    with ExitStack() as stack:
        cuda_functions.install(machine, stack)
        cuda_groups.install(machine, stack)
        if in_threads:
            stack.enter_context(mock.patch("torch.autograd._engine_run_backward", _in_a_thread(machine)))
        real_run = threading.Thread.run

        def run_on_machine(self: threading.Thread) -> None:
            with machine:
                real_run(self)

        stack.enter_context(mock.patch.object(threading.Thread, "run", run_on_machine))
        stack.enter_context(machine)
        yield machine


def _in_a_thread(machine: Machine) -> Callable[..., Any]:
    real = torch.autograd._engine_run_backward
    running = threading.local()

    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(running, "inside", False):
            return real(outputs, *args, **kwargs)
        modes = _get_current_dispatch_mode_stack()
        cast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        outcome: list[Any] = []
        device, streams = machine.current, machine.streams

        def work() -> None:
            running.inside = True
            machine.own.device, machine.own.streams = device, list(streams)
            torch.set_autocast_enabled("cuda", cast[0])
            torch.set_autocast_dtype("cuda", cast[1])
            try:
                with ExitStack() as stack:
                    for mode in modes:
                        if mode is not machine:
                            stack.enter_context(mode)
                    outcome.append(real(outputs, *args, **kwargs))
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=work, name="autograd of a device")
        thread.start()
        thread.join()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    return run


assert Race is not None
