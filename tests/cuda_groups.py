"""NCCL's process groups on the stand-in of `cuda_devices`: gloo's, with NCCL's rules.

Tensors must lie on the current GPU and be dense. A collective runs on a stream of its group, after what the current
stream was given before it; `wait` makes the current stream wait, not the host. Tags are not looked at: what two ranks
send each other over one group goes in the order of launches, both ways through one stream. Every launch is written
down; `order_problems` compares the ranks' lists.
"""

from __future__ import annotations

import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from tests.cuda_streams import Stream

if TYPE_CHECKING:
    from tests.cuda_devices import Machine

__all__ = ["install", "order_problems"]

# Of `ProcessGroupNCCL`: bool goes as uint8; no complex numbers, no 16 bits without a sign or with one.
_DTYPES = {
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
Launch = tuple[str, str, int, str]
"""Communicator, operation, elements, dtype."""


class Groups:
    """What this process launched on NCCL."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.on_nccl: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self.on_gloo: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self.streams: dict[str, Stream] = {}
        self.launches: list[Launch] = []
        self.num_made: dict[tuple[int, ...], int] = defaultdict(int)
        self.names: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()

    def is_nccl(self, group: Any) -> bool:
        return group is None or group not in self.on_gloo

    def name(self, group: Any) -> str:
        group = dist.group.WORLD if group is None else group
        return self.names.get(group, "world")

    def stream(self, communicator: str) -> Stream:
        if communicator not in self.streams:
            name = f"NCCL's stream of {communicator}"
            self.streams[communicator] = Stream(index=self.machine.current, name=name)
            self.machine.all_streams.append(self.streams[communicator])
        return self.streams[communicator]


class Work:
    """As NCCL's: `wait` is for the current stream, and for the host too if it is given a time."""

    def __init__(self, real: Any, groups: Groups, stream: Stream, held: list[torch.Tensor]) -> None:
        self._real, self._groups, self._held = real, groups, held
        self._stream, self._at = stream, stream.clock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        machine = self._groups.machine
        # The message is here only now: what the current stream does next sees it, as on a GPU.
        with _disable_current_modes():  # gloo's own copies
            self._real.wait() if timeout is None else self._real.wait(timeout)
        machine.stream().join(self._at)
        if timeout is not None:
            machine.waits("Work.wait(timeout) of NCCL")
        self._held.clear()
        return True

    def is_completed(self) -> bool:
        return bool(self._real.is_completed())

    def __del__(self) -> None:
        self._held.clear()


def install(machine: Machine, stack: ExitStack) -> None:
    groups = machine.groups = Groups(machine)  # type: ignore[attr-defined]

    def patch(name: str, value: Any) -> None:
        for module in (dist, distributed_c10d):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, value))

    real_group, real_backend, real_init = dist.new_group, dist.get_backend, dist.init_process_group
    real_device = distributed_c10d._get_object_coll_device

    def new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, **kwargs: Any) -> Any:
        group = real_group(ranks, timeout=timeout, backend="gloo", **kwargs)
        if isinstance(group, dist.ProcessGroup):
            (groups.on_gloo if backend == "gloo" else groups.on_nccl).add(group)
            key = tuple(ranks) if ranks is not None else ()
            groups.num_made[key] += 1
            groups.names[group] = f"{'gloo' if backend == 'gloo' else 'nccl'} {key} number {groups.num_made[key]}"
        return group

    def get_backend(group: Any = None) -> str:
        return "nccl" if groups.is_nccl(group) else real_backend(group)

    def init_process_group(backend: str | None = None, **kwargs: Any) -> None:
        assert backend == "nccl", backend
        kwargs.pop("device_id", None)
        real_init("gloo", **kwargs)

    def coll_device(group: Any = None) -> str:
        return f"cuda:{machine.current}" if groups.is_nccl(group) else real_device(group)

    patch("new_group", new_group)
    patch("get_backend", get_backend)
    patch("init_process_group", init_process_group)
    patch("_get_object_coll_device", coll_device)
    for name, (reads, writes) in _ARGUMENTS.items():
        if hasattr(dist, name):
            patch(name, _checked(name, getattr(dist, name), groups, reads, writes))

    def monitored_barrier(*args: Any, **kwargs: Any) -> None:
        raise ValueError("monitored_barrier is only implemented for GLOO backend.")

    patch("monitored_barrier", monitored_barrier)
    stack.enter_context(mock.patch("torch.cuda.nccl.version", return_value=(2, 27, 5)))


# Function -> the places of what it reads and what it writes.
_ARGUMENTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "all_reduce": ((), ("tensor",)),
    "broadcast": ((), ("tensor",)),
    "reduce": ((), ("tensor",)),
    "all_gather": (("tensor",), ("tensor_list",)),
    "all_gather_single": (("input_tensor",), ("output_tensor",)),
    "all_gather_into_tensor": (("input_tensor",), ("output_tensor",)),
    "reduce_scatter_single": (("input",), ("output",)),
    "reduce_scatter_tensor": (("input",), ("output",)),
    "all_to_all_single": (("input",), ("output",)),
    "isend": (("tensor",), ()),
    "irecv": ((), ("tensor",)),
    "send": (("tensor",), ()),
    "recv": ((), ("tensor",)),
}


def _checked(
    name: str, real: Callable[..., Any], groups: Groups, reads: tuple[str, ...], writes: tuple[str, ...]
) -> Callable[..., Any]:
    signature = inspect.signature(real)

    def launch(*args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*args, **kwargs).arguments
        group = asked.get("group")
        machine = groups.machine
        given = [_listed(asked[one]) for one in (*reads, *writes)]
        tensors = [tensor for listed in given for tensor in listed]
        if not groups.is_nccl(group):
            if any(machine.where(tensor).type == "cuda" for tensor in tensors):
                raise RuntimeError(f"{name} of a tensor of a GPU over a group of gloo's")
            for tensor in tensors:
                machine.work([tensor], [], name=name, on_host=True)
            return real(*args, **kwargs)
        own = torch.device("cuda", machine.current)
        for tensor in tensors:
            where = machine.where(tensor)
            if where.type == "cpu":
                raise RuntimeError("No backend type associated with device type cpu")
            assert where == own, f"{name}: a tensor of {where}, and the current device is {own}"
            assert tensor.is_contiguous(), f"{name}: Tensors must be contiguous"
            if tensor.dtype not in _DTYPES:
                raise TypeError(f"{name}: Unconvertible NCCL type {tensor.dtype}")
        if asked.get("op") == dist.ReduceOp.AVG:
            raise NotImplementedError("gloo has no average")
        communicator = _communicator(name, asked, groups)
        stream = groups.stream(communicator)
        stream.join(machine.stream().clock())
        read = [one for key in reads for one in _listed(asked[key])]
        written = [one for key in writes for one in _listed(asked[key])]
        machine.work(read, written, name=name, stream=stream)
        numel = sum(tensor.numel() for tensor in given[-1])
        groups.launches.append((communicator, name, numel, str(tensors[0].dtype)))
        if name in ("send", "recv"):
            raise NotImplementedError(name)
        is_message = name in ("isend", "irecv")
        with _disable_current_modes():
            started = real(**(asked | ({"tag": 0} if is_message else {"async_op": True})))
        work = Work(started, groups, stream, tensors)
        if is_message:
            return work
        if asked.get("async_op"):
            return work
        work.wait()
        return None

    return launch


def _listed(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _communicator(name: str, asked: Mapping[str, Any], groups: Groups) -> str:
    """Two ranks that send to each other have one of their own in each group, for both ways."""
    group = asked.get("group")
    if name not in ("isend", "irecv"):
        return groups.name(group)
    peer = asked.get("group_dst", asked.get("group_src"))
    if peer is None:
        peer = dist.get_group_rank(group or dist.group.WORLD, asked.get("dst", asked.get("src")))
    pair = sorted((dist.get_rank(group), peer))
    return f"{groups.name(group)}, pair {pair[0]} {pair[1]}"


def order_problems(launches: Sequence[Sequence[Launch]]) -> list[str]:
    """What NCCL would hang in, or mix up, of what each rank launched, by rank."""
    by_communicator: dict[str, list[tuple[int, list[Launch]]]] = defaultdict(list)
    for rank, own in enumerate(launches):
        lists: dict[str, list[Launch]] = defaultdict(list)
        for launch in own:
            lists[launch[0]].append(launch)
        for communicator, found in lists.items():
            by_communicator[communicator].append((rank, found))
    problems = []
    for communicator, lists_of_ranks in by_communicator.items():
        _, first = lists_of_ranks[0]
        for rank, other in lists_of_ranks[1:]:
            for place, (a, b) in enumerate(zip(first, other, strict=False)):
                if a != _mirrored(b):
                    problems.append(f"{communicator}: launch {place} is {a[1:]}, and {b[1:]} on rank {rank}")
                    break
            if len(first) != len(other):
                problems.append(f"{communicator}: {len(first)} launches, and {len(other)} on rank {rank}")
    return problems


def _mirrored(launch: Launch) -> Launch:
    other = {"isend": "irecv", "irecv": "isend"}.get(launch[1], launch[1])
    return (launch[0], other, *launch[2:])
