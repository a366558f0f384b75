"""A stand-in for a device with memory of its own: on a CPU, host memory and "device" memory that may not meet.

Inside `two_memories()` every tensor that offload puts on the host is known, and so is whatever is computed from it. An
operation that takes tensors of both places raises, as it would on a GPU; so does a collective on the host's, which NCCL
could not send. Only the copies of `HostStore` go between the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid.sharding import offload

__all__ = ["two_memories"]


class _TwoMemories(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._on_host: dict[int, StorageWeakRef] = {}
        self._is_copying = False
        self.num_mixed_checks = 0

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        ref = StorageWeakRef(tensor.untyped_storage())
        self._on_host[ref.cdata] = ref
        return tensor

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        ref = self._on_host.get(tensor.untyped_storage()._cdata)
        return ref is not None and not ref.expired()

    @contextmanager
    def copying(self) -> Iterator[None]:
        self._is_copying = True
        try:
            yield
        finally:
            self._is_copying = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_copying:
            return func(*args, **kwargs)
        # A number may be anywhere, as on a GPU.
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim() and t.numel() > 1]
        tensors = [t for t in tensors if t.layout == torch.strided]
        places = {self.is_on_host(tensor) for tensor in tensors}
        self.num_mixed_checks += len(tensors) > 1 and True in places
        assert len(places) < 2, f"{func} takes tensors of host and device: {[tuple(t.shape) for t in tensors]}"
        assert True not in places or func.namespace != "c10d", f"{func} on memory of the host"
        result = func(*args, **kwargs)
        if True in places:
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self.put(tensor)
        return result


@contextmanager
def two_memories() -> Iterator[None]:
    """Inside, host and device are two memories. Models must be wrapped inside too."""
    mode = _TwoMemories()
    empty, direct = offload.HostStore.empty, offload._Direct
    to_host, to_device, late = direct.to_host, direct.to_device, offload._Late.wait

    def guarded(function: Any) -> Any:
        def call(*args: Any) -> Any:
            with mode.copying():
                return function(*args)

        return call

    offload.HostStore.empty = lambda *args: mode.put(empty(*args))  # type: ignore[method-assign]
    direct.to_host, direct.to_device = guarded(to_host), guarded(to_device)  # type: ignore[method-assign]
    offload._Late.wait = guarded(late)  # type: ignore[method-assign]
    try:
        with mode:
            yield
    finally:
        offload.HostStore.empty = empty  # type: ignore[method-assign]
        direct.to_host, direct.to_device = to_host, to_device  # type: ignore[method-assign]
        offload._Late.wait = late  # type: ignore[method-assign]
    assert mode.num_mixed_checks > 0, "nothing was computed on the host"
