"""Messages between two ranks: trees of tensors, with their shapes, in the order in which they were sent.

One stream per process group and peer. A message is a header of fixed size, with a pickled description of what comes,
and then one transfer per tensor; tensors that fit travel inside the header, and on one host the others are laid out
where the peer reads them (`shared_memory`). Sending does not wait: the buffers are kept until gloo has taken them.
Receiving takes messages as they come, and keeps one that is not asked for yet, so that two ranks need not agree on the
order in which they use what they exchange.

A message belongs to an *epoch* (a step). Who has begun one drops what comes from earlier ones: a step that was left by
an exception leaves messages behind, which must not be taken for those of the next.

On NCCL the headers go over a gloo group beside it, since the host must read them, and nothing keeps the host until the
device has come so far: tensors all travel apart from their header, as bytes (NCCL does not know every dtype), and a
wait is the current stream's.
"""

from __future__ import annotations

import io
import pickle
import struct
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist

from hybrid import shims
from hybrid.collectives import trace
from hybrid.collectives.call import HISTORY, Call, CallState, describe_history, first_sentence
from hybrid.collectives.channel import receive, send
from hybrid.collectives.dry import BACKEND as DRY
from hybrid.collectives.dry import DryStream
from hybrid.collectives.group import Group
from hybrid.collectives.ops import Sending, get_interposer
from hybrid.collectives.ranges import waiting
from hybrid.collectives.shared_memory import NOWHERE, Place, arena
from hybrid.errors import CollectiveError, ModelError

__all__ = ["AnyStream", "Stream", "as_sent", "open_stream"]

# Not those of collectives, which may run in the same process group.
_HEADER_TAG, _REST_TAG, _DATA_TAG = 2**31 - 1, 2**31 - 2, 2**31 - 3
_SLOT_BYTES = 4096
_HEAD = struct.Struct("<2q")  # length of what follows, epoch
# Small enough to be part of the header's message: fewer messages for labels, masks and numbers.
_INLINE_BYTES = 1024

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    inline: bytes | None
    """Its bytes if they came with the header."""
    place: Place = NOWHERE
    """Where they lie if they are in the sender's arena."""


@dataclass(slots=True, kw_only=True)
class _Sent:
    """A message that gloo may still be reading."""

    key: Hashable
    epoch: int
    calls: list[Call]
    works: list[Sending]
    buffers: list[torch.Tensor]
    versions: list[tuple[torch.Tensor, int | None]]
    """Of the caller's own memory, how often it had been written to."""


class _Description(pickle.Pickler):
    """Pickles what comes beside the tensors. What is in an object of any class goes along as values.

    Args:
        to: where it goes, for messages.
    """

    def __init__(self, file: io.BytesIO, *, to: str) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._to = to
        self._within = "an object that is no tuple, list or dict"

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            self._check(obj)
        elif not isinstance(obj, type) and type(obj).__module__.partition(".")[0] not in {"hybrid", "torch"}:
            self._within = f"an object of type {type(obj).__name__}"
        if isinstance(obj, tuple) and not isinstance(obj, torch.Size) and _has_constructor(type(obj)):
            return _tuple, (type(obj), tuple(obj), getattr(obj, "__dict__", None))
        if type(obj) is MappingProxyType:  # which pickle does not know
            return _read_only, (dict(obj),)
        return NotImplemented

    def _check(self, tensor: torch.Tensor) -> None:
        way = (
            "pass tensors in tuples, lists, dicts or the fields of a dataclass (@dataclasses.dataclass above the class "
            "makes it one)"
        )
        what = f"a tensor of shape {tuple(tensor.shape)} inside {self._within}"
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ModelError(
                f"{what} goes on to {self._to} and has a gradient, which cannot come back from inside there: {way}"
            )
        if tensor.layout == torch.strided and tensor.numel() and not tensor.untyped_storage().nbytes():
            raise ModelError(f"{what} goes on to {self._to}, and its memory is not here (ZeRO stage 3): {way}")


def _has_constructor(cls: type) -> bool:
    """Of classes of tuples: whether Python code makes them (of torch's and the system's own, C does)."""
    return cls is not tuple and not hasattr(cls, "n_sequence_fields")


def _tuple(cls: Any, items: tuple[Any, ...], attributes: dict[str, Any] | None) -> Any:
    """A tuple of a class, whatever its constructor asks of its fields: here they are not the tensors yet."""
    made = tuple.__new__(cls, items)
    if attributes:
        vars(made).update(attributes)
    return made


def _read_only(mapping: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(mapping)


def as_sent(description: _T, *, to: str) -> _T:
    """What would arrive of it elsewhere.

    Args:
        description: anything that pickles, beside the tensors of a message.
        to: where it goes, for messages.

    Raises:
        ModelError: it cannot be sent as it is.
    """
    return cast(_T, pickle.loads(_pickled(description, to=to)))


def _pickled(value: Any, *, to: str) -> bytes:
    file = io.BytesIO()
    try:
        _Description(file, to=to).dump(value)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"a value that goes on to {to} cannot be sent: {error}; let the layers pass tensors, "
            "numbers and None, in dicts, lists, tuples or dataclasses of a module"
        ) from error
    return file.getvalue()


class _OnDevice:
    """A transfer of NCCL's. Given a time, its own `wait` would keep the host until the device has come so far."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self, timeout: timedelta) -> None:
        self._work.wait()


class Stream:
    """What this process and one peer send each other over one group.

    Args:
        group: both are in it; its traffic is traced under its axis.
        headers: a gloo group of the same ranks for the headers.
        peer: index of the other rank in the group.
    """

    def __init__(self, group: Group, *, headers: Group, peer: int, device: torch.device) -> None:
        assert group.process_group is not None and headers.process_group is not None
        self._group = group
        self._data = group.process_group
        self._headers = headers.process_group
        self._peer = peer
        self._device = device
        self._is_nccl = group.backend == "nccl"
        self._inline_bytes = 0 if self._is_nccl else _INLINE_BYTES
        self._posted: tuple[dist.Work, torch.Tensor] | None = None
        self._under_way: deque[_Sent] = deque()
        self._early: dict[Hashable, tuple[Any, list[torch.Tensor]]] = {}
        self._epoch = 0

    @property
    def peer_rank(self) -> int:
        return self._group.ranks[self._peer]

    def begin(self, epoch: int) -> None:
        """What is sent and received from now on belongs to this epoch; numbers rise, on both sides alike."""
        self._epoch = epoch
        self._early.clear()

    # -- sending -----------------------------------------------------------------------------------------------

    def send(self, key: Hashable, description: Any, tensors: Sequence[torch.Tensor], *, window: int) -> None:
        """Start sending; the tensors must not be written to from now on, which is checked when they have gone.

        Args:
            key: what the receiver asks for.
            description: anything that pickles; goes along as it is.
            tensors: contiguous or not; what is not is copied.
            window: messages that may be under way; with more, wait until the peer has taken the oldest.

        Raises:
            ModelError: the description cannot be sent as it is.
            CollectiveError: the peer is gone.
        """
        described = _pickled((key, description), to=f"rank {self.peer_rank}")
        leaves: list[_Leaf] = []
        buffers: list[torch.Tensor] = []
        inside: list[torch.Tensor] = []
        for tensor in tensors:
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            small = flat.numel() * flat.element_size() <= self._inline_bytes and len(tensors) <= 2
            raw = (flat.cpu().view(torch.uint8).numpy().tobytes() if flat.numel() else b"") if small else None
            place = NOWHERE if small else self._lay_out(flat)
            leaves.append(_Leaf(tuple(tensor.shape), tensor.dtype, raw, place))
            (buffers if raw is None else inside).append(flat)
        body = pickle.dumps((described, leaves), protocol=pickle.HIGHEST_PROTOCOL)
        head = body[: _SLOT_BYTES - _HEAD.size]
        raw_slot = bytearray(_SLOT_BYTES)
        _HEAD.pack_into(raw_slot, 0, len(body), self._epoch)
        raw_slot[_HEAD.size : _HEAD.size + len(head)] = head
        slot = torch.frombuffer(raw_slot, dtype=torch.uint8)
        versions = [(buffer, shims.version_of(buffer)) for buffer in buffers]
        sent = _Sent(key=key, epoch=self._epoch, calls=[], works=[], buffers=[slot], versions=versions)
        sent.works.append(self._launch("send to", partial(send, slot, self._headers, self._peer, _HEADER_TAG)))
        if len(body) > len(head):
            rest = torch.frombuffer(bytearray(body[len(head) :]), dtype=torch.uint8)
            sent.works.append(self._launch("send to", partial(send, rest, self._headers, self._peer, _REST_TAG)))
            sent.buffers.append(rest)
        sent.calls += [Call(op="send", group=self._group, buffer=flat) for flat in inside if flat.numel()]
        places = [leaf.place for leaf in leaves if leaf.inline is None]
        for buffer, place in zip(buffers, places, strict=True):
            sent.calls.append(Call(op="send", group=self._group, buffer=buffer))
            HISTORY.append(sent.calls[-1])
            if place == NOWHERE:
                sent.works.append(self._start(sent.calls[-1], buffer))
            sent.buffers.append(buffer)
        self._under_way.append(sent)
        while sum(one.epoch == self._epoch for one in self._under_way) > window:
            self._complete_first()

    def _lay_out(self, flat: torch.Tensor) -> Place:
        """Where the peer finds it without a transfer; a test backend wants to see one."""
        if self._peer not in self._group.near or get_interposer() is not None:
            return NOWHERE
        return arena().lend(flat, readers=(self._peer,), marks=self._group.size)

    def _start(self, call: Call, buffer: torch.Tensor) -> Sending:
        interposer = get_interposer()
        start = partial(self._transfer, "send to", send, buffer)
        return start() if interposer is None else interposer.send(call, start)

    def confirm(self, key: Hashable) -> None:
        """The peer has this message (it has answered), and all before it: let go of their buffers."""
        if any(sent.key == key and sent.epoch == self._epoch for sent in self._under_way):
            while self._under_way:
                first = self._under_way[0]
                self._complete_first()
                if first.key == key and first.epoch == self._epoch:
                    return

    def flush(self) -> None:
        """Wait until the peer has everything of this epoch; what is older it takes before the next message."""
        while self._under_way and self._under_way[-1].epoch == self._epoch:
            self._complete_first()

    def _complete_first(self) -> None:
        sent = self._under_way.popleft()
        started = time.monotonic()
        for work in sent.works:
            self._wait(work, "send to")
        for call in sent.calls:
            call.end(CallState.DONE)
            if trace.is_on():
                trace.record_call(call, wait_seconds=time.monotonic() - started)
        if sent.epoch == self._epoch:
            self._check_untouched(sent)

    def _check_untouched(self, sent: _Sent) -> None:
        for buffer, version in sent.versions:
            if shims.version_of(buffer) != version:
                raise ModelError(
                    f"a tensor of {buffer.numel()} elements of {str(buffer.dtype).removeprefix('torch.')} was written "
                    f"to while it was being sent to rank {self.peer_rank}, so that its values there are not certain: a "
                    "layer keeps what it returned and changes it later. Let it return a copy (tensor.clone())"
                )

    # -- receiving ---------------------------------------------------------------------------------------------

    def post(self) -> None:
        """Tell gloo that a message may come: it then travels while this process computes."""
        if self._posted is None:
            slot = torch.empty(_SLOT_BYTES, dtype=torch.uint8)
            work = self._launch("receive from", partial(receive, slot, self._headers, self._peer, _HEADER_TAG))
            self._posted = (work, slot)

    def receive(self, key: Hashable) -> tuple[Any, list[torch.Tensor]]:
        """The description and the tensors of the message with this key; blocks until it is there.

        Raises:
            CollectiveError: the peer is gone, or did not send in time.
        """
        while key not in self._early:
            epoch, found, description, tensors = self._next()
            if epoch == self._epoch:
                self._early[found] = (description, tensors)
        return self._early.pop(key)

    def _next(self) -> tuple[int, Hashable, Any, list[torch.Tensor]]:
        self.post()
        assert self._posted is not None
        work, slot = self._posted
        self._posted = None
        self._wait(work, "receive from")
        raw = slot.numpy().tobytes()
        length, epoch = _HEAD.unpack_from(raw, 0)
        body = raw[_HEAD.size : _HEAD.size + length]
        if len(body) < length:
            rest = torch.empty(length - len(body), dtype=torch.uint8)
            start = partial(receive, rest, self._headers, self._peer, _REST_TAG)
            self._wait(self._launch("receive from", start), "receive from")
            body += rest.numpy().tobytes()
        described, leaves = pickle.loads(body)
        key, description = pickle.loads(described)
        tensors, works = [], []
        for leaf in leaves:
            if leaf.inline is not None:
                tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
                if leaf.inline:
                    flat = torch.frombuffer(bytearray(leaf.inline), dtype=torch.uint8)
                    tensor.view(-1).view(torch.uint8).copy_(flat)
                tensors.append(tensor.to(self._device))
            else:
                tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device)
                tensors.append(tensor)
                if leaf.place != NOWHERE:
                    self._take(leaf.place, tensor.view(-1))
                    continue
                works.append(self._transfer("receive from", receive, tensor.view(-1)))
        self.post()  # the one after it may come while this one is used
        for transfer in works:
            self._wait(transfer, "receive from")
        return epoch, key, description, tensors

    def _take(self, place: Place, into: torch.Tensor) -> None:
        near, group = self._group.near[self._peer], self._group
        near.copy(place, into)
        near.has_read(place, reader=group.rank)

    def connect(self) -> None:
        """Make what NCCL sends over, with the peer. *Collective* of the two.

        It would be made by the first transfer, which keeps the host until the peer has come to the same one: where each
        of two ranks sends to the other first, for ever.
        """
        if self._is_nccl:
            token = torch.zeros(1, dtype=torch.uint8, device=self._device)
            is_first = self._group.rank < self._peer
            self._wait(self._transfer("send to", send if is_first else receive, token), "send to")

    def _transfer(self, what: str, way: Callable[..., dist.Work], flat: torch.Tensor) -> Sending:
        """Start to send or to receive the elements of a tensor."""
        raw = flat.view(torch.uint8) if self._is_nccl else flat
        work = self._launch(what, partial(way, raw, self._data, self._peer, _DATA_TAG))
        return _OnDevice(work) if self._is_nccl else work

    def _launch(self, what: str, start: Callable[[], dist.Work]) -> dist.Work:
        """Start a transfer; gloo refuses at once where it knows that the peer is gone."""
        try:
            with waiting("send" if what == "send to" else "receive", self._group.axis):
                return start()
        except RuntimeError as error:
            raise self._explained(what, error) from None

    def _wait(self, work: Sending, what: str) -> None:
        interposer = get_interposer()
        if interposer is not None:
            interposer.before_waiting()
        try:
            with waiting("send" if what == "send to" else "receive", self._group.axis):
                work.wait(timedelta(seconds=self._group.timeout_seconds))
        except CollectiveError:
            raise  # of a test backend
        except RuntimeError as error:
            raise self._explained(what, error) from None

    def _explained(self, what: str, error: RuntimeError) -> CollectiveError:
        rank, seconds = self._group.ranks[self._group.rank], self._group.timeout_seconds
        text = first_sentence(str(error))
        late = "timed out" in text.lower() or "timeout" in text.lower()
        why = "nothing came in time" if late else "it is gone; look for the first error among the other ranks"
        return CollectiveError(
            f"rank {rank}: {what} rank {self.peer_rank} over {self._group.axis} failed (timeout {seconds:g} s): "
            f"{why} ({text})\nThe last collectives of rank {rank}, oldest first:\n{describe_history()}"
        )


AnyStream: TypeAlias = Stream | DryStream


def open_stream(group: Group, *, headers: Group, peer: int, device: torch.device) -> AnyStream:
    """The stream to a peer of this group; arguments as `Stream` takes them. *Collective* of the two."""
    if group.backend == DRY:
        return DryStream(group, peer=peer)
    stream = Stream(group, headers=headers, peer=peer, device=device)
    stream.connect()
    return stream
