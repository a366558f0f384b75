"""Whether a checkpoint's files are those that the save wrote: their sizes, checksums, and what their headers say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hybrid.checkpoint.checksums import file_checksum
from hybrid.checkpoint.manifest import Manifest
from hybrid.checkpoint.tensor_file import read_header
from hybrid.errors import CheckpointError

__all__ = ["share_of_files", "verify"]


def share_of_files(manifest: Manifest, *, rank: int, size: int) -> list[str]:
    """The files that one of `size` ranks verifies, so that all have about as much to read."""
    loads = [0] * size
    own = []
    for name, record in sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0])):
        least = loads.index(min(loads))
        loads[least] += record.bytes
        if least == rank:
            own.append(name)
    return own


def verify(
    step_path: Path,
    manifest: Manifest,
    *,
    names: Sequence[str] | None = None,
    checksums: bool = True,
    on_progress: Callable[[int], None] | None = None,
) -> list[str]:
    """What is wrong with the files of one step, one line each; an empty list if nothing is.

    Args:
        names: only these files.
        checksums: read the files whole; otherwise sizes and headers only.
        on_progress: gets the number of bytes that were read since its last call.
    """
    wanted = manifest.files if names is None else names
    pieces = _pieces(manifest)
    problems = []
    for name in wanted:
        problem = _problem(step_path, name, manifest, pieces.get(name, {}), checksums, on_progress)
        if problem is not None:
            problems.append(problem)
    return problems


_Piece = tuple[int, str, tuple[int, ...], tuple[int, ...]]  # begin, dtype, sizes, offsets


def _pieces(manifest: Manifest) -> dict[str, dict[str, _Piece]]:
    """File -> entry -> what the manifest says of the entry's piece in that file."""
    found: dict[str, dict[str, _Piece]] = {}
    for name, entry in manifest.entries.items():
        for chunk in entry.chunks:
            found.setdefault(chunk.file, {})[name] = (chunk.begin, entry.dtype, chunk.sizes, chunk.offsets)
    return found


def _problem(
    step_path: Path,
    name: str,
    manifest: Manifest,
    pieces: dict[str, _Piece],
    checksums: bool,
    on_progress: Callable[[int], None] | None,
) -> str | None:
    path = step_path / name
    record = manifest.files.get(name)
    if record is None:
        return f"{name} is not among the files of {step_path}"
    try:
        num_bytes = path.stat().st_size
        if num_bytes != record.bytes:
            return f"{name} has {num_bytes} bytes, expected {record.bytes}"
        if checksums and record.xxh3_64 is not None:
            found = file_checksum(path, on_progress=on_progress)
            if found != record.xxh3_64:
                return f"{name} has the checksum {found}, expected {record.xxh3_64}: its content has changed"
        if not pieces:
            return None
        # The sum covers the file's own header, and so what the manifest says about the place of each tensor.
        tensors, _ = read_header(path)
        headed = {
            tensor.name: (tensor.begin, tensor.dtype, tensor.sizes, tensor.offsets or (0,) * len(tensor.sizes))
            for tensor in tensors
        }
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except CheckpointError as error:
        return str(error)
    for entry, piece in pieces.items():
        if headed.get(entry) != piece:
            return f"{name}: the manifest's place of {entry} is not the one in the file's header"
    return None
