"""A flat buffer whose memory comes and goes while it, and views of it, stay.

To make a view takes longer than to copy a small gradient into it, or to update a small parameter by it. So views are
made once, and find their memory again whenever the buffer has some.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from hybrid import shims

__all__ = ["ReusedBuffer"]

_HELD_IN_A_LIST = next(map(sys.getrefcount, [object()]))


class ReusedBuffer:
    """At most one buffer at a time; its memory is given back when it is closed.

    Memory that anybody else can still see is left to him, and the next buffer is a new one.
    """

    def __init__(self, num_elements: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._num_elements, self._dtype, self._device = num_elements, dtype, device
        self._flat: torch.Tensor | None = None
        self._views: dict[int, list[torch.Tensor]] = {}
        self._is_open = False

    def open(self) -> torch.Tensor:
        """A flat buffer without values. One that was opened before and not closed lives while somebody holds it."""
        if self._is_open:
            self._forget()
        if self._flat is None:
            self._flat = torch.empty(self._num_elements, dtype=self._dtype, device=self._device)
        else:
            self._flat.untyped_storage().resize_(self._num_elements * self._dtype.itemsize)
        self._is_open = True
        return self._flat

    def views(
        self, buffer: torch.Tensor, key: int, make: Callable[[torch.Tensor], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """What `make` returns for `buffer`; made once for each key if that is the open one."""
        if buffer is not self._flat:
            return make(buffer)
        if key not in self._views:
            self._views[key] = make(buffer)
        return self._views[key]

    def close(self, buffer: torch.Tensor) -> None:
        """The caller gives the open buffer up; any other is none of ours."""
        if buffer is not self._flat:
            return
        self._is_open = False
        if self._is_seen_by_others():
            self._forget()
        else:
            buffer.untyped_storage().resize_(0)

    def _forget(self) -> None:
        self._flat, self._views = None, {}

    def _is_seen_by_others(self) -> bool:
        assert self._flat is not None
        own = sum(map(len, self._views.values()))
        if shims.users_of_memory(self._flat) != 1 + own:
            return True
        return any(max(map(sys.getrefcount, views), default=0) > _HELD_IN_A_LIST for views in self._views.values())
