"""Buffers that a forward writes (statistics, iterates, counters), when that forward runs a second time in backward.

The second run computes what the first one did, from the buffers as they were then, and leaves no trace: afterwards they
are what they were before it. Only the buffers that a forward was seen to write are copied; of torch's own kernels some
write without saying so, so values are compared at the first forward in each training mode, and versions after that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch import nn

from hybrid import shims

__all__ = ["WrittenBuffers"]

_Place = tuple[nn.Module, str]


class WrittenBuffers:
    """Of one module and all inside it, the buffers that its forward writes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._written: set[_Place] = set()
        self._known_modes: set[tuple[bool, ...]] = set()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For a forward, and for each time that it runs again."""
        call = _Call(self)
        return _Entered(call.first), _Entered(call.again)

    def buffers(self) -> Iterator[tuple[_Place, torch.Tensor]]:
        for module in self._module.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                yield (module, name), buffer

    def watched(self) -> tuple[_Place, ...]:
        """Those to copy before a forward: all of them in a training mode that has not been seen yet."""
        mode = tuple(module.training for module in self._module.modules())
        if mode in self._known_modes:
            return tuple(self._written)
        self._known_modes.add(mode)
        return tuple(place for place, _ in self.buffers())

    def add(self, places: set[_Place]) -> None:
        self._written |= places


class _Values:
    """The buffers at some places: which tensors they are, and what is in them."""

    def __init__(self, places: tuple[_Place, ...]) -> None:
        self.held = {place: _buffer(place) for place in places}
        self.values = {place: buffer.detach().clone() for place, buffer in self.held.items() if buffer is not None}

    def put_back(self) -> None:
        for (module, name), buffer in self.held.items():
            if _buffer((module, name)) is not buffer:
                setattr(module, name, buffer)
            # Past the version counter: what autograd has kept of the buffer is as it was.
            if buffer is not None:
                buffer.data.copy_(self.values[module, name])

    def only(self, places: set[_Place]) -> None:
        self.held = {place: buffer for place, buffer in self.held.items() if place in places}
        self.values = {place: value for place, value in self.values.items() if place in places}

    def differing(self) -> set[_Place]:
        return {
            place
            for place, buffer in self.held.items()
            if _buffer(place) is not buffer or (buffer is not None and not _same(buffer, self.values[place]))
        }


class _Call:
    """One forward, with the buffers as it found them."""

    def __init__(self, written: WrittenBuffers) -> None:
        self._written = written
        self._before: _Values | None = None

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        if shims.in_backward():  # inside something that runs again itself
            with self._without_trace():
                yield
            return
        with torch.no_grad():
            self._before = before = _Values(self._written.watched())
        versions = {place: (buffer, shims.version_of(buffer)) for place, buffer in self._written.buffers()}
        yield
        with torch.no_grad():
            found = before.differing()
        for place, (buffer, version) in versions.items():
            if _buffer(place) is not buffer or shims.version_of(buffer) != version:
                found.add(place)
        self._written.add(found)
        before.only(found)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with self._without_trace():
            if self._before is not None:
                with torch.no_grad():
                    self._before.put_back()
            yield

    @contextlib.contextmanager
    def _without_trace(self) -> Iterator[None]:
        with torch.no_grad():
            now = _Values(self._written.watched())
        try:
            yield
        finally:  # a recomputation that has all it needs is left by an exception
            with torch.no_grad():
                now.put_back()


class _Entered:
    """A context that may be entered again and again, by a new one each time."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._open.append(self._make())
        self._open[-1].__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._open.pop().__exit__(kind, error, trace)


def _buffer(place: _Place) -> torch.Tensor | None:
    module, name = place
    found: torch.Tensor | None = getattr(module, name)  # None after a forward that gave it up
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
