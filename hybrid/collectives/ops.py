"""The collectives of `hybrid`.

Every call works on a flat buffer in place, returns a handle at once, and is complete after `handle.wait()`.
All ranks of a group launch the same calls in the same order. Sizes below: B bytes in the buffer, N ranks.

    collective       sends per rank      what a rank holds afterwards
    all_reduce       2 (N-1)/N B         the sum (max, min) of all ranks, the same bits on each
    reduce_scatter   (N-1)/N B           the sum, in its own range; the rest is undefined
    all_gather       (N-1)/N B           every rank's own range
    broadcast        (N-1)/N B           the source's buffer

On gloo the messages are ours (`exchange`; on one host through shared memory, `shared_exchange`): sums are taken in
rank order, in float32 at least, whatever the size or the algorithm, so stages that reduce in different ways agree to
the bit. On NCCL they are torch's (`native`).
A group of one rank does nothing.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from hybrid.collectives import dry
from hybrid.collectives.call import HISTORY, Call, CallState
from hybrid.collectives.exchange import Exchange, even_bounds
from hybrid.collectives.group import Group
from hybrid.collectives.handle import Handle, Pending, collective_error
from hybrid.collectives.native import Native
from hybrid.collectives.pickled import pickled
from hybrid.collectives.ranges import waiting
from hybrid.collectives.shared_exchange import SharedExchange
from hybrid.collectives.shared_memory import arena

__all__ = [
    "Group",
    "Handle",
    "Interposer",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "even_bounds",
    "get_interposer",
    "reduce_scatter",
    "release",
    "set_interposer",
    "shared_buffer",
    "start_directly",
]

# Objects go in one round as far as they fit into this, and the rest in a second one.
_FIRST_BYTES = 1024
_LENGTH_BYTES = 8
# Smaller ones are copied soon enough, and have views that are worth keeping.
_LEAST_SHARED_BYTES = 4 << 20


def all_reduce(
    buffer: torch.Tensor,
    *,
    group: Group,
    op: str = "sum",
    out: torch.Tensor | None = None,
    async_op: bool = True,
    tag: int = 0,
    control: bool = False,
) -> Handle:
    """`buffer` becomes the sum (op "max", "min": the maximum, minimum) over the group, in place.

    With `out`, of as many elements, the sum goes there, and `buffer` stays as it is.
    """
    assert op in ("sum", "max", "min"), op
    assert out is None or (out.dtype, out.numel()) == (buffer.dtype, buffer.numel()), out
    if out is not None and not (get_interposer() is None and SharedExchange.only_reads(buffer, group)):
        buffer, out = out.copy_(buffer), None
    if group.size == 1:
        return Handle(None, None)
    call = Call(
        op="all_reduce",
        group=group,
        buffer=_flat(buffer),
        reduction=op,
        out=None if out is None else _flat(out),
        tag=tag,
        control=control,
    )
    return _launch(call, async_op=async_op)


def reduce_scatter(
    buffer: torch.Tensor,
    *,
    bounds: Sequence[int],
    group: Group,
    out: torch.Tensor | None = None,
    given_up: bool = False,
    async_op: bool = True,
    tag: int = 0,
    control: bool = False,
) -> Handle:
    """`buffer[bounds[r]:bounds[r+1]]` becomes the sum of that range over the group, r being this rank's index.

    With `out`, of as many elements, the sum goes there and all of the buffer is undefined afterwards; else the rest of
    it is. Ranges may differ in length and may be empty. `given_up`: the caller never writes to the rest again, so that
    one of `shared_buffer` is read where it lies, also after this rank's `wait`.
    """
    _check_bounds(buffer, bounds, group)
    own = slice(bounds[group.rank], bounds[group.rank + 1])
    assert out is None or (out.dtype, out.shape) == (buffer.dtype, buffer[own].shape), (out, own)
    if group.size == 1:
        if out is not None:
            out.copy_(buffer[own])
        return Handle(None, None)
    call = Call(
        op="reduce_scatter",
        group=group,
        buffer=_flat(buffer),
        bounds=tuple(bounds),
        reduction="sum",
        out=None if out is None else _flat(out),
        given_up=given_up,
        tag=tag,
        control=control,
    )
    return _launch(call, async_op=async_op)


def all_gather(
    buffer: torch.Tensor,
    *,
    bounds: Sequence[int],
    group: Group,
    async_op: bool = True,
    tag: int = 0,
    control: bool = False,
) -> Handle:
    """Every rank's own range, `buffer[bounds[r]:bounds[r+1]]`, is sent to all others, in place."""
    _check_bounds(buffer, bounds, group)
    if group.size == 1:
        return Handle(None, None)
    call = Call(op="all_gather", group=group, buffer=_flat(buffer), bounds=tuple(bounds), tag=tag, control=control)
    return _launch(call, async_op=async_op)


def broadcast(
    buffer: torch.Tensor,
    *,
    source: int,
    group: Group,
    async_op: bool = False,
    tag: int = 0,
    control: bool = False,
) -> Handle:
    """`buffer` becomes that of the rank with index `source` in the group."""
    assert 0 <= source < group.size, (source, group.ranks)
    if group.size == 1:
        return Handle(None, None)
    call = Call(op="broadcast", group=group, buffer=_flat(buffer), source=source, tag=tag, control=control)
    return _launch(call, async_op=async_op)


def shared_buffer(num_elements: int, dtype: torch.dtype, *, group: Group) -> torch.Tensor | None:
    """A flat buffer of which a `reduce_scatter` that gives it up copies no byte; None where there is none to be had."""
    if group.near and num_elements * dtype.itemsize >= _LEAST_SHARED_BYTES:
        return arena().empty(num_elements, dtype, marks=group.size)
    return None


def all_gather_object(obj: Any, *, group: Group) -> list[Any]:
    """The pickled object of every rank, in group order. Control traffic; blocks."""
    if group.size == 1 or group.backend == dry.BACKEND:
        return [obj] * group.size
    device = _device(group)
    raw = torch.frombuffer(bytearray(pickled(obj)), dtype=torch.uint8)
    begun = _FIRST_BYTES - _LENGTH_BYTES
    first = torch.zeros(group.size, _FIRST_BYTES, dtype=torch.uint8)
    first[group.rank, :_LENGTH_BYTES] = torch.tensor([raw.numel()]).view(torch.uint8)
    first[group.rank, _LENGTH_BYTES : _LENGTH_BYTES + raw.numel()] = raw[:begun]
    first = first.to(device)
    bounds = range(0, first.numel() + 1, _FIRST_BYTES)
    all_gather(first.view(-1), bounds=bounds, group=group, async_op=False, control=True)
    first = first.cpu()
    lengths = first[:, :_LENGTH_BYTES].contiguous().view(torch.int64).flatten().tolist()
    ends = [0, *itertools.accumulate(max(0, length - begun) for length in lengths)]
    rest = torch.empty(ends[-1], dtype=torch.uint8, device=device)
    if ends[-1] > 0:  # on all ranks or on none
        rest[ends[group.rank] : ends[group.rank + 1]] = raw[begun:].to(device)
        all_gather(rest, bounds=ends, group=group, async_op=False, control=True)
    beginnings = first[:, _LENGTH_BYTES:].numpy()
    rests = (rest[start:end].cpu().numpy() for start, end in itertools.pairwise(ends))
    return [
        pickle.loads(beginning[:length].tobytes() + more.tobytes())
        for beginning, length, more in zip(beginnings, lengths, rests, strict=True)
    ]


def barrier(group: Group) -> None:
    """Return when every rank of the group has come here (the host waits, on CUDA too)."""
    token = torch.ones(1, dtype=torch.int32, device=_device(group))
    all_reduce(token, group=group, async_op=False, control=True)
    assert token.item() == group.size


def release(buffer: torch.Tensor) -> None:
    """The caller gives `buffer` up and will not read it again (the deferred backend makes sure of that)."""
    interposer = get_interposer()
    if interposer is not None:
        interposer.release(buffer)


# -- launching ------------------------------------------------------------------------------------------------


class Sending(Protocol):
    """A message under way: a `torch.distributed.Work`, or what a test backend makes of it."""

    def wait(self, timeout: timedelta) -> Any:
        """Until the peer has it."""
        ...


class Interposer(Protocol):
    """What a test backend puts between the launch and the real thing; see `deferred`."""

    def start(self, call: Call) -> Pending:
        """Take the call over."""
        ...

    def send(self, call: Call, start: Callable[[], Sending]) -> Sending:
        """Take a message to one peer over; `start` sends its buffer."""
        ...

    def before_waiting(self) -> None:
        """This process is about to wait for another one."""
        ...

    def release(self, buffer: torch.Tensor) -> None:
        """The caller has given this buffer up."""
        ...


# At most one; a list, so that there is one object for the process to change.
_interposers: list[Interposer] = []


def set_interposer(interposer: Interposer | None) -> None:
    """Send all later calls of this process through `interposer`; None for the real backend."""
    _interposers[:] = [] if interposer is None else [interposer]


def get_interposer() -> Interposer | None:
    """What stands between the launch and the real backend, if anything."""
    return _interposers[0] if _interposers else None


_BACKENDS: Mapping[str, Callable[[Call], Pending]] = {"nccl": Native, dry.BACKEND: dry.Dry}


def start_directly(call: Call) -> Pending:
    """Launch on the group's own backend."""
    on_host: type[Exchange] = SharedExchange if call.group.near else Exchange
    backend: Callable[[Call], Pending] = _BACKENDS.get(call.group.backend, on_host)
    return backend(call)


def _launch(call: Call, *, async_op: bool) -> Handle:
    HISTORY.append(call)
    try:
        with torch.no_grad(), waiting("control" if call.control else call.op, call.group.axis):
            interposer = get_interposer()
            pending = start_directly(call) if interposer is None else interposer.start(call)
    except RuntimeError as error:
        failure = collective_error(call, error, waited_seconds=0.0)
        call.end(CallState.FAILED)
        raise failure from error
    handle = Handle(call, pending)
    if not async_op:
        handle.wait()
    return handle


def _flat(buffer: torch.Tensor) -> torch.Tensor:
    assert buffer.is_contiguous(), f"collectives need contiguous buffers, got strides {buffer.stride()}"
    return buffer.detach().view(-1)


def _check_bounds(buffer: torch.Tensor, bounds: Sequence[int], group: Group) -> None:
    assert buffer.dim() == 1, f"expected a flat buffer, got shape {tuple(buffer.shape)}"
    assert len(bounds) == group.size + 1, f"{len(bounds)} bounds for {group.size} ranks"
    assert bounds[0] >= 0 and bounds[-1] <= buffer.numel(), (bounds[0], bounds[-1], buffer.numel())
    assert all(start <= end for start, end in itertools.pairwise(bounds)), tuple(bounds)


def _device(group: Group) -> torch.device:
    if group.backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
