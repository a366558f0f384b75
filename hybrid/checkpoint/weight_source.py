"""Plain weights that somebody else wrote: which files are meant, what is in them, and the parts that are wanted.

    model.safetensors                                        alone, or
    model.safetensors.index.json, model-00001-of-00002.safetensors, ...
    pytorch_model.bin, or its index and its parts            files of torch.save
    any other files of these two kinds                       by their names

Nothing that is read can run code, and no length or name in a file is trusted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from hybrid.checkpoint.held import Region
from hybrid.checkpoint.loading import read_regions
from hybrid.checkpoint.manifest import MANIFEST_NAME, Chunk, Entry, Manifest
from hybrid.checkpoint.saving import dtype_name
from hybrid.checkpoint.tensor_file import map_chunk, read_header
from hybrid.checkpoint.together import meet
from hybrid.checkpoint.torch_file import TORCH_INDEX_NAME, open_torch_files, torch_file_name
from hybrid.checkpoint.weight_files import INDEX_NAME, SINGLE_NAME
from hybrid.collectives.group import Group
from hybrid.errors import CheckpointError

__all__ = ["Found", "WeightSource", "find_weights", "open_weights"]

Kind = Literal["safetensors", "torch"]

_KINDS: Mapping[str, Kind] = {".safetensors": "safetensors", ".bin": "torch", ".pt": "torch", ".pth": "torch"}
_INDEX_ENDING = ".index.json"
_COMPARED_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Which files are meant.

    Args:
        where: what was asked for, for messages.
        files: all of them, of one kind.
        entries: of safetensors files: what is in them.
        places: name -> file, as an index has it.
    """

    where: str
    kind: Kind
    files: tuple[Path, ...]
    entries: Mapping[str, Entry]
    places: Mapping[str, str]


def find_weights(paths: Sequence[Path]) -> Found:
    """The files at a path (a file, an index, a folder), or some files, and the headers of safetensors files.

    Raises:
        CheckpointError: nothing there, or nothing that can be chosen; a damaged file or index.
        OSError: as the system says it.
    """
    if not paths:
        raise CheckpointError("the list of files of weights is empty")
    where = ", ".join(map(str, paths))
    files: list[Path] = []
    places: dict[str, str] = {}
    for path in paths:
        more, more_places = _files_at(path)
        files += more
        places |= more_places
    kinds = {file: _KINDS.get(file.suffix) for file in files}
    unknown = [str(file) for file, kind in kinds.items() if kind is None]
    if unknown:
        raise CheckpointError(f"{', '.join(unknown)}: files of weights end in {', '.join(_KINDS)}")
    if len(set(kinds.values())) > 1:
        raise CheckpointError(f"{where}: safetensors files and files of torch.save together; give those of one kind")
    kind = _KINDS[files[0].suffix]
    found = Found(where=where, kind=kind, files=tuple(files), entries={}, places=places)
    if kind == "safetensors":
        found = replace(found, entries=_read_headers(files))
        _check_index(found, found.entries)
    return found


def _files_at(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Files, and what an index says of them."""
    if path.name.endswith(_INDEX_ENDING):
        return _read_index(path)
    if not path.is_dir():
        if not path.exists():
            raise CheckpointError(f"{path} does not exist")
        return [path], {}
    for single, index in ((SINGLE_NAME, INDEX_NAME), (torch_file_name(SINGLE_NAME), TORCH_INDEX_NAME)):
        there = [name for name in (single, index) if (path / name).is_file()]
        if len(there) > 1:
            raise CheckpointError(f"{path} holds {single} and {index}: two models; give the path of one of them")
        if there:
            return _files_at(path / there[0])
    names = sorted(os.listdir(path))
    if MANIFEST_NAME in names or any(
        name.startswith("step_") and (path / name / MANIFEST_NAME).exists() for name in names
    ):
        raise CheckpointError(
            f"{path} is a checkpoint of hybrid: use load_checkpoint, or `hybrid checkpoint export` to make files of "
            "weights from it"
        )
    files = [path / name for name in names if name.endswith(".safetensors")]
    if not files:
        raise CheckpointError(
            f"{path} holds no weights: expected {SINGLE_NAME}, {INDEX_NAME}, {torch_file_name(SINGLE_NAME)}, "
            f"{TORCH_INDEX_NAME} or other .safetensors files; give the path of a file of another name"
        )
    return files, {}


def _read_index(path: Path) -> tuple[list[Path], dict[str, str]]:
    try:
        places = json.loads(path.read_bytes())["weight_map"]
        names = dict.fromkeys(places.values())
        if not names or not all(isinstance(name, str) and name == os.path.basename(name) for name in names):
            raise ValueError("its weight_map does not name files beside it")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, or no index of weights: {error!r}") from None
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError(f"{path} names files that are not there: {', '.join(missing)}")
    return [path.parent / name for name in names], dict(places)


def _read_headers(files: Iterable[Path]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for file in files:
        for tensor in read_header(file)[0]:
            if tensor.offsets is not None:
                raise CheckpointError(f"{file} holds parts of tensors, as checkpoints do: use load_checkpoint")
            if tensor.name in entries:
                raise CheckpointError(f"{tensor.name} is in {file} and in {entries[tensor.name].chunks[0].file}")
            chunk = Chunk(
                file=str(file.absolute()), begin=tensor.begin, offsets=(0,) * len(tensor.sizes), sizes=tensor.sizes
            )
            entries[tensor.name] = Entry(kind="parameter", dtype=tensor.dtype, shape=tensor.sizes, chunks=(chunk,))
    return entries


def _check_index(found: Found, names: Iterable[str]) -> None:
    missing = sorted(found.places.keys() - set(names))
    if missing:
        place = found.places[missing[0]]
        raise CheckpointError(
            f"the index of {found.where} is not that of its files: {place} has no {missing[0]}"
            + (f", and {len(missing) - 1} more are missing" if len(missing) > 1 else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Weights in files.

    Args:
        where: what they are called in messages.
        entries: name -> type and shape; of safetensors files the place too.
        maps: of files of torch.save: name -> tensor over the file's memory map.
    """

    where: str
    entries: Mapping[str, Entry]
    maps: Mapping[str, torch.Tensor]

    def renamed(self, rename: Callable[[str], str | None]) -> WeightSource:
        """The same weights under other names; those renamed to None are left out.

        Raises:
            CheckpointError: two get the same name.
        """
        names: dict[str, str] = {}
        for name in self.entries:
            new = rename(name)
            if new is None:
                continue
            if not isinstance(new, str):
                raise CheckpointError(f"rename({name!r}) must return a name or None, got {new!r}")
            if new in names:
                raise CheckpointError(f"rename gives {name!r} and {names[new]!r} the same name {new!r}")
            names[new] = name
        return replace(
            self,
            entries={new: self.entries[name] for new, name in names.items()},
            maps={new: self.maps[name] for new, name in names.items() if name in self.maps},
        )

    def tensor(self, name: str) -> torch.Tensor:
        """One entry over the memory map of its file: a value is read when it is looked at."""
        if name in self.maps:
            return self.maps[name]
        entry = self.entries[name]
        (chunk,) = entry.chunks
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        data = torch.from_numpy(map_chunk(Path(chunk.file), chunk.begin, entry.num_bytes))
        return data.view(getattr(torch, entry.dtype)).view(entry.shape)

    def are_equal(self, first: str, second: str) -> bool:
        """Whether two entries have the same type, shape and bytes."""
        one, other = self.tensor(first), self.tensor(second)
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
            return True
        bytes_of = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return all(
            torch.equal(*(data[at : at + _COMPARED_BYTES] for data in bytes_of))
            for at in range(0, len(bytes_of[0]), _COMPARED_BYTES)
        )

    def fill(self, regions: Sequence[Region], *, group: Group) -> None:
        """Read what the regions of this rank hold, converted to their types. *Collective.*

        Raises:
            CheckpointError: a file cannot be read; the same on every rank.
            CollectiveError: a rank is gone, or did not come within the timeout.
        """
        if self.maps:
            problem: BaseException | None = None
            try:
                self._copy(regions)
            except Exception as error:  # what torch raises for a damaged file depends on where the damage is
                problem = error
            meet(problem, group=group)
            return
        manifest = Manifest(
            hybrid_version="",
            torch_version="",
            created_at="",
            step=0,
            layout={},
            contents=("model",),
            files={},
            entries=dict(self.entries),
            tied={},
        )
        read_regions(regions, Path("/"), manifest, group=group)  # the chunks have whole paths

    def _copy(self, regions: Sequence[Region]) -> None:
        for region in regions:
            stored = self.maps[region.name]
            for dim, (at, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
                stored = stored.narrow(dim, at, size)
            region.tensor.copy_(stored)


def open_weights(found: Found) -> WeightSource:
    """What is in the files; those of torch.save are opened here, on every rank.

    Raises:
        CheckpointError: a file is damaged.
        OSError: as the system says it.
    """
    if found.kind == "safetensors":
        return WeightSource(where=found.where, entries=found.entries, maps={})
    maps = open_torch_files(found.files)
    _check_index(found, maps)
    entries = {
        name: Entry(kind="parameter", dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), chunks=())
        for name, tensor in maps.items()
    }
    return WeightSource(where=found.where, entries=entries, maps=maps)
