"""Counts what a rank holds, and watches what it does in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType

import torch
from torch import nn

from hybrid.collectives.ranges import RangeKind
from hybrid.compose.runtime import Runtime
from hybrid.sharding.tensors import tensors_in

__all__ = ["StepWatch", "state_bytes"]


def state_bytes(model: nn.Module, runtime: Runtime) -> Mapping[str, int]:
    """Kind of state (`result.KINDS`) -> bytes that live now; kinds without any are left out."""
    engine = runtime.engine
    sizes: dict[str, int] = {}

    host = engine.host
    on_host = {"masters", "optimizer_state"} if host is not None else set()
    if host is not None and host.holds_parameters:
        on_host.add("parameter_shards")

    def add(kind: str, *tensors: torch.Tensor | None) -> None:
        kind = f"host_{kind}" if kind in on_host else kind
        for tensor in tensors:
            if tensor is not None:
                sizes[kind] = sizes.get(kind, 0) + tensor.untyped_storage().nbytes()

    inside: set[str] = set()
    for bucket in engine.all_buckets():
        inside.update(bucket.fqns)
        is_cut = bucket.partition.num_shards > 1
        add("parameters", bucket.data)
        add("parameter_shards", bucket.cut)
        add("masters", bucket.master)
        add("gradients", bucket.local)
        kind = "gradient_shards" if is_cut else "gradients"
        add(kind, bucket.raw, bucket.settled)
        if moved := bucket.host_bytes()[1]:
            sizes[kind] -= moved
            sizes["host_gradient_shards"] = sizes.get("host_gradient_shards", 0) + moved
    add("parameters", *(parameter for fqn, parameter in engine.parameters.items() if fqn not in inside))
    # One element stands for each gradient (`GradientHandle`).
    sizes["bookkeeping"] = sizes.get("bookkeeping", 0) + sum(
        len(bucket.fqns) * bucket.key.dtype.itemsize for bucket in engine.buckets
    )
    for shards in runtime.optimizers():
        held = [shards.optimizer.state.get(shard.tensor) for shard in shards.shards() if shard.tensor is not None]
        for tensor in tensors_in(held, all_of_them=True):
            add("bookkeeping" if tensor.dim() == 0 else "optimizer_state", tensor)
    add("buffers", *{id(buffer): buffer for buffer in model.buffers()}.values())
    return MappingProxyType({kind: size for kind, size in sizes.items() if size})


class StepWatch:
    """Listens to the named ranges of one step (`collectives/ranges.py`).

    Attributes:
        actions: names of ranges, in the order in which they began; what follows directly on its like is counted.
        between: bytes behind the backward that left most gradients.
        most_gathered: stage 3: the most bytes of whole parameters at a time.
    """

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        self.actions: list[str] = []
        self.between: Mapping[str, int] | None = None
        self._most_gradients = -1
        self._model = model
        self._runtime = runtime
        if runtime.engine.unsharder is not None:
            runtime.engine.unsharder.gathered.forget_most()

    @property
    def most_gathered(self) -> int:
        unsharder = self._runtime.engine.unsharder
        return 0 if unsharder is None else unsharder.gathered.most_bytes

    def range(self, name: str, kind: RangeKind, axis: str, op: str) -> AbstractContextManager[object]:
        """For `collectives.ranges`."""
        return self._range(name, kind)

    @contextmanager
    def _range(self, name: str, kind: RangeKind) -> Iterator[None]:
        is_own = kind is not RangeKind.COMMUNICATION and not name.startswith("end of ")
        if is_own:
            self.actions.append(name)
        yield
        if kind is RangeKind.BACKWARD and (size := self._gradient_bytes()) > self._most_gradients:
            self._most_gradients, self.between = size, state_bytes(self._model, self._runtime)

    def _gradient_bytes(self) -> int:
        """On the device."""
        engine = self._runtime.engine
        return engine.gradient_bytes() - engine.host_bytes()[1]
