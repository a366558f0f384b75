"""Reading regions through `torch.distributed.checkpoint`: each rank reads the pieces that meet what it holds.

A rank needs nothing of the others for that: dcp runs on each by itself, and the ranks meet when all have read.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future

from hybrid.checkpoint.held import Region
from hybrid.checkpoint.manifest import Chunk, Manifest
from hybrid.checkpoint.tensor_file import map_chunk
from hybrid.checkpoint.together import meet
from hybrid.collectives.group import Group
from hybrid.contracts.ranges import overlap

__all__ = ["LoadRegions", "ReadShards", "read_entry", "read_regions"]


def read_regions(regions: Sequence[Region], folder: Path, manifest: Manifest, *, group: Group) -> None:
    """Fill the regions of all ranks of `group` from a checkpoint. *Collective.*

    Raises:
        CheckpointError: what failed on which rank; the same on all of them.
        CollectiveError: a rank is gone, or did not come within the timeout.
    """
    problem: BaseException | None = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # so it is, for this
            dcp.load({}, storage_reader=ReadShards(folder, manifest), planner=LoadRegions(regions), no_dist=True)
    except dcp.CheckpointException as error:
        problem = next(failure for failure, _ in error.failures.values())
    meet(problem, group=group)


class LoadRegions(LoadPlanner):
    """A plan to fill these regions. The state dict that `dcp.load` is given plays no part."""

    def __init__(self, regions: Sequence[Region]) -> None:
        # By number: two regions may want the same elements (a weight that was tied when it was saved, and is not here).
        self._regions = list(regions)
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items = []
        for number, region in enumerate(self._regions):
            entry = self._metadata.state_dict_metadata[region.name]
            assert isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks:
                met = overlap(region.offsets, region.sizes, chunk.offsets, chunk.sizes)
                if met is None:
                    continue
                items.append(
                    ReadItem(
                        type=LoadItemType.TENSOR,
                        dest_index=MetadataIndex(region.name, region.offsets, number),
                        dest_offsets=torch.Size(a - b for a, b in zip(met[0], region.offsets, strict=True)),
                        storage_index=MetadataIndex(region.name, chunk.offsets),
                        storage_offsets=torch.Size(a - b for a, b in zip(met[0], chunk.offsets, strict=True)),
                        lengths=torch.Size(met[1]),
                    )
                )
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("a plan of ours reads tensors only; the rest is in state.json")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert read_item.dest_index.index is not None
        tensor = self._regions[read_item.dest_index.index].tensor.detach()
        for dim, (at, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, at, size)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


class ReadShards(StorageReader):
    """Reads the files of one checkpoint by its manifest; nothing in them is unpickled."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries = {}
        places: dict[MetadataIndex, Any] = {}
        for name, entry in self._manifest.entries.items():
            chunks = [
                ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
                for chunk in entry.chunks
            ]
            dtype = getattr(torch, entry.dtype)
            entries[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype), size=torch.Size(entry.shape), chunks=chunks
            )
            for chunk in entry.chunks:
                places[MetadataIndex(name, chunk.offsets)] = (chunk, dtype)
        return Metadata(state_dict_metadata=dict(entries), storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places: dict[MetadataIndex, tuple[Chunk, torch.dtype]] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        # In the order of the files, so that each is read through once.
        found = [(*self._places[item.storage_index], item) for item in plan.items]
        found.sort(key=lambda one: (one[0].file, one[0].begin))
        with ExitStack() as stack:
            files: dict[str, FileIO] = {}
            for chunk, dtype, item in found:
                if chunk.file not in files:
                    files[chunk.file] = stack.enter_context(FileIO(self._folder / chunk.file))
                target = planner.resolve_tensor(item)
                start = _contiguous_start(chunk.sizes, item.storage_offsets, item.lengths)
                if (
                    start is not None
                    and target.dtype == dtype
                    and target.is_contiguous()
                    and target.device.type == "cpu"
                ):
                    _read_into(files[chunk.file], chunk.begin + start * dtype.itemsize, target, name=chunk.file)
                else:
                    stored = _mapped(self._folder, chunk, dtype)
                    for dim, (at, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        stored = stored.narrow(dim, at, size)
                    target.copy_(stored)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def read_entry(folder: Path, manifest: Manifest, name: str) -> torch.Tensor:
    """One whole entry, in memory of its own."""
    entry = manifest.entries[name]
    dtype = getattr(torch, entry.dtype)
    whole = torch.empty(entry.shape, dtype=dtype)
    for chunk in entry.chunks:
        part = whole
        for dim, (at, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            part = part.narrow(dim, at, size)
        part.copy_(_mapped(folder, chunk, dtype))
    return whole


def _mapped(folder: Path, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    size = prod(chunk.sizes) * dtype.itemsize
    if size == 0:
        return torch.empty(chunk.sizes, dtype=dtype)
    return torch.from_numpy(map_chunk(folder / chunk.file, chunk.begin, size)).view(dtype).view(chunk.sizes)


def _contiguous_start(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> int | None:
    """First element of a rectangle of a row-major block, if its elements lie one behind the other; else None."""
    start, rest_whole = 0, True
    stride = 1
    for size, at, length in reversed(list(zip(sizes, offsets, lengths, strict=True))):
        if not rest_whole and length != 1:
            return None
        rest_whole = rest_whole and length == size
        start += at * stride
        stride *= size
    return start


def _read_into(file: FileIO, begin: int, target: torch.Tensor, *, name: str) -> None:
    file.seek(begin)
    view = target.detach().reshape(-1).view(torch.uint8).numpy().data
    while view:
        count = file.readinto(view)
        if not count:
            raise OSError(f"{name} ends {len(view)} bytes too early")
        view = view[count:]
