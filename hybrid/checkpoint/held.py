"""What a rank holds of the training state, in the plain model's names and coordinates.

A `Region` is a rectangle of one parameter (or of one tensor of its optimizer state) with the memory in which this
rank has it. Saving writes regions, loading fills them, and both are made here from the same placement records and
partitions, so no bucket, stage or rank is in a name and no padding is in a file.

Where several ranks hold the same elements (replicas, tp ranks that have a weight whole, stages that share a tied
one), all of them read, and each writes a share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch

from hybrid.checkpoint.manifest import EntryKind
from hybrid.contracts.placement import Placement
from hybrid.contracts.ranges import Piece, deal, pieces, write_share
from hybrid.errors import CheckpointError
from hybrid.sharding.bucket import Bucket
from hybrid.sharding.engine import ShardingEngine
from hybrid.sharding.optimizer_state import MASTER, OptimizerShards

__all__ = ["HeldState", "PlainValue", "Region", "Use", "model_entry", "optimizer_entry"]

Use = Literal["read", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A rectangle of an entry.

    Args:
        name: entry in the checkpoint.
        kind: what it is.
        dtype: of the entry; `tensor` may have another, and is converted.
        shape: sizes of the whole entry.
        offsets: where the rectangle begins in it.
        tensor: the rectangle's values: live memory of this rank.
    """

    name: str
    kind: EntryKind
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainValue:
    """Part of a parameter's optimizer state that is no tensor of its shape: a step count, a table."""

    fqn: str
    key: str
    value: Any


def model_entry(fqn: str) -> str:
    return f"model.{fqn}"


def optimizer_entry(fqn: str, key: str) -> str:
    return f"optimizer.{fqn}.{key}"


class HeldState:
    """The regions of one rank.

    Args:
        engine: of the wrapped model.
        coordinates: this rank's place on each mesh axis.
        degree: size of an axis, or of a part of one.
    """

    def __init__(self, engine: ShardingEngine, *, coordinates: Mapping[str, int], degree: Callable[[str], int]) -> None:
        self._engine = engine
        self._coordinates = dict(coordinates)
        self._degree = degree
        # A parameter's state has the same places as itself: found once.
        self._copies: dict[str, tuple[tuple[str, ...], int, int]] = {}
        self._pieces: dict[tuple[str, int, int, tuple[int, ...]], list[Piece]] = {}

    def parameters(self, use: Use) -> list[Region]:
        """Of the parameters, in the plain model's dtype: masters where there are any.

        Not collective; take part in pending gathers first (`engine.gather.finish()`).
        """
        return self._shared(self._parts(), use)

    def buffers(self, buffers: Mapping[str, torch.Tensor]) -> list[Region]:
        """Of persistent buffers, which are whole on every rank that has them; one rank writes them."""
        return [
            Region(
                name=model_entry(fqn),
                kind="buffer",
                dtype=buffer.dtype,
                shape=tuple(buffer.shape),
                offsets=(0,) * buffer.dim(),
                tensor=buffer.detach(),
            )
            for fqn, buffer in buffers.items()
        ]

    def optimizer(
        self, shards: OptimizerShards, state: Mapping[str, Mapping[str, Any]], use: Use
    ) -> tuple[list[Region], list[PlainValue]]:
        """Of the optimizer's state here, as `OptimizerShards.own_state` gives it; and what is no tensor of its shape.

        Of the latter each copy is given to its one writer alone, or to all that read.

        Raises:
            CheckpointError: state of a cut parameter that is neither cut alike nor a scalar, all of it listed.
        """
        parts: list[_Part] = []
        plain: list[PlainValue] = []
        problems: list[str] = []
        for shard in shards.shards():
            if shard.part is None or shard.tensor is None or shard.fqn not in state:
                continue
            placement = self._engine.placements[shard.fqn]
            is_first = shard.part.start == 0 and self._copy_of(shard.fqn)[1] == 0
            for key, value in state[shard.fqn].items():
                if not isinstance(key, str):
                    problems.append(f"{shard.fqn}: the key {key!r} is no text")
                elif key == MASTER and not self._has_plain_master(shard.fqn):
                    continue  # it is the parameter's own entry
                elif isinstance(value, torch.Tensor) and value.shape == shard.tensor.shape:
                    parts.append(self._part(shard.fqn, value, name=optimizer_entry(shard.fqn, key), kind="optimizer"))
                elif isinstance(value, torch.Tensor) and value.dim() > 0 and not self._is_whole(shard.fqn):
                    problems.append(
                        f"{shard.fqn}: {key!r} has shape {tuple(value.shape)}, this rank's part of the parameter "
                        f"{tuple(shard.tensor.shape)} of {placement.global_shape}"
                    )
                elif use == "read" or is_first:
                    plain.append(PlainValue(fqn=shard.fqn, key=key, value=value))
        if problems:
            raise CheckpointError(
                f"optimizer state that cannot be {'saved' if use == 'write' else 'loaded'}, because the parameter is "
                f"cut and the state is not cut alike: {'; '.join(problems)}; sharding_configs['partition'] = "
                "'parameter' (stages 1 and 2) keeps each parameter whole on one rank"
            )
        return self._shared(parts, use), plain

    # -- parts -------------------------------------------------------------------------------------------

    def global_shape(self, fqn: str) -> tuple[int, ...]:
        """Shape in the plain model."""
        return self._engine.placements[fqn].global_shape

    def _parts(self) -> Iterator[_Part]:
        engine = self._engine
        for bucket in engine.all_buckets():
            engine.adopt_edits(bucket)
            for part in bucket.slices:
                yield self._part(part.fqn, bucket.slice_view(bucket.own_data(), part))
        for fqn, parameter in engine.parameters.items():
            if parameter.numel() == 0:  # in no shard; at stage 3 it may not be looked at
                yield self._part(fqn, torch.empty(tuple(parameter.shape), dtype=parameter.dtype))
            elif engine.home_of(fqn) is None:
                yield self._part(fqn, parameter.detach())

    def _part(self, fqn: str, view: torch.Tensor, *, name: str | None = None, kind: EntryKind = "parameter") -> _Part:
        placement = self._engine.placements[fqn]
        dtype = getattr(torch, placement.dtype) if kind == "parameter" else view.dtype
        return _Part(fqn=fqn, name=name or model_entry(fqn), kind=kind, dtype=dtype, view=view, placement=placement)

    def _shared(self, parts: Iterable[_Part], use: Use) -> list[Region]:
        """All of the parts to read; this rank's share of them to write."""
        found: list[Region] = []
        if use == "read":
            for part in parts:
                found += self._regions(part, 0, part.view.numel())
                found += [self._whole(part)] * (0 in part.placement.global_shape)  # so that its name is known
            return found
        alike: dict[tuple[str, ...], list[_Part]] = {}
        shares: dict[tuple[str, ...], tuple[int, int]] = {}
        for part in parts:
            axes, index, count = self._copy_of(part.fqn)
            alike.setdefault(axes, []).append(part)
            shares[axes] = (index, count)
        for axes, members in alike.items():
            members.sort(key=lambda part: part.name)  # stages may have them in another order
            index, count = shares[axes]
            found += [self._whole(part) for part in members if 0 in part.placement.global_shape and index == 0]
            for place, start, stop in deal([part.view.numel() for part in members], index=index, count=count):
                found += self._regions(members[place], start, stop)
        return found

    def _whole(self, part: _Part) -> Region:
        return self._region(part, offsets=(0,) * part.view.dim(), tensor=part.view)

    def _regions(self, part: _Part, start: int, stop: int) -> Iterator[Region]:
        """Elements `[start, stop)` of a part, counted in the order of its memory."""
        placement = part.placement
        dims = tuple(range(len(placement.global_shape)))
        bucket = self._engine.home_of(part.fqn)
        own = None if bucket is None else bucket.slice_of.get(part.fqn)
        if bucket is None or own is None or part.is_whole(bucket):  # in its own shape
            if tuple(part.view.shape) == placement.global_shape and (start, stop) == (0, part.view.numel()):
                if stop > 0:  # what most are, without arithmetic
                    yield self._whole(part)
                return
            for piece in self._pieces_of(part.fqn, start, stop, order=dims):
                inside = _start_of(piece.flat_start, tuple(part.view.shape), piece.inside)
                yield self._region(part, offsets=piece.offsets, tensor=_narrow(part.view, inside, piece.sizes))
            return
        strides = bucket.strides(bucket.position_of[part.fqn])
        order = sorted(dims, key=lambda dim: (-strides[dim], dim))
        for piece in self._pieces_of(part.fqn, own.start + start, own.start + stop, order=order):
            begin = piece.flat_start - own.start
            block = part.view[begin : begin + prod(piece.block)].view(piece.block)
            block = block.permute([order.index(dim) for dim in dims])
            yield self._region(part, offsets=piece.offsets, tensor=_narrow(block, piece.inside, piece.sizes))

    def _pieces_of(self, fqn: str, start: int, stop: int, *, order: Sequence[int]) -> list[Piece]:
        key = (fqn, start, stop, tuple(order))
        if key not in self._pieces:
            self._pieces[key] = pieces(self._engine.placements[fqn], start, stop, order=order)
        return self._pieces[key]

    @staticmethod
    def _region(part: _Part, *, offsets: tuple[int, ...], tensor: torch.Tensor) -> Region:
        return Region(
            name=part.name,
            kind=part.kind,
            dtype=part.dtype,
            shape=part.placement.global_shape,
            offsets=offsets,
            tensor=tensor,
        )

    # -- facts -------------------------------------------------------------------------------------------

    def _copy_of(self, fqn: str) -> tuple[tuple[str, ...], int, int]:
        """(axes, index, count) of this rank's copy of what it holds of a parameter."""
        if fqn not in self._copies:
            bucket = self._engine.home_of(fqn)
            cut = () if bucket is None else self._engine.cut_axes(bucket)
            placement = self._engine.placements[fqn]
            self._copies[fqn] = write_share(placement, self._coordinates, degree=self._degree, cut_axes=cut)
        return self._copies[fqn]

    def _has_plain_master(self, fqn: str) -> bool:
        """Whether a parameter has a master beside the plain model's values, which are of low precision themselves."""
        return self._engine.placements[fqn].dtype != "float32"

    def _is_whole(self, fqn: str) -> bool:
        """Whether this rank holds all of a parameter."""
        bucket = self._engine.bucket_of[fqn]
        entry = bucket.partition.entries[bucket.position_of[fqn]]
        part = bucket.slice_of.get(fqn)
        whole_here = part is not None and part.num_elements == entry.num_elements
        return whole_here and entry.num_elements == prod(self._engine.placements[fqn].global_shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What this rank holds of one parameter, or of a tensor cut alike."""

    fqn: str
    name: str
    kind: EntryKind
    dtype: torch.dtype
    view: torch.Tensor  # in the parameter's own shape if all of the local parameter is here, else flat
    placement: Placement

    def is_whole(self, bucket: Bucket) -> bool:
        return self.view.numel() == bucket.partition.entries[bucket.position_of[self.fqn]].num_elements


def _narrow(tensor: torch.Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> torch.Tensor:
    for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, at, size)
    return tensor


def _start_of(flat: int, shape: tuple[int, ...], inside: tuple[int, ...]) -> tuple[int, ...]:
    """Coordinates of `inside` a block that begins at element `flat` of a tensor of this shape."""
    at: list[int] = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        at.append(place)
    return tuple(low + high for low, high in zip(reversed(at), inside, strict=True))
