"""Files of plain weights, as `transformers` writes them, filled rectangle by rectangle by any number of processes.

    model.safetensors                                        or, above a size,
    model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, model.safetensors.index.json

`plan_weight_files` says where each tensor lies. One process makes the files at their full size with `create`; then
everybody writes the rectangles that it has straight to their places. Nothing is gathered, and nobody holds more than
the rectangle that it writes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

from hybrid.checkpoint.dtypes import DTYPES
from hybrid.checkpoint.folder import sync_folder, write_file
from hybrid.checkpoint.tensor_file import Data, StoredTensor, TensorSpec, byte_view, header_bytes
from hybrid.errors import CheckpointError

__all__ = [
    "INDEX_NAME",
    "SINGLE_NAME",
    "WeightFile",
    "WeightFiles",
    "WeightFilesWriter",
    "index_text",
    "is_weight_file_name",
    "natural_order",
    "plan_weight_files",
]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_TORCH_NAME = re.compile(r"pytorch_model(-\d{5,}-of-\d{5,})?\.bin|pytorch_model\.bin\.index\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One file: its beginning, and where its tensors lie behind that."""

    name: str
    header: bytes
    num_bytes: int
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """All files of one export; `index` is the text of the index file, None if there is one file of weights."""

    files: tuple[WeightFile, ...]
    index: str | None

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files) + len(self.index or "")

    def create(self, folder: Path) -> None:
        """Make the files in an existing folder: full size, headers, no weights yet."""
        for file in self.files:
            with (folder / file.name).open("xb") as opened:
                opened.write(file.header)
                opened.truncate(file.num_bytes)
        if self.index is not None:
            write_file(folder / INDEX_NAME, self.index.encode(), checksum=False)


def plan_weight_files(entries: Sequence[tuple[str, str, Sequence[int]]], max_shard_bytes: int) -> WeightFiles:
    """Files for tensors (name, dtype, shape), filled in this order; a tensor is never cut.

    Args:
        max_shard_bytes: bytes of weights in one file, unless one tensor alone has more.
    """
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}; give a number of bytes such as 5_000_000_000")
    shards: list[list[TensorSpec]] = [[]]
    room = max_shard_bytes
    for name, dtype, shape in entries:
        if dtype not in DTYPES:
            raise CheckpointError(f"{name} has dtype {dtype}, which safetensors files cannot hold")
        spec = TensorSpec(name=name, dtype=dtype, sizes=tuple(shape))
        if spec.num_bytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(spec)
        room -= spec.num_bytes
    many = len(shards) > 1
    names = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" if many else SINGLE_NAME
        for number in range(1, len(shards) + 1)
    ]
    files = tuple(_weight_file(name, specs) for name, specs in zip(names, shards, strict=True))
    return WeightFiles(files=files, index=_index(files) if many else None)


class WeightFilesWriter:
    """Writes rectangles into files that `WeightFiles.create` has made; a context manager. Many processes may do so.

    Raises:
        OSError: as the system says it.
    """

    def __init__(self, files: WeightFiles, folder: Path) -> None:
        self._folder = folder
        self._places = {tensor.name: (file.name, tensor) for file in files.files for tensor in file.tensors}
        self._descriptors: dict[str, int] = {}

    def write_box(self, name: str, offsets: Sequence[int], sizes: Sequence[int], data: Data) -> None:
        """The elements of one rectangle of a tensor, row-major."""
        file, tensor = self._places[name]
        width = DTYPES[tensor.dtype][1]
        view = byte_view(data)
        if len(view) != prod(sizes) * width:
            raise ValueError(f"{name}: {len(view)} bytes for a rectangle of sizes {tuple(sizes)} of {tensor.dtype}")
        if any(at < 0 or at + size > end for at, size, end in zip(offsets, sizes, tensor.sizes, strict=True)):
            raise ValueError(f"{name}: the rectangle at {tuple(offsets)} of sizes {tuple(sizes)} leaves {tensor.sizes}")
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self._folder / file, os.O_WRONLY)
        read = 0
        for start, length in _runs(offsets, sizes, tensor.sizes):
            run = view[read : read + length * width]
            read += length * width
            place = tensor.begin + start * width
            while len(run):
                written = os.pwrite(self._descriptors[file], run, place)
                run, place = run[written:], place + written

    def finish(self) -> None:
        """Put what was written on the disk."""
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)
        self.close()
        sync_folder(self._folder)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> WeightFilesWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_weight_file_name(name: str) -> bool:
    """Whether an export makes files of this name."""
    patterns = (_SHARD_NAME, _TORCH_NAME)
    return name in {SINGLE_NAME, INDEX_NAME} or any(pattern.fullmatch(name) for pattern in patterns)


def natural_order(name: str) -> list[tuple[int, str]]:
    """A key to sort names by: layer 2 before layer 10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in name.split(".")]


def _weight_file(name: str, specs: Sequence[TensorSpec]) -> WeightFile:
    # Wide elements first, as the safetensors library does: each tensor is then aligned for its type.
    ordered = sorted(specs, key=lambda spec: -DTYPES[spec.dtype][1])
    header = header_bytes(ordered, {"format": "pt"})
    begin = len(header)
    tensors = []
    for spec in ordered:
        tensors.append(StoredTensor(name=spec.name, dtype=spec.dtype, sizes=spec.sizes, begin=begin))
        begin += spec.num_bytes
    return WeightFile(name=name, header=header, num_bytes=begin, tensors=tuple(tensors))


def _index(files: Sequence[WeightFile]) -> str:
    places = {tensor.name: file.name for file in files for tensor in file.tensors}
    return index_text([tensor for file in files for tensor in file.tensors], places)


def index_text(tensors: Sequence[TensorSpec], places: Mapping[str, str]) -> str:
    """The text of an index file.

    Args:
        tensors: that are stored, each once.
        places: name -> file.
    """
    metadata = {
        "total_parameters": sum(prod(tensor.sizes) for tensor in tensors),
        "total_size": sum(tensor.num_bytes for tensor in tensors),
    }
    return json.dumps({"metadata": metadata, "weight_map": dict(places)}, indent=2, sort_keys=True) + "\n"


def _runs(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first element, length) of each contiguous run of a rectangle in a row-major tensor, in the rectangle's order."""
    if 0 in sizes:
        return
    # Dims that the rectangle has whole belong to the run; so does the last one that it has not.
    inner = len(shape)
    while inner > 0 and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = prod(sizes[inner:])
    start = sum(at * stride for at, stride in zip(offsets, strides, strict=True))
    index = [0] * inner
    while True:
        yield start + sum(at * stride for at, stride in zip(index, strides, strict=False)), length
        for dim in reversed(range(inner)):
            index[dim] += 1
            if index[dim] < sizes[dim]:
                break
            index[dim] = 0
        else:
            return
