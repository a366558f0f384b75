"""A test backend on which asynchronous collectives are as late as they may be.

Gloo hides mistakes that NCCL punishes: its messages often arrive before `wait`, and a buffer read too early
mostly holds the right numbers. Here a launch takes a copy of the buffer and fills the buffer itself with NaN
(integers: with a marker). Nothing is sent until some `wait`, which first carries out what was launched before,
in launch order, on the copies; a result reaches its buffer only in its own `wait`. So

    a missing wait                       NaN in every result that follows
    a read before wait                   NaN
    a write before wait                  CollectiveError, naming the call and the first element
    a read of what reduce_scatter        NaN: only the own range is written
    leaves undefined
    a read after release                 NaN
    a wrong order of launches            as on the real backend: an error on both ranks

A message from one rank to another is not sent before its sender waits for something, and until the peer has it its
buffer must be what it was at the launch, to the byte: a write to it or its release before is a CollectiveError.

Every rank of a world must use it, as the moment at which a call is carried out differs from the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from hybrid.collectives import ops
from hybrid.collectives.call import Call
from hybrid.errors import CollectiveError

__all__ = ["deferred_backend", "disable", "enable", "is_enabled"]

_INTEGER_MARKER = 77


def enable() -> None:
    """From now on, all collectives of this process are deferred."""
    ops.set_interposer(_Deferred())


def disable() -> None:
    """Back to the real backend. Calls in flight stay deferred and can still be waited for."""
    ops.set_interposer(None)


def is_enabled() -> bool:
    return isinstance(ops.get_interposer(), _Deferred)


@contextmanager
def deferred_backend() -> Iterator[None]:
    """Defer the collectives launched inside the block."""
    enable()
    try:
        yield
    finally:
        disable()


class _Deferred:
    """The calls that were launched and not yet carried out, in launch order."""

    def __init__(self) -> None:
        self._queue: list[_DeferredCall] = []
        self._messages: list[_DeferredMessage] = []

    def start(self, call: Call) -> _DeferredCall:
        deferred = _DeferredCall(call, self)
        self._queue.append(deferred)
        return deferred

    def send(self, call: Call, start: Callable[[], ops.Sending]) -> _DeferredMessage:
        message = _DeferredMessage(call, start, self)
        self._messages.append(message)
        return message

    def before_waiting(self) -> None:
        """Who waits may wait for an answer to what has not been sent yet."""
        while self._messages:
            self._messages.pop(0).carry_out()

    def release(self, buffer: torch.Tensor) -> None:
        hide(buffer.detach().view(-1))

    def carry_out_until(self, last: _DeferredCall) -> None:
        """Carry out everything up to `last`; each call leaves the queue before it can fail."""
        self.before_waiting()
        while last in self._queue:
            self._queue.pop(0).carry_out()


class _DeferredCall:
    """One call whose input is a private copy until it has been carried out."""

    def __init__(self, call: Call, backend: _Deferred) -> None:
        assert call.buffer is not None
        self._call = call
        self._backend = backend
        self._visible = call.buffer
        self._hidden = call.buffer.clone()
        self._out = call.out
        hide(self._visible)
        if self._out is not None:
            hide(self._out)

    @torch.no_grad()
    def finish(self) -> None:
        self._backend.carry_out_until(self)
        self._check_untouched()
        for start, end in self._result_ranges():
            into = self._visible[start:end] if self._out is None else self._out
            into.copy_(self._hidden[start:end])

    @torch.no_grad()
    def carry_out(self) -> None:
        visible, self._call.buffer = self._call.buffer, self._hidden
        out, self._call.out = self._call.out, None
        try:
            ops.start_directly(self._call).finish()
        finally:
            self._call.buffer, self._call.out = visible, out

    def _check_untouched(self) -> None:
        watched = self._visible if self._out is None else torch.cat((self._visible, self._out))
        written = torch.nonzero(~is_hidden(watched))
        if len(written):
            raise CollectiveError(
                f"{self._call.describe()}: its buffer was written to between launch and wait "
                f"({len(written)} of {self._call.num_elements} elements, the first at {int(written[0])})"
            )

    def _result_ranges(self) -> list[tuple[int, int]]:
        bounds, rank = self._call.bounds, self._call.group.rank
        if self._call.op == "reduce_scatter":
            return [(bounds[rank], bounds[rank + 1])]
        # An all-gather also brings back what lies outside its bounds: it belongs to nobody and stays as it was.
        return [(0, self._call.num_elements)]


class _DeferredMessage:
    """A message that its sender may not touch, compared with a copy once the peer has it."""

    def __init__(self, call: Call, start: Callable[[], ops.Sending], backend: _Deferred) -> None:
        assert call.buffer is not None
        self._call = call
        self._start = start
        self._backend = backend
        self._copy = _bytes_of(call.buffer).clone()
        self._work: ops.Sending | None = None

    def carry_out(self) -> None:
        self._check_untouched()
        self._work = self._start()

    def wait(self, timeout: timedelta) -> None:
        self._backend.before_waiting()
        assert self._work is not None
        self._work.wait(timeout)
        self._check_untouched()

    def _check_untouched(self) -> None:
        buffer = self._call.buffer
        assert buffer is not None
        if buffer.untyped_storage().nbytes() == 0 or not torch.equal(_bytes_of(buffer), self._copy):
            raise CollectiveError(
                f"{self._call.describe()}: its buffer was written to or released before the peer had the message"
            )


def _bytes_of(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().view(-1).view(torch.uint8)


def hide(buffer: torch.Tensor) -> None:
    """Fill with a value that no result has: NaN, or the marker where there is no NaN."""
    # Through `.data`: the backend is not a step of the computation and must not raise its version counter.
    buffer.data.fill_(_hidden_value(buffer.dtype))


def is_hidden(buffer: torch.Tensor) -> torch.Tensor:
    """Where the buffer still holds what `hide` wrote."""
    if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
        return buffer.isnan()
    return buffer == _hidden_value(buffer.dtype)


def _hidden_value(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else _INTEGER_MARKER
