"""Files of tensors: ordinary safetensors files, written as a stream and read by memory maps.

    8 bytes      length of the header, little-endian
    header       JSON, padded with spaces to a multiple of 8: for each tensor its type, sizes and place, and
                 `__metadata__`: {"format": "pt", "DCP_SHARDING_INFO": where each tensor begins in the whole one}
    data         the tensors one after the other, row-major, without gaps

`DCP_SHARDING_INFO` is what torch.distributed.checkpoint's HuggingFaceStorageReader looks for, so it reads them as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid.checkpoint.checksums import BLOCK_BYTES, Checksum
from hybrid.checkpoint.dtypes import CODES, DTYPES
from hybrid.checkpoint.manifest import FileRecord
from hybrid.errors import CheckpointError

__all__ = [
    "DTYPES",
    "Data",
    "StoredTensor",
    "TensorFileWriter",
    "TensorSpec",
    "byte_view",
    "header_bytes",
    "map_chunk",
    "read_header",
]

MAX_HEADER_BYTES = 100_000_000  # the safetensors library reads no longer one
LENGTH_BYTES = 8
_METADATA = "__metadata__"
_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"

Data = bytes | bytearray | memoryview | npt.NDArray[Any]  # C-contiguous


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a file.

    Args:
        name: once per file.
        dtype: torch's name without the prefix, such as `bfloat16`.
        sizes: of what the file holds.
        offsets: where that begins in the whole tensor; None if it is the whole.
    """

    name: str
    dtype: str
    sizes: tuple[int, ...]
    offsets: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        return prod(self.sizes) * DTYPES[self.dtype][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor(TensorSpec):
    """A tensor of a file that exists; `begin` is its first byte, counted from the beginning of the file."""

    begin: int


class TensorFileWriter:
    """Writes a file that does not exist yet; keeps nothing of what it is given. A context manager.

    A context that is left by an exception leaves a file that is not whole, and says nothing about it.

    Raises:
        OSError: as the system says it, such as a full disk.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorSpec], *, checksum: bool) -> None:
        header = header_bytes(tensors, {"format": "pt"})
        self._path = path
        self._num_bytes = len(header) + sum(tensor.num_bytes for tensor in tensors)
        self._written_bytes = 0
        self._checksum = Checksum() if checksum else None
        self.begins: list[int] = []
        begin = len(header)
        for tensor in tensors:
            self.begins.append(begin)
            begin += tensor.num_bytes
        self._file = path.open("xb", buffering=0)
        self.write(header)

    def write(self, data: Data) -> None:
        """The next bytes: of one tensor, of a part of one or of several."""
        view = byte_view(data)
        if self._written_bytes + len(view) > self._num_bytes:
            raise ValueError(
                f"{self._path}: {self._written_bytes + len(view)} bytes are given for {self._num_bytes} announced"
            )
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            if self._checksum is not None:
                self._checksum.update(block)
            while len(block):  # a file may take less than it is given, as when the disk is nearly full
                block = block[self._file.write(block) :]
        self._written_bytes += len(view)

    def close(self) -> FileRecord:
        """Put everything on the disk, and say what a reader must find there."""
        if self._written_bytes != self._num_bytes:
            self._file.close()
            raise ValueError(f"{self._path}: {self._written_bytes} bytes were given for {self._num_bytes} announced")
        with self._file:
            os.fsync(self._file.fileno())
        return FileRecord(bytes=self._num_bytes, xxh3_64=None if self._checksum is None else self._checksum.text())

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._file.close()
        elif not self._file.closed:
            self.close()


def byte_view(data: Data) -> memoryview:
    """The bytes of something C-contiguous, without a copy."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError(f"an array of shape {data.shape} whose elements do not lie in row-major order")
        return data.reshape(-1).view(np.uint8).data
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a view of no elements cannot be cast


def header_bytes(tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file with these tensors in this order."""
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    if any(tensor.offsets is not None for tensor in tensors):
        # All of them or none: the reader looks for every tensor in here.
        saved = {tensor.name: {_OFFSETS: tensor.offsets or (0,) * len(tensor.sizes)} for tensor in tensors}
        header[_METADATA][_SHARDING] = json.dumps(saved)
    begin = 0
    for tensor in tensors:
        if tensor.name in header:
            raise ValueError(f"the name {tensor.name!r} cannot stand in a file twice")
        end = begin + tensor.num_bytes
        header[tensor.name] = {
            "dtype": DTYPES[tensor.dtype][0],
            "shape": list(tensor.sizes),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"{len(tensors)} tensors need a header of {len(text)} bytes; {MAX_HEADER_BYTES} are allowed")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_header(path: Path) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors of a safetensors file, as they lie in it, and its metadata. No length in it is trusted.

    Raises:
        CheckpointError: it is no whole safetensors file, or has a type that torch cannot hold.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
            raise CheckpointError(f"{path} is no safetensors file, or not whole: it has {file_bytes} bytes")
        text = file.read(length)
    try:
        header = json.loads(text)
        metadata = header.pop(_METADATA, {})
        sharding = json.loads(metadata.get(_SHARDING, "{}"))
        tensors = [_stored(name, fields, sharding, data_begin=LENGTH_BYTES + length) for name, fields in header.items()]
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file, or damaged: {error!r}") from None
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.num_bytes))
    end = LENGTH_BYTES + length
    for tensor in tensors:
        if tensor.begin != end:
            raise CheckpointError(f"{path} is damaged: {tensor.name} begins at byte {tensor.begin}, expected {end}")
        end += tensor.num_bytes
    if end != file_bytes:
        raise CheckpointError(f"{path} has {file_bytes} bytes, expected {end}: it is not whole, or was added to")
    return tensors, {key: value for key, value in metadata.items() if isinstance(value, str)}


def map_chunk(path: Path, begin: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Bytes of a file, read when they are looked at. Writing into the array changes a copy, not the file.

    Raises:
        CheckpointError: the file ends before.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        if begin + num_bytes > file_bytes:
            raise CheckpointError(
                f"{path} has {file_bytes} bytes; bytes {begin} to {begin + num_bytes} are wanted: it is not whole"
            )
        if num_bytes == 0:  # nothing can be mapped
            return np.empty(0, dtype=np.uint8)
        return np.asarray(np.memmap(file, dtype=np.uint8, mode="c", offset=begin, shape=(num_bytes,)))


def _stored(name: str, fields: dict[str, Any], sharding: dict[str, Any], *, data_begin: int) -> StoredTensor:
    """One tensor as a header has it; whatever is not as it should be is some Python error."""
    code = fields["dtype"]
    if code not in CODES:
        raise CheckpointError(f"{name} has the type {code!r}, which is not known here")
    sizes, (begin, end) = tuple(fields["shape"]), fields["data_offsets"]
    offsets = tuple(sharding[name][_OFFSETS]) if name in sharding else None
    for number in (*sizes, begin, end, *(offsets or ())):
        if type(number) is not int or number < 0:
            raise ValueError(f"{name} has {number!r} where a count belongs")
    if offsets is not None and len(offsets) != len(sizes):
        raise ValueError(f"{name} has sizes {sizes} and offsets {offsets}")
    tensor = StoredTensor(name=name, dtype=CODES[code], sizes=sizes, offsets=offsets, begin=data_begin + begin)
    if end - begin != tensor.num_bytes:
        raise ValueError(f"{name} has {end - begin} bytes; {tensor.dtype} of shape {sizes} has {tensor.num_bytes}")
    return tensor
