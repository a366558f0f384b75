"""What a training holds and sends: live tensor bytes, heap peak, resident peak, bytes sent."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["ResidentPeak", "facts", "heap_peak", "live_tensor_bytes", "sent_bytes", "socket_sent_bytes"]

_WARM_UP = 3
# Of Linux' struct tcp_info: bytes sent and bytes sent again.
_SENT_OFFSET, _RESENT_OFFSET = 200, 208


class ResidentPeak:
    """The most resident memory of this process since this object was made."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
        self._start_bytes = _status_bytes("VmRSS")

    def bytes_above_start(self) -> int:
        return _status_bytes("VmHWM") - self._start_bytes


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def socket_sent_bytes() -> int:
    """Bytes that this process has sent through the TCP connections that are open now, whoever opened them."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                continue
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(info) >= _RESENT_OFFSET + 8:
                total += _number(info, _SENT_OFFSET) - _number(info, _RESENT_OFFSET)
    return total


def sent_bytes() -> int:
    """The same, and what other processes have been given in shared memory."""
    from hybrid.collectives.shared_memory import arena

    return socket_sent_bytes() + arena().sent_bytes


def _number(info: bytes, offset: int) -> int:
    value: int = struct.unpack_from("<Q", info, offset)[0]
    return value


def live_tensor_bytes() -> int:
    """Bytes of the storages of all tensors that Python can reach, each storage once."""
    import torch

    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    # What stands for a gradient lets nobody look at its memory.
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        # On the meta device there is nothing; FSDP1 keeps a storage of which it has taken the memory away.
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local if t.device.type == "cpu"
        }
    return sum(storages.values())


def facts(training: Any, *, steps: int) -> dict[str, Any]:
    """Losses of all steps, and what is held and sent in the last two. *Collective.*"""
    import torch.distributed as dist

    assert steps > _WARM_UP + 2
    losses = [training.step(number) for number in range(steps - 2)]
    dist.barrier()
    before = sent_bytes()
    losses.append(training.step(steps - 2))
    sent = sent_bytes() - before
    dist.barrier()
    losses.append(training.backward(steps - 1))
    after_backward = live_tensor_bytes()
    training.update()
    return {
        "losses": losses,
        "sent_bytes": sent,
        "live_after_backward_bytes": after_backward,
        "live_after_step_bytes": live_tensor_bytes(),
    }


def heap_peak(build: Callable[[], Any]) -> int:
    """Most bytes alive within a step, of all that torch's allocator gave out since before `build`. Once a process."""
    from benchmarks.pipeline_memory import peak_of_last_step

    training: Any = None

    def prepare() -> None:
        nonlocal training
        training = build()
        for number in range(_WARM_UP):
            training.step(number)

    return peak_of_last_step(prepare, lambda: training.step(_WARM_UP))
