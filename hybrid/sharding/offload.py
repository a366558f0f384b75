"""State in host memory: where it lies, and every copy between the host and the device.

    offload       on the host, of each bucket's own shard            between the two, per own shard
    "optimizer"   optimizer state, fp32 masters, reduced gradients   gradients ──► host      each reduction
                                                                     parameters ──► host     before the update
                                                                     parameters ──► device   after the update
    "parameters"  as well: the own shard of the parameters           gradients ──► host      each reduction
    (stage 3)                                                        parameters ──► device   each gather

The host reads parameters before an update because users may have edited them; where edits show by themselves (stage
3 with masters, "parameters") nothing is read. See docs/offload.md for the formulas.

On CUDA host memory is pinned, and copies run on two streams of their own, one for each direction. A copy begins after
what the device was given before it; `Ticket.order` lets later work of the device come after it, `Ticket.wait` the
host. Device memory is held until then, so that the allocator needs no `record_stream`. At most two copies of a kind
are under way. On any other device the same calls copy at once, from one memory to another; under the deferred test
backend what comes to the host is NaN until it has been waited for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch

from hybrid.collectives import ops
from hybrid.collectives.deferred import hide
from hybrid.errors import OptimizerError

__all__ = ["HostStore", "Kind", "OffloadKind", "Ticket", "check_host_update"]

OffloadKind = Literal["none", "optimizer", "parameters"]
Kind = Literal["gradients", "parameters", "masters", "optimizer_state"]

_MOST_UNDER_WAY = 2


class Ticket(Protocol):
    """A copy that was started."""

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once, for sure."""
        ...

    def order(self) -> None:
        """What the device is given from now on comes after the copy."""

    def wait(self) -> None:
        """Return when the copy is done."""


class _Done:
    is_done = True

    def order(self) -> None:
        pass

    def wait(self) -> None:
        pass


class _Late:
    """A copy to the host of which nothing is to be seen until somebody waits (deferred test backend)."""

    is_done = False

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target, self._source = target, source.clone()
        hide(target)

    def order(self) -> None:
        self.wait()

    def wait(self) -> None:
        if not self.is_done:
            self._target.copy_(self._source)
            self.is_done = True


class _Direct:
    """Copies of a device without streams: done when they return."""

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        if ops.get_interposer() is not None:
            return _Late(target, source)
        target.copy_(source)
        return _Done()

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        target.copy_(source)
        return _Done()

    def after_copies(self) -> AbstractContextManager[object]:
        return nullcontext()


class _OnStream:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    @property
    def is_done(self) -> bool:
        return False  # asking the event would make what follows depend on the moment

    def order(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        self._event.synchronize()


class _Streams:
    """Copies of a CUDA device: one stream to the host, one from it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        return self._copy(self._down, target, source)

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        return self._copy(self._up, target, source)

    def after_copies(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._up)

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return _OnStream(event, self._device)


class _Arrival:
    """A shard on its way to the host: what takes it there, and what the device holds until then."""

    def __init__(
        self, ticket: Ticket, staged: torch.Tensor, held: torch.Tensor, take: Callable[[torch.Tensor], None]
    ) -> None:
        self.ticket, self._staged, self._held, self._take = ticket, staged, held, take

    def finish(self) -> None:
        self.ticket.wait()
        ops.release(self._held)
        self._take(self._staged)


def check_host_update(optimizer: torch.optim.Optimizer) -> None:
    """Raises OptimizerError: options that tie an optimizer's step to the device, where the host is to make it."""
    name = type(optimizer).__name__
    for index, group in enumerate(optimizer.param_groups):
        if group.get("capturable"):
            raise OptimizerError(
                f"{name} has capturable = True (param group {index}), for a step inside a CUDA graph, and under "
                "sharding_configs.offload the host makes the step: leave one of them out"
            )
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                raise OptimizerError(
                    f"{name} has {key!r} as a tensor on {value.device} (param group {index}), and under "
                    f"sharding_configs.offload the host makes the step: give a number, or {key}.cpu()"
                )


class HostStore:
    """Host memory of one engine, and the counted way to and from it.

    Args:
        device: where the model computes.
        holds_parameters: whether own shards of parameters are kept here too ("parameters").
    """

    def __init__(self, device: torch.device, *, holds_parameters: bool) -> None:
        self.holds_parameters = holds_parameters
        self._is_cuda = device.type == "cuda"
        self._copies = _Streams(device) if self._is_cuda else _Direct()
        self._arrivals: deque[_Arrival] = deque()
        self._sent: deque[tuple[Ticket, torch.Tensor]] = deque()
        self._counts: Counter[str] = Counter()

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory, in which no value is set."""
        return torch.empty(num_elements, dtype=dtype, device="cpu", pin_memory=self._is_cuda)

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return self.empty(num_elements, dtype).zero_()

    # -- to the host -----------------------------------------------------------------------------------

    def to_host(self, target: torch.Tensor, source: torch.Tensor, kind: Kind) -> None:
        """Copy into host memory; returns when the values are there. `source` is counted in its own dtype."""
        if source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous():
            self.count(kind, source, to="host")
            self._copies.to_host(target, source).wait()
        else:
            target.copy_(self.fetch(source, kind))

    def fetch(self, source: torch.Tensor, kind: Kind) -> torch.Tensor:
        """A copy in host memory, of the same shape and dtype."""
        staged = self.empty(source.numel(), source.dtype)
        self.to_host(staged, source.reshape(-1), kind)
        return staged.view(source.shape)

    def start(
        self, source: torch.Tensor, kind: Kind, *, held: torch.Tensor, take: Callable[[torch.Tensor], None]
    ) -> None:
        """Begin to copy a flat `source` into new host memory, which `take` gets once it is there, in order of calls.

        `held` is device memory, `source` within it, that is given up then.
        """
        while len(self._arrivals) >= _MOST_UNDER_WAY:
            self._arrivals.popleft().finish()
        staged = self.empty(source.numel(), source.dtype)
        self.count(kind, source, to="host")
        self._arrivals.append(_Arrival(self._copies.to_host(staged, source), staged, held, take))
        if self._arrivals[-1].ticket.is_done:
            self.finish()

    def finish(self) -> None:
        """Wait for all that was started."""
        while self._arrivals:
            self._arrivals.popleft().finish()

    # -- to the device ---------------------------------------------------------------------------------

    def to_device(self, target: torch.Tensor, source: torch.Tensor, kind: Kind) -> None:
        """Copy from host memory, rounded there to the target's dtype; what the device is given later sees it."""
        if source.dtype != target.dtype:
            while len(self._sent) >= _MOST_UNDER_WAY:
                self._sent.popleft()[0].wait()
            rounded = self.empty(source.numel(), target.dtype)
            rounded.copy_(source)
            self.fill(target, rounded, kind).order()
            return
        self.fill(target, source, kind).order()

    def fill(self, target: torch.Tensor, source: torch.Tensor, kind: Kind) -> Ticket:
        """Begin to copy from host memory of the same dtype, which must stay as it is until then."""
        self.count(kind, source, to="device")
        ticket = self._copies.to_device(target, source)
        if not ticket.is_done:
            self._sent.append((ticket, source))
            while len(self._sent) > _MOST_UNDER_WAY:
                self._sent.popleft()[0].wait()
        return ticket

    def finish_sending(self) -> None:
        """Wait until host memory that was sent may be written again."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def after_copies(self) -> AbstractContextManager[object]:
        """What is launched inside comes after the copies to the device that were started, and not before."""
        return self._copies.after_copies()

    # -- counts ----------------------------------------------------------------------------------------

    def count(self, kind: Kind, tensor: torch.Tensor, *, to: Literal["host", "device"]) -> None:
        """A tensor that is copied. For copies that torch makes itself, of state that is adopted or shown whole."""
        self._counts[f"{kind} to {to}"] += tensor.numel() * tensor.element_size()

    def transferred_bytes(self) -> dict[str, int]:
        """ "gradients to host" -> bytes, since the engine was made; what was never sent is left out."""
        return {name: size for name, size in sorted(self._counts.items()) if size}
