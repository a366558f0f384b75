"""Collectives of a dry run: one rank of a world of which nobody else is there.

A group whose backend is `dry` has no process group behind it. Every other rank counts as one that launched the same
call with the same values:

    all_reduce, reduce_scatter     sum: the own values times the number of ranks; max, min: the own values
    all_gather, broadcast          the buffer as it is
    all_gather_object              the own object, once for each rank
    messages between two ranks     what is sent is counted and dropped; what comes is asked of the inbox (`set_inbox`)

Everything above does what it does in a real world, and a trace counts the same calls and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from hybrid.collectives import trace
from hybrid.collectives.call import Call, CallState
from hybrid.collectives.group import Group
from hybrid.collectives.ranges import waiting

__all__ = ["BACKEND", "Dry", "DryStream", "Inbox", "set_inbox"]

BACKEND = "dry"

Inbox = Callable[[Group, Hashable], tuple[Any, list[torch.Tensor]]]
"""(group, key) -> the description and the tensors that a peer would have sent over it under this key."""


class Dry:
    """A call that is complete at once."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def finish(self) -> None:
        """Leave what a world of equal ranks would have given."""
        call = self._call
        assert call.buffer is not None
        with torch.no_grad():
            if call.out is not None:
                own = call.bounds[call.group.rank], call.bounds[call.group.rank + 1]
                call.out.copy_(call.buffer[own[0] : own[1]])
            if call.reduction == "sum":
                (call.buffer if call.out is None else call.out).mul_(call.group.size)


# At most one; a list, so that there is one object for the process to change.
_inboxes: list[Inbox] = []


def set_inbox(inbox: Inbox | None) -> None:
    """What streams of dry groups receive from now on; None: nothing can be received."""
    _inboxes[:] = [] if inbox is None else [inbox]


class DryStream:
    """A stream whose peer is not there; the same calls as `point_to_point.Stream`."""

    def __init__(self, group: Group, *, peer: int) -> None:
        self._group = group
        self.peer_rank = group.ranks[peer]

    def begin(self, epoch: int) -> None:
        """Nothing is left of earlier epochs."""

    def send(self, key: Hashable, description: Any, tensors: Sequence[torch.Tensor], *, window: int) -> None:
        """Count what would be sent."""
        for tensor in tensors:
            flat = tensor.detach().contiguous().view(-1)
            if not flat.numel():
                continue
            call = Call(op="send", group=self._group, buffer=flat)
            with waiting("send", self._group.axis):
                call.end(CallState.DONE)
            if trace.is_on():
                trace.record_call(call, wait_seconds=0.0)

    def receive(self, key: Hashable) -> tuple[Any, list[torch.Tensor]]:
        """What the inbox has under this key."""
        assert _inboxes, "nobody has said what the ranks of a dry run receive"
        with waiting("receive", self._group.axis):
            return _inboxes[0](self._group, key)

    def confirm(self, key: Hashable) -> None:
        """Nothing is under way."""

    def flush(self) -> None:
        """Nothing is under way."""

    def post(self) -> None:
        """Nothing comes by itself."""
