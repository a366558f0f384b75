"""From a checkpoint to files of plain weights, and the folder that they appear in: whole or not at all."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid.checkpoint.folder import sync_folder
from hybrid.checkpoint.manifest import Manifest
from hybrid.checkpoint.tensor_file import map_chunk
from hybrid.checkpoint.weight_files import (
    WeightFiles,
    WeightFilesWriter,
    is_weight_file_name,
    natural_order,
    plan_weight_files,
)
from hybrid.errors import CheckpointError

__all__ = [
    "EXTRA_STATE",
    "MODEL_PREFIX",
    "STATE_FILE",
    "TORCH_NAME",
    "Beside",
    "check_target",
    "export_step",
    "model_files",
    "new_aside",
    "read_beside",
    "reveal",
]

MODEL_PREFIX = "model."
STATE_FILE = "state.json"
# What that file says of the model: state of modules' own, by name.
EXTRA_STATE = "model_extra_state"
TORCH_NAME = "pytorch_model.bin"
_FILE_ENDINGS = {".safetensors", ".pt", ".pth", ".bin", ".ckpt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What the file beside the shards says of the model.

    Args:
        extra: name in the plain model -> entry, of each module's own state that is a tensor.
        left_out: name -> what it is, of each that is none.
    """

    extra: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def read_beside(step_path: Path, manifest: Manifest) -> Beside:
    """Read it; nothing in it is made into an object.

    Raises:
        CheckpointError: it cannot be read, is no JSON, or names a tensor that is not there.
    """
    path = step_path / STATE_FILE
    try:
        document = json.loads(path.read_bytes())
        states = dict(document.get(EXTRA_STATE, {}))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    extra, left_out = {}, {}
    for name, node in states.items():
        what = _other_kind(node)
        if what is not None:
            left_out[name] = what
        elif node.get("name") in manifest.entries:
            extra[name] = node["name"]
        else:
            raise CheckpointError(f"{path}: the checkpoint has no tensor {node.get('name')!r}, which {name} is")
    return Beside(extra=extra, left_out=left_out)


def _other_kind(node: Any) -> str | None:
    """What a value in the file is; None for a tensor that a file of weights can hold. `values.py` has the kinds."""
    if not isinstance(node, dict):
        return "nothing" if node is None else type(node).__name__
    kind = str(node.get("__kind__", "dict"))
    if kind == "tensor":
        return "complex tensor" if node.get("complex") else None
    return kind


def model_files(manifest: Manifest, max_shard_bytes: int, beside: Beside | None = None) -> WeightFiles:
    """The files for the model's parameters, buffers and tensors of its modules' own, under the plain model's names."""
    beside = Beside() if beside is None else beside
    places = {
        name.removeprefix(MODEL_PREFIX): entry
        for name, entry in manifest.entries.items()
        if name.startswith(MODEL_PREFIX)
    }
    places |= {name: manifest.entries[entry] for name, entry in beside.extra.items()}
    names = sorted((name for name in places if name not in manifest.tied), key=natural_order)
    entries = [(name, places[name].dtype, places[name].shape) for name in names]
    if not entries:
        raise CheckpointError(f"the checkpoint of step {manifest.step} holds no model: {', '.join(manifest.contents)}")
    return plan_weight_files(entries, max_shard_bytes)


def export_step(
    step_path: Path,
    manifest: Manifest,
    folder: Path,
    files: WeightFiles,
    *,
    beside: Beside | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Copy the weights of one step into `folder`, piece by piece; on the disk when this returns.

    Args:
        files: from `model_files`, with the same `beside`.
        on_progress: gets the bytes of each piece.
    """
    extra = {} if beside is None else beside.extra
    files.create(folder)
    with WeightFilesWriter(files, folder) as writer:
        for file in files.files:
            for tensor in file.tensors:
                entry = manifest.entries[extra.get(tensor.name, MODEL_PREFIX + tensor.name)]
                for chunk in entry.chunks:
                    num_bytes = entry.chunk_bytes(chunk)
                    data = map_chunk(step_path / chunk.file, chunk.begin, num_bytes)
                    writer.write_box(tensor.name, chunk.offsets, chunk.sizes, data)
                    if on_progress is not None:
                        on_progress(num_bytes)
        writer.finish()


# ---------------------------------------------------------------- the folder


def check_target(target: Path, *, also_replaced: frozenset[str] = frozenset()) -> None:
    """Refuse a target that an export may not take the place of.

    Args:
        target: the folder to come. It may be there if all that it holds is an earlier export.
        also_replaced: names of files, besides those of weights, that the export writes anew.

    Raises:
        CheckpointError: it has the name of a file, or holds something that an export does not make.
    """
    if target.suffix in _FILE_ENDINGS:
        raise CheckpointError(
            f"{target} is to be a folder: the weights go into files in it; give a name without {target.suffix}"
        )
    if not os.path.lexists(target):
        return
    if not target.is_dir() or target.is_symlink():
        raise CheckpointError(f"{target} is there and is no folder; give another name")
    for name in sorted(os.listdir(target)):
        if not is_weight_file_name(name) and name not in also_replaced:
            raise CheckpointError(
                f"{target} holds {name!r}, which an export does not make and would remove; export into a new folder"
            )


def new_aside(target: Path, nonce: str) -> Path:
    """Make the folder in which an export is written before it appears.

    What exports that died had written goes; what they had put aside gets its name back.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    old = _asides(target, "old")
    if old and not os.path.lexists(target):
        os.rename(old[0], target)
    for path in _asides(target, "writing"):
        shutil.rmtree(path, ignore_errors=True)
    aside = target.with_name(f".{target.name}.writing-{nonce}")
    aside.mkdir()
    return aside


def reveal(aside: Path, target: Path) -> None:
    """Give a whole export its name, in place of an earlier one."""
    sync_folder(aside)
    old = None
    if target.is_dir():
        old = target.with_name(f".{target.name}.old-{secrets.token_hex(4)}")
        os.rename(target, old)
    try:
        os.rename(aside, target)
    except OSError:
        if old is not None:
            os.rename(old, target)
        raise
    sync_folder(target.parent)
    for path in _asides(target, "old"):
        shutil.rmtree(path, ignore_errors=True)


def _asides(target: Path, kind: str) -> list[Path]:
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{kind}-[0-9a-f]+")
    return [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]
