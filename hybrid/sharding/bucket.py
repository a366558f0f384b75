"""A bucket: one flat buffer of parameters, the gradients that belong to it, and the shard this rank owns.

Lifetime of the buffers, B = bytes of the bucket, N = ranks of the shard group:

    data         parameters, B. The model's parameters are views into it, for ever. At stage 3 its storage has
                 zero bytes except while a unit that needs it computes.
    cut          own shard of the parameters, B/N, at stage 3 only; else the shard is a range of `data`.
    local        this rank's gradients since the last reduction, B. Born with the first gradient, gone with
                 the reduction.
    raw          sum over the ranks of what has been reduced since the last settlement, B/N, not yet scaled.
    settled      the gradient that the optimizer sees, B/N, times `scale`. Lives until zero_grad.
    master       fp32 copy of the own shard, B/N elements, only if the parameters are of lower precision.

At stage 0 there is one shard, and `local` itself becomes `raw`, then `settled`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from operator import attrgetter, is_

import torch

from hybrid import shims
from hybrid.collectives import ops
from hybrid.contracts.partition import BucketPartition, Slice
from hybrid.gradient_sinks import note_passing_memory
from hybrid.precision.casting import LOW_PRECISION
from hybrid.sharding.bucket_gradients import BucketGradients
from hybrid.sharding.bucket_key import BucketKey
from hybrid.sharding.tensors import own_strides, same_bits

__all__ = ["Bucket", "BucketKey", "own_strides"]

_DTYPE = attrgetter("dtype")


class Bucket(BucketGradients):
    """See the module's docstring. `shard` is this rank's index in the shard group."""

    def __init__(
        self,
        *,
        index: int,
        key: BucketKey,
        partition: BucketPartition,
        parameters: Sequence[torch.nn.Parameter],
        shard: int,
        counts: bool,
        device: torch.device,
        cut_parameters: bool = False,
    ) -> None:
        """
        Args:
            index: position in the launch order.
            parameters: in the order of `partition.entries`; one on the meta device gets its values by `store`.
            counts: whether this rank counts its shard in sums over the world (one copy of each element does).
            device: where the buffers are.
            cut_parameters: keep the own shard apart from `data`, which is freed at once (stage 3).
        """
        self.index = index
        # Of a bucket that other stages have under another index, something that is the same there.
        self.tag = zlib.crc32(partition.entries[0].fqn.encode()) if key.is_over_stages else index
        self.key = key
        self.partition = partition
        self.parameters = tuple(parameters)
        self.shard = shard
        self.counts = counts
        self.fqns = tuple(entry.fqn for entry in partition.entries)
        self.position_of = {fqn: position for position, fqn in enumerate(self.fqns)}
        # Without padding: its gradient may become the buffer as it is.
        self.is_one_parameter = [e.num_elements for e in partition.entries] == [partition.num_elements]
        self.data = torch.zeros(partition.num_elements, dtype=key.dtype, device=device)
        self._shapes = tuple((tuple(p.shape), own_strides(p)) for p in self.parameters)
        trainable = any(parameter.requires_grad for parameter in self.parameters)
        self.slices = partition.slices(shard)
        self.slice_of: dict[str, Slice] = {part.fqn: part for part in self.slices}
        self.low, self.high = partition.bounds[shard], partition.bounds[shard + 1]
        own_elements = self.high - self.low
        self.cut = self._new_cut(own_elements, device) if cut_parameters else None
        if cut_parameters:
            note_passing_memory(self.data, self)
        wants_master = key.dtype in LOW_PRECISION and trainable
        self.master = self._new_master(own_elements, device) if wants_master else None
        for position, parameter in enumerate(self.parameters):
            view = self.view(self.data, position)
            if parameter.is_meta:
                shims.give_memory(parameter, view)
            else:
                self.store(position, parameter.detach())
                parameter.data = view
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self._data_bytes = self.data.untyped_storage().nbytes()
        self._own_sizes, self._own_shapes = self._split_plan()
        self._init_gradients(device)
        if self.cut is not None:
            self.free_data()

    def _new_cut(self, num_elements: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=self.key.dtype, device=device)

    def _new_master(self, num_elements: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=torch.float32, device=device)  # whatever torch's default dtype is

    def _split_plan(self) -> tuple[list[int], list[tuple[int, ...] | None]]:
        """Sizes (gap, slice, gap, slice, ..., gap) of the own shard, and each slice's shape; None if it is strided."""
        sizes: list[int] = []
        shapes: list[tuple[int, ...] | None] = []
        position = self.low
        for part in self.slices:
            sizes += [part.offset_elements - position, part.num_elements]
            position = part.offset_elements + part.num_elements
            own = self.slice_view(self.own_parameters(), part)
            shapes.append(tuple(own.shape) if own.is_contiguous() else None)
        return [*sizes, self.high - position], shapes

    def contents(self) -> str:
        """What lies in it, for a message."""
        first, last = self.fqns[-1], self.fqns[0]  # in the order of the launches, which is the reverse
        return f"parameter {first!r}" if first == last else f"parameters {first!r} to {last!r}"

    # -- views -----------------------------------------------------------------------------------------

    def view(self, flat: torch.Tensor, position: int) -> torch.Tensor:
        """The parameter's shape and strides over a whole flat buffer of this bucket."""
        shape, strides = self._shapes[position]
        return flat.as_strided(shape, strides, flat.storage_offset() + self.partition.entries[position].offset_elements)

    def strides(self, position: int) -> tuple[int, ...]:
        """The parameter's strides: the order in which its elements lie in the bucket."""
        return self._shapes[position][1]

    def is_dense(self, position: int) -> bool:
        """Whether a matrix lies row by row or column by column, as matrix products can write it."""
        (rows, columns), strides = self._shapes[position]
        return strides in ((columns, 1), (1, rows))

    def own_data(self) -> torch.Tensor:
        """The own shard of the parameters: what the optimizer updates, fp32 master or the parameters themselves."""
        return self.own_parameters() if self.master is None else self.master

    def own_parameters(self) -> torch.Tensor:
        """The own shard in the parameters' dtype."""
        return self.data[self.low : self.high] if self.cut is None else self.cut

    def stepped(self) -> torch.Tensor:
        """The own shard that the optimizer updates in place."""
        return self.own_data()

    def allocate_data(self) -> None:
        """Give the freed whole buffer its memory again, own range filled."""
        assert self.cut is not None
        self.data.untyped_storage().resize_(self._data_bytes)
        self.data[self.low : self.high].copy_(self.cut)

    def after_allocation(self) -> AbstractContextManager[object]:
        """A collective that is launched inside finds the own range filled."""
        return nullcontext()

    def arrive(self) -> None:
        """The whole buffer is there."""

    def free_data(self) -> None:
        """Take the whole buffer's memory away; the storage object stays, and with it all views of it."""
        ops.release(self.data)
        self.data.untyped_storage().resize_(0)

    def take_own_from_data(self) -> None:
        """What was written into the whole buffer becomes the own shard, and the master where it changed.

        Elements that are still the rounded master keep the master's full precision: reading must not round it.
        """
        own = self.data[self.low : self.high]
        if self.cut is not None:
            self.cut.copy_(own)
        if self.master is not None:
            self._take_into_master(own)

    def _take_into_master(self, own: torch.Tensor) -> None:
        assert self.master is not None
        edited = own != self.master.to(own.dtype)
        self.master.copy_(torch.where(edited, own.float(), self.master))

    def take_edits_from_data(self) -> None:
        """`take_own_from_data`, if anything was written since the buffer was gathered."""
        if self.cut is None:
            return
        # On CUDA to ask would keep the host until the unit has computed; there what was not written is taken again.
        if self.data.is_cuda or not same_bits(self.data[self.low : self.high], self.cut):
            self.take_own_from_data()

    def store(self, position: int, value: torch.Tensor) -> None:
        """Give one parameter its whole value: own shard, master in the precision given, and the buffer if it is there.

        Only the own part is copied beside the buffer, so that a parameter at a time can come from elsewhere.
        """
        if self.data.untyped_storage().nbytes():
            self.view(self.data, position).copy_(value)
        if self.cut is not None:
            self._store_own(self.cut, position, value)
        self.set_master(position, value)

    def set_master(self, position: int, value: torch.Tensor) -> None:
        """Give the master of one parameter its value in full precision."""
        if self.master is not None:
            self._store_own(self.master, position, value)

    def _store_own(self, shard_buffer: torch.Tensor, position: int, value: torch.Tensor) -> None:
        part = self.slice_of.get(self.fqns[position])
        if part is None:
            return
        shape, strides = self._shapes[position]
        if value.stride() != strides:
            value = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).copy_(value)
        in_order = value.as_strided((value.numel(),), (1,))
        begin = part.offset_elements - self.low
        self._copy_own(shard_buffer[begin : begin + part.num_elements], in_order[part.start : part.stop])

    def _copy_own(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Into own shard or master."""
        target.copy_(value)

    def write_back_master(self) -> None:
        """After an update: the parameters' dtype follows the master."""
        if self.master is not None:
            self.own_parameters().copy_(self.master)

    def parameter_bytes(self) -> int:
        """Live bytes: whole buffer, own shard, master."""
        extra = (tensor for tensor in (self.cut, self.master) if tensor is not None)
        return self.data.untyped_storage().nbytes() + sum(t.untyped_storage().nbytes() for t in extra)

    def slice_view(self, shard_buffer: torch.Tensor, part: Slice) -> torch.Tensor:
        """`part` within a buffer over the own shard: in the parameter's own shape if it is whole, else flat."""
        begin = part.offset_elements - self.low
        position = self.position_of[part.fqn]
        shape, strides = self._shapes[position]
        if part.num_elements == self.partition.entries[position].num_elements:
            return shard_buffer.as_strided(shape, strides, shard_buffer.storage_offset() + begin)
        return shard_buffer[begin : begin + part.num_elements]

    def own_views(self, shard_buffer: torch.Tensor) -> list[torch.Tensor]:
        """`slice_view` of every own slice, in the order of `slices`; one split instead of a call for each."""
        pieces = shard_buffer.split_with_sizes(self._own_sizes)
        return [
            self.slice_view(shard_buffer, part) if shape is None else pieces[2 * index + 1].view(shape)
            for index, (part, shape) in enumerate(zip(self.slices, self._own_shapes, strict=True))
        ]

    def moved(self, fqns: Sequence[str]) -> str | None:
        """The first of these parameters of the bucket whose `data` was replaced since wrapping, if there is one."""
        if len(fqns) == len(self.parameters) and self._lies_as_wrapped():
            return None
        with shims.plain_tensors():
            for fqn, parameter, address in zip(fqns, self.parameters, self._addresses, strict=False):
                # At stage 3 the address changes with every gather; the storage, empty meanwhile, stays the same.
                here = parameter.data_ptr() == address if self.cut is None else self._shares_memory(parameter)
                if not here or parameter.dtype != self.key.dtype:
                    return fqn
        return None

    def _shares_memory(self, parameter: torch.Tensor) -> bool:
        return shims.memory_of(parameter) == shims.memory_of(self.data)

    def _lies_as_wrapped(self) -> bool:
        """Whether all parameters lie where they did, by a quick look; there is none at stage 3."""
        with shims.plain_tensors():  # to ask one that is on its way would wait for it
            return (
                self.cut is None
                and list(map(torch.Tensor.data_ptr, self.parameters)) == self._addresses
                and all(map(is_, map(_DTYPE, self.parameters), repeat(self.key.dtype)))
            )

    def host_bytes(self) -> tuple[int, int]:
        """Of `parameter_bytes` and of `gradient_bytes`, what is in host memory."""
        return 0, 0
