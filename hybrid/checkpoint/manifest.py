"""The manifest of a checkpoint: its files with sizes and checksums, and where each piece of each tensor lies.

It is the last file that a save writes. Whatever it says is checked when it is read, before any other file is opened:
sizes, ranges of bytes, and that the pieces of a tensor are each of its elements once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice, pairwise
from math import prod
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from hybrid.checkpoint.dtypes import DTYPES
from hybrid.contracts.ranges import coverage_problem
from hybrid.errors import CheckpointError

__all__ = ["FORMAT", "FORMAT_VERSION", "MANIFEST_NAME", "Chunk", "Entry", "FileRecord", "Manifest", "parse_manifest"]

FORMAT: Final = "hybrid-checkpoint"
FORMAT_VERSION: Final = 1
MANIFEST_NAME = "manifest.json"
MAX_PROBLEMS = 8  # a damaged manifest may have thousands; the first ones say enough

Count = Annotated[int, Field(ge=0)]
EntryKind = Literal["parameter", "buffer", "optimizer", "value"]
Content = Literal["model", "optimizer", "lr_scheduler", "scaler", "sampler", "extra", "random"]

# A plain name in the step's own folder, on any file system: no way out of it, no hidden file, no other spelling.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileRecord(_Part):
    """One file: its length, and its checksum if the save made one."""

    bytes: Count
    xxh3_64: Annotated[str, Field(pattern="^[0-9a-f]{16}$")] | None = None


class Chunk(_Part):
    """A rectangle of a tensor, and its elements' place (row-major) in a file."""

    file: str
    begin: Count
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]


class Entry(_Part):
    """One tensor in the plain model's coordinates: no bucket, stage or rank, no padding."""

    kind: EntryKind
    dtype: str
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.element_bytes

    def chunk_bytes(self, chunk: Chunk) -> int:
        return prod(chunk.sizes) * self.element_bytes


class Manifest(_Part):
    """What one step's folder holds."""

    format: Literal["hybrid-checkpoint"] = FORMAT
    format_version: Literal[1] = FORMAT_VERSION
    hybrid_version: str
    torch_version: str
    created_at: str  # ISO 8601, UTC
    step: Count
    layout: dict[str, JsonValue]  # for people, and to see whether a job has the same one
    contents: tuple[Content, ...]
    files: dict[str, FileRecord]
    entries: dict[str, Entry]
    tied: dict[str, str]  # a weight's other name -> the name that it is stored under

    @property
    def num_bytes(self) -> int:
        """Of all files, the manifest itself left out."""
        return sum(record.bytes for record in self.files.values())

    def to_json(self) -> str:
        """One line per file and entry: for people, and for `diff` and `grep`."""
        fields = self.model_dump(mode="json")
        lines = []
        for key, value in fields.items():
            if key in {"files", "entries"} and value:
                inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in value.items())
                lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
            else:
                lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def problems(self) -> Iterator[str]:
        """Where the manifest contradicts itself."""
        yield from (f"the file name {name!r} is not allowed" for name in self.files if not _is_file_name(name))
        for name, entry in self.entries.items():
            problem = _entry_problem(entry, self.files)
            if problem is not None:
                yield f"{name}: {problem}"
                return  # ranges of bytes have no meaning without it
        yield from self._meeting_ranges()
        for name, stored in self.tied.items():
            if "model" in self.contents and f"model.{stored}" not in self.entries:
                yield f"{name} is tied to {stored}, which is not there"

    def _meeting_ranges(self) -> Iterator[str]:
        ranges: dict[str, list[tuple[int, int, str]]] = {}
        for name, entry in self.entries.items():
            for chunk in entry.chunks:
                if entry.chunk_bytes(chunk):
                    end = chunk.begin + entry.chunk_bytes(chunk)
                    ranges.setdefault(chunk.file, []).append((chunk.begin, end, name))
        for file, in_file in ranges.items():
            in_file.sort()
            for (_, end, name), (begin, _, next_name) in pairwise(in_file):
                if begin < end:
                    yield f"{name} and {next_name} overlap at byte {begin} of {file}"


def parse_manifest(text: str | bytes, *, source: str) -> Manifest:
    """The manifest in `text`.

    Raises:
        CheckpointError: it is not whole, not one of ours, of a newer form, or contradicts itself; names `source`.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise CheckpointError(f"{source} is damaged or not whole: it is no JSON ({error})") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise CheckpointError(f"{source} is not the manifest of a hybrid checkpoint: it has no format {FORMAT!r}")
    version = raw.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{source} has format version {version}; this version of hybrid reads up to {FORMAT_VERSION}. "
            f"It was written by hybrid {raw.get('hybrid_version')}: use that version or a newer one"
        )
    try:
        manifest = Manifest.model_validate_json(text)
        listed = list(islice(manifest.problems(), MAX_PROBLEMS))
    except ValidationError as error:
        listed = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)[:MAX_PROBLEMS]
        ]
    if listed:
        raise CheckpointError(f"{source} is damaged or was not written by hybrid: {'; '.join(listed)}")
    return manifest


def _is_file_name(name: str) -> bool:
    return _FILE_NAME.fullmatch(name) is not None and name != MANIFEST_NAME


def _entry_problem(entry: Entry, files: dict[str, FileRecord]) -> str | None:
    if entry.dtype not in DTYPES:
        return f"unknown dtype {entry.dtype!r}"
    problem = coverage_problem(entry.shape, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
    if problem is not None:
        return problem
    for chunk in entry.chunks:
        if chunk.file not in files:
            return f"the file {chunk.file!r} is not among the checkpoint's files"
        end, length = chunk.begin + entry.chunk_bytes(chunk), files[chunk.file].bytes
        if end > length:
            return f"bytes {chunk.begin} to {end} of {chunk.file}, which has {length}"
    return None
