"""Writing regions through `torch.distributed.checkpoint`: what each rank writes, and proof that it is all, once.

dcp.save ── SaveRegions.create_local_plan     this rank's regions           every rank
        ── SaveRegions.create_global_plan     each element exactly once     first rank
        ── WriteShards.write_data             safetensors files, fsynced    every rank
        ── WriteShards.finish                 manifest, rename              first rank

After each of the last three the ranks meet. dcp's own collectives, which are turned off, would say "connection closed"
where a rank has died, and not whose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hybrid.checkpoint.held import Region
from hybrid.checkpoint.manifest import Chunk, Entry, EntryKind, FileRecord
from hybrid.checkpoint.tensor_file import TensorFileWriter, TensorSpec
from hybrid.checkpoint.together import gather, meet
from hybrid.collectives.group import Group
from hybrid.contracts.ranges import coverage_problem
from hybrid.errors import CheckpointError, CollectiveError, HybridError

__all__ = ["SaveRegions", "WriteShards", "as_bytes", "dtype_name", "write_regions"]

# Called by the first rank when every file of every rank is on the disk: entries and files of the manifest.
Conclude = Callable[[dict[str, Entry], dict[str, FileRecord]], None]


@dataclass(frozen=True, slots=True)
class _Written:
    """Where a region went."""

    file: str
    begin: int
    record: FileRecord


def write_regions(
    regions: Sequence[Region], folder: Path, *, group: Group, checksums: bool, conclude: Conclude
) -> None:
    """Write the regions of all ranks of `group` into a folder. *Collective.*

    Raises:
        CheckpointError: what failed on which rank; the same on all of them.
        CollectiveError: a rank is gone, or did not come within the timeout.
    """
    writer = WriteShards(folder, group=group, checksums=checksums, conclude=conclude)
    planner = SaveRegions(regions, group=group)
    try:
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group.process_group, use_collectives=False)
    except HybridError:
        raise
    except RuntimeError as error:  # of gloo, in the moment between a meeting and what follows
        # dcp ends with a barrier. A rank that dies this late takes nothing away from a checkpoint that is complete.
        if not writer.is_complete:
            raise CollectiveError(
                f"another rank ended, or did not come within {group.timeout_seconds:g} s ({error})"
            ) from error


class SaveRegions(SavePlanner):
    """A plan to write these regions. The state dict that `dcp.save` is given plays no part."""

    def __init__(self, regions: Sequence[Region], *, group: Group) -> None:
        self._group = group
        self._regions = {(region.name, region.offsets): region for region in regions}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(region.name, region.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(region.offsets), sizes=torch.Size(region.sizes)),
                    properties=TensorProperties(dtype=region.dtype),
                    size=torch.Size(region.shape),
                ),
            )
            for region in self._regions.values()
        ]
        kinds = {region.name: region.kind for region in self._regions.values() if region.kind != "parameter"}
        return SavePlan(items, planner_data=kinds)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """All ranks' plans are on the first rank only; what it finds in them, all get to know. *Collective.*"""
        metadata = Metadata(state_dict_metadata={})
        problem: BaseException | None = None
        try:
            gathered = gather(all_plans[0], group=self._group)
            if self._group.rank == 0:
                metadata = _whole_plan(gathered)
        except HybridError as error:
            problem = error
        meet(problem, group=self._group)
        return all_plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        region = self._regions[write_item.index.fqn, tuple(write_item.index.offset or ())]
        return region.tensor.detach()


def _whole_plan(plans: Sequence[SavePlan]) -> Metadata:
    """Raises CheckpointError: an element that nobody writes, or two ranks do: a fault of ours, not of the user."""
    entries: dict[str, TensorStorageMetadata] = {}
    for item in (item for plan in plans for item in plan.items):
        data = item.tensor_data
        assert data is not None
        entry = entries.setdefault(
            item.index.fqn, TensorStorageMetadata(properties=data.properties, size=data.size, chunks=[])
        )
        if (entry.size, entry.properties.dtype) != (data.size, data.properties.dtype):
            raise CheckpointError(
                f"{item.index.fqn}: {tuple(data.size)} of {data.properties.dtype} on one rank, "
                f"{tuple(entry.size)} of {entry.properties.dtype} on another"
            )
        entry.chunks.append(data.chunk)
    problems = []
    for name, entry in entries.items():
        problem = coverage_problem(entry.size, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
        if problem is not None:
            problems.append(f"{name}: {problem}")
    if problems:
        raise CheckpointError("the ranks do not write each element once: " + "; ".join(problems))
    kinds = {name: kind for plan in plans for name, kind in (plan.planner_data or {}).items()}
    return Metadata(state_dict_metadata=dict(entries), planner_data=kinds)


class WriteShards(StorageWriter):
    """Writes a rank's regions into `shard_<rank>_<k>.safetensors` of a folder.

    A name stands once in a safetensors file, so the k-th region of each entry goes into file k.
    """

    def __init__(self, folder: Path, *, group: Group, checksums: bool, conclude: Conclude) -> None:
        self.is_complete = False
        """Every rank has written, and the first one has concluded."""
        self._folder = folder
        self._group = group
        self._checksums = checksums
        self._conclude = conclude

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files. *Collective:* a problem of one rank is raised on all of them."""
        results: list[WriteResult] = []
        problem: BaseException | None = None
        try:
            for number, items in enumerate(_by_file(plan.items)):
                results += self._write_file(f"shard_{self._group.rank:05d}_{number}.safetensors", items, planner)
        except BaseException as error:
            problem = error
        meet(problem, group=self._group)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        specs = []
        for item in items:
            data = item.tensor_data
            assert data is not None and data.properties.dtype is not None
            specs.append(
                TensorSpec(
                    name=item.index.fqn,
                    dtype=dtype_name(data.properties.dtype),
                    sizes=tuple(data.chunk.sizes),
                    offsets=tuple(data.chunk.offsets),
                )
            )
        with TensorFileWriter(self._folder / name, specs, checksum=self._checksums) as writer:
            for item in items:
                assert item.tensor_data is not None
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                writer.write(as_bytes(tensor, item.tensor_data.properties.dtype))
            record = writer.close()
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=record.bytes,
                storage_data=_Written(file=name, begin=begin, record=record),
            )
            for item, begin in zip(items, writer.begins, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The first rank makes a checkpoint of the files; the others wait for that. *Collective.*"""
        problem: BaseException | None = None
        try:
            gathered = gather(results[0], group=self._group)
            if self._group.rank == 0:
                self._conclude(*_records(metadata, gathered))
        except BaseException as error:
            problem = error
        meet(problem, group=self._group)
        self.is_complete = True

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _by_file(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    files: list[list[WriteItem]] = []
    seen: dict[str, int] = {}
    for item in items:
        number = seen[item.index.fqn] = seen.get(item.index.fqn, -1) + 1
        if number == len(files):
            files.append([])
        files[number].append(item)
    return files


def _records(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]]
) -> tuple[dict[str, Entry], dict[str, FileRecord]]:
    """Entries and files of the manifest."""
    files: dict[str, FileRecord] = {}
    places: dict[tuple[str, tuple[int, ...]], _Written] = {}
    for result in (result for of_rank in results for result in of_rank):
        files[result.storage_data.file] = result.storage_data.record
        places[result.index.fqn, tuple(result.index.offset or ())] = result.storage_data
    kinds: Mapping[str, EntryKind] = metadata.planner_data
    entries = {}
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(entry, TensorStorageMetadata)
        chunks = []
        for chunk in sorted(entry.chunks, key=lambda chunk: tuple(chunk.offsets)):
            place = places[name, tuple(chunk.offsets)]
            chunks.append(
                Chunk(file=place.file, begin=place.begin, offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes))
            )
        entries[name] = Entry(
            kind=kinds.get(name, "parameter"),
            dtype=dtype_name(entry.properties.dtype),
            shape=tuple(entry.size),
            chunks=tuple(chunks),
        )
    return entries, files


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> memoryview:
    """The values in C order; a copy only where they lie otherwise, in another dtype or on another device."""
    flat = tensor.detach().to(device="cpu", dtype=dtype).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
