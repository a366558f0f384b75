"""Small checkpoints on disk, without torch: what a save leaves, and a stand-in for the process being killed."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid.checkpoint import folder
from hybrid.checkpoint.manifest import Chunk, Entry, FileRecord, Manifest
from hybrid.checkpoint.tensor_file import TensorFileWriter, TensorSpec

__all__ = ["Killed", "dies_at_call", "save", "weights", "write_step"]

NUM_RANKS = 3

Arrays = dict[str, np.ndarray[Any, Any]]


def weights(step: int) -> Arrays:
    """A weight in three pieces, two in one piece, a scalar, one without elements."""
    generator = np.random.default_rng(step)
    shapes: dict[str, tuple[int, ...]] = {
        "layers.0.weight": (5, 3),
        "layers.1.bias": (7,),
        "layers.10.bias": (2,),
        "scale": (),
        "nothing": (0, 4),
    }
    return {name: np.asarray(generator.standard_normal(shape), dtype=np.float32) for name, shape in shapes.items()}


def write_step(
    path: Path,
    step: int,
    *,
    checksums: bool = True,
    arrays: Mapping[str, np.ndarray[Any, Any]] | None = None,
    tied: Mapping[str, str] | None = None,
) -> Manifest:
    """All files of one step, the manifest last, into an existing folder. Matrices are cut by columns and by rows."""
    arrays = weights(step) if arrays is None else arrays
    files: dict[str, FileRecord] = {}
    chunks: dict[str, list[Chunk]] = {}
    for rank in range(NUM_RANKS):
        held = [(f"model.{name}", *_part(array, rank)) for name, array in arrays.items() if array.ndim > 1 or rank == 1]
        specs = [
            TensorSpec(name=name, dtype=str(part.dtype), sizes=part.shape, offsets=offsets)
            for name, offsets, part in held
        ]
        file = f"shard_{rank:05d}_0.safetensors"
        with TensorFileWriter(path / file, specs, checksum=checksums) as writer:
            for _, _, part in held:
                writer.write(part)
            files[file] = writer.close()
        for spec, begin in zip(specs, writer.begins, strict=True):
            chunk = Chunk(file=file, begin=begin, offsets=spec.offsets or (), sizes=spec.sizes)
            chunks.setdefault(spec.name, []).append(chunk)
    files["state.json"] = folder.write_file(path / "state.json", b'{"a": 1}', checksum=checksums)
    manifest = Manifest(
        hybrid_version="0.1.0",
        torch_version="2.13.0",
        created_at=f"2026-01-02T03:04:{step % 60:02d}+00:00",
        step=step,
        layout={"world_size": NUM_RANKS, "axes": {"dp_replicate": 1, "tp": NUM_RANKS}, "zero_stage": 2},
        contents=("model", "extra"),
        files=files,
        entries={
            name: Entry(
                kind="parameter",
                dtype=str(arrays[name.removeprefix("model.")].dtype),
                shape=arrays[name.removeprefix("model.")].shape,
                chunks=tuple(pieces),
            )
            for name, pieces in sorted(chunks.items())
        },
        tied={"head.weight": "layers.0.weight"} if tied is None else dict(tied),
    )
    folder.write_manifest(path, manifest)
    return manifest


def _part(array: np.ndarray[Any, Any], rank: int) -> tuple[tuple[int, ...], np.ndarray[Any, Any]]:
    """(offsets, values) of what a rank writes: the first column, and half of the rows of the rest each."""
    if array.ndim < 2:
        return (0,) * array.ndim, array
    middle = array.shape[0] // 2
    rows = (slice(None), slice(middle), slice(middle, None))[rank]
    columns = slice(1) if rank == 0 else slice(1, None)
    at = (rows.start or 0, columns.start or 0, *(0,) * (array.ndim - 2))
    return at, np.ascontiguousarray(array[rows, columns])


def save(directory: Path, step: int, *, nonce: str = "n", **options: Any) -> Path:
    """The calls of a save, in their order."""
    folder.sweep(directory)
    writing = folder.new_writing_folder(directory, step, nonce)
    manifest = write_step(writing, step, **options)
    return folder.commit(writing, directory, step, manifest=manifest)


class Killed(BaseException):
    """Stands for SIGKILL: no `except OSError` and no `except Exception` sees it."""


CALLS = (*((os, name) for name in ("rename", "mkdir", "unlink", "rmdir", "fsync", "open")), (io, "open"))


@contextmanager
def dies_at_call(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process dies before its `number`-th call that opens a file or changes the disk."""
    count = 0

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if count >= number:  # a dead process does nothing any more, in no `finally` either
                raise Killed
            count += 1
            return call(*args, **kwargs)

        return replacement

    with monkeypatch.context() as patch:
        for module, name in CALLS:
            patch.setattr(module, name, dying(getattr(module, name)))
        yield
