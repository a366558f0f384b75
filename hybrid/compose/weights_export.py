"""`export_weights`: the model as an ordinary folder of weights, whatever layout it is trained under.

prepare    every rank: what it writes; all agree, or all get the same error
write      each rank puts its pieces at their places in files that lie aside              checkpoint/weight_files.py
(convert)  format="torch": file by file, each by one rank, from memory maps               checkpoint/torch_file.py
reveal     config.json and one rename
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from hybrid.checkpoint.export import MODEL_PREFIX, check_target, new_aside, reveal
from hybrid.checkpoint.folder import write_file
from hybrid.checkpoint.held import Region, model_entry
from hybrid.checkpoint.saving import as_bytes, dtype_name
from hybrid.checkpoint.torch_file import tied_in, torch_file_name, write_torch_file, write_torch_index
from hybrid.checkpoint.weight_files import INDEX_NAME, WeightFiles, WeightFilesWriter, natural_order, plan_weight_files
from hybrid.compose.checkpoint_job import (
    Job,
    agree,
    begin,
    distinct_buffers,
    extra_states,
    held_by,
    path_of,
    tied_names,
    writes_first,
)
from hybrid.contracts.ranges import coverage_problem
from hybrid.errors import CheckpointError
from hybrid.units import format_bytes, parse_bytes

__all__ = ["export_weights"]

Format = Literal["safetensors", "torch"]
Value = TypeVar("Value")

_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"

# What a file system needs besides the data: headers, blocks half full.
_SPARE_BYTES = 1 << 20


def export_weights(
    model: Any,
    path: str | os.PathLike[str],
    *,
    format: Format = "safetensors",
    max_shard_bytes: int | str = 5_000_000_000,
) -> Path:
    """Write the weights as the plain model has them: names, shapes, types, persistent buffers. *Collective.*

    The folder is one that `from_pretrained` loads: `model.safetensors`, or several files and their index; of a model
    of `transformers` also `config.json`. Each rank writes what it holds to its place in the files, replicas a share
    each: nothing is gathered, and a rank holds no more beside its shards than one parameter's part of its own. The
    folder gets its name when everything in it is on the disk; an earlier export stands until then.

    Args:
        model: from `distributed_model`.
        path: the folder, on a file system that every rank sees. It may hold an earlier export, which is replaced, and
            nothing else.
        format: "safetensors", where of tied weights one name is there, as `transformers` expects; or "torch", files
            for `torch.load` with all names. That needs the space twice while it is written.
        max_shard_bytes: weights in one file, unless one tensor alone has more; a number or a text such as "5GB".

    A float32 parameter that computes in low precision comes as its fp32 master. Buffers (BatchNorm statistics are each
    rank's own) are those of the first data-parallel rank.

    Returns:
        The folder.

    Raises:
        CheckpointError: wrong arguments, something in the folder that is no export, a disk that is full or read-only.
        CollectiveError: a rank is gone, or did not call within the timeout.
    """
    target = path_of(path, call="export_weights")
    asked = {"path": str(target), "format": format, "max_shard_bytes": max_shard_bytes}
    job = begin("export_weights", model, None, asked)
    plan = _prepare(job, target, format, max_shard_bytes)
    aside: Path | None = None
    try:
        aside = _together(job, plan, "folder", lambda: _make_room(job, plan), first_only=True)
        _together(job, plan, "weights", lambda: _write(plan, aside))
        if plan.format == "torch":
            _together(job, plan, "files of torch.save", lambda: _convert(job, plan, aside))
        left = "There is what was there before or the new one, whole"
        _together(job, plan, "end", lambda: _finish(plan, aside), first_only=True, left=left)
    finally:
        if aside is not None and job.runtime.mesh.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    target: Path
    format: Format
    files: WeightFiles
    regions: list[Region]
    """What this rank writes."""
    tied: dict[str, str]
    """Other name -> the name in the files."""

    @property
    def needed_bytes(self) -> int:
        return self.files.num_bytes * (2 if self.format == "torch" else 1)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A rectangle that a rank writes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def _prepare(job: Job, target: Path, format: Any, max_shard_bytes: Any) -> _Plan:
    """What will be written. *Collective.* Raises CheckpointError: what can be seen before anything is."""
    regions: list[Region] = []
    tied: dict[str, str] = {}
    most = 0
    problem: BaseException | None = None
    try:
        most = _checked(format, max_shard_bytes)
        regions, tied = _regions(job)
    except Exception as error:  # a module's own `get_extra_state` may raise anything
        problem = error
    mine = [
        _Piece(
            region.name.removeprefix(MODEL_PREFIX), dtype_name(region.dtype), region.shape, region.offsets, region.sizes
        )
        for region in regions
    ]
    everyone = agree((mine, tied), problem, runtime=job.runtime, what="export_weights, contents")
    for _, names in everyone:
        tied |= names
    files = plan_weight_files(_entries(piece for pieces, _ in everyone for piece in pieces), most)
    return _Plan(target=target, format=format, files=files, regions=regions, tied=dict(sorted(tied.items())))


def _checked(format: Any, max_shard_bytes: Any) -> int:
    """The largest number of bytes in a file. Raises CheckpointError: an argument that is none."""
    if format not in {"safetensors", "torch"}:
        raise CheckpointError(f"export_weights: format = {format!r}: must be 'safetensors' or 'torch'")
    most = max_shard_bytes
    try:
        most = parse_bytes(most) if isinstance(most, str) else most
    except ValueError as error:
        raise CheckpointError(f"export_weights: max_shard_bytes: {error}") from None
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise CheckpointError(
            f"export_weights: max_shard_bytes = {max_shard_bytes!r}: must be a number of bytes, at least 1, or a text "
            "such as '5GB'"
        )
    return most


def _regions(job: Job) -> tuple[list[Region], dict[str, str]]:
    """What this rank writes, and which other names the tensors have."""
    runtime, model = job.runtime, job.model
    assert model is not None
    held = held_by(runtime)
    runtime.engine.gather.finish()
    buffers, tied_buffers = distinct_buffers(model)
    regions = held.parameters("write")
    regions += held.buffers({fqn: buffer for fqn, buffer in buffers.items() if writes_first(runtime, fqn)})
    states = {name: module.get_extra_state() for name, module in extra_states(model) if writes_first(runtime, name)}
    others = [
        f"{name} ({type(state).__name__})" for name, state in states.items() if not isinstance(state, torch.Tensor)
    ]
    if others:
        raise CheckpointError(
            f"export_weights: files of weights hold tensors, and these modules' get_extra_state() gives none: "
            f"{', '.join(others)}; save_checkpoint keeps it"
        )
    regions += [
        Region(
            name=model_entry(name),
            kind="buffer",
            dtype=state.dtype,
            shape=tuple(state.shape),
            offsets=(0,) * state.dim(),
            tensor=state,
        )
        for name, state in states.items()
    ]
    return regions, tied_names(runtime) | tied_buffers


def _entries(pieces: Iterable[_Piece]) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of each tensor, layer by layer.

    Raises:
        CheckpointError: an element that nobody writes, or two ranks do: a fault of ours, not of the user.
    """
    of_name: dict[str, list[_Piece]] = {}
    for piece in pieces:
        of_name.setdefault(piece.name, []).append(piece)
    problems = []
    for name, parts in of_name.items():
        if len({(part.dtype, part.shape) for part in parts}) > 1:
            problems.append(f"{name}: of {len({(part.dtype, part.shape) for part in parts})} types or shapes")
        problem = coverage_problem(parts[0].shape, [(part.offsets, part.sizes) for part in parts])
        if problem is not None:
            problems.append(f"{name}: {problem}")
    if problems:
        raise CheckpointError("the ranks do not write each element once: " + "; ".join(problems))
    return [(name, of_name[name][0].dtype, of_name[name][0].shape) for name in sorted(of_name, key=natural_order)]


# -- files ---------------------------------------------------------------------------------------------------------


def _together(
    job: Job,
    plan: _Plan,
    what: str,
    action: Callable[[], Value],
    *,
    first_only: bool = False,
    left: str = "What was there before stands",
) -> Value:
    """Do something on every rank, or on the first one; all go on, or all raise. *Collective.*

    Args:
        left: for the message: what is there after an error.

    Returns:
        What it gave on the first rank.
    """
    value: Value | None = None
    problem: BaseException | None = None
    if not first_only or job.runtime.mesh.rank == 0:
        try:
            value = action()
        except Exception as error:  # any of them must end all ranks alike
            problem = error
    try:
        everyone = agree(value, problem, runtime=job.runtime, what=f"export_weights, {what}")
    except CheckpointError as error:
        num_bytes = plan.needed_bytes
        raise CheckpointError(
            f"the weights could not be exported to {plan.target}, which needs {format_bytes(num_bytes)} ({num_bytes} "
            f"bytes): {error}. {left}"
        ) from problem
    first: Value = everyone[0]
    return first


def _make_room(job: Job, plan: _Plan) -> Path:
    """The folder to write into, with the files at their full size and what says which model it is."""
    texts = _configs(job)
    check_target(plan.target, also_replaced=frozenset(texts))
    aside = new_aside(plan.target, secrets.token_hex(4))
    try:
        free = shutil.disk_usage(aside).free
        if free < plan.needed_bytes + _SPARE_BYTES:
            raise CheckpointError(
                f"{format_bytes(free)} ({free} bytes) are free there; free some or choose another folder"
            )
        for name, text in texts.items():
            write_file(aside / name, text.encode(), checksum=False)
        plan.files.create(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return aside


def _write(plan: _Plan, aside: Path) -> None:
    """This rank's pieces."""
    try:
        with WeightFilesWriter(plan.files, aside) as writer:
            for region in plan.regions:
                name = region.name.removeprefix(MODEL_PREFIX)
                writer.write_box(name, region.offsets, region.sizes, as_bytes(region.tensor, region.dtype))
            writer.finish()
    except FileNotFoundError as error:
        raise CheckpointError(f"{error}; the folder must be on a file system that every rank sees") from error


def _convert(job: Job, plan: _Plan, aside: Path) -> None:
    """This rank's share of the files, as files of torch.save."""
    mesh = job.runtime.mesh
    for file in plan.files.files[mesh.rank :: mesh.world_size]:
        one = WeightFiles(files=(file,), index=None)
        write_torch_file(aside, one, aside / torch_file_name(file.name), tied=tied_in(file, plan.tied))


def _finish(plan: _Plan, aside: Path) -> None:
    if plan.format == "torch":
        for file in plan.files.files:
            (aside / file.name).unlink()
        (aside / INDEX_NAME).unlink(missing_ok=True)
        write_torch_index(aside, plan.files, tied=plan.tied)
    reveal(aside, plan.target)


def _configs(job: Job) -> dict[str, str]:
    """What a model of `transformers` is told by, name -> text; nothing for another model."""
    model = job.model
    config: Any = getattr(model, "config", None)
    if model is None or not callable(getattr(config, "to_json_string", None)):
        return {}
    document = json.loads(config.to_json_string())
    document["architectures"] = [type(model).__name__]
    dtypes = [record.dtype for record in job.runtime.engine.placements.values()]
    real = [name for name in dtypes if getattr(torch, name).is_floating_point]
    if real:
        document["torch_dtype" if "torch_dtype" in document else "dtype"] = real[0]
    texts = {_CONFIG: json.dumps(document, indent=2, sort_keys=True) + "\n"}
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)):
        document = json.loads(generation.to_json_string())
        document.pop("compile_config", None)  # of this process, as in `save_pretrained`
        texts[_GENERATION_CONFIG] = json.dumps(document, indent=2, sort_keys=True) + "\n"
    return texts
