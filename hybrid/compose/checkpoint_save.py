"""`save_checkpoint` and `async_save_checkpoint`: the training state on disk, whole or not at all.

prepare    every rank: which model, what it holds, plain state; all agree, or all get the same error
(stage)    async: copies of the tensors, in which training cannot change anything any more
write      plain state to the first rank; files aside, fsynced; manifest; one rename         checkpoint/saving.py
"""

from __future__ import annotations

import datetime
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid import __version__
from hybrid.checkpoint import folder as folders
from hybrid.checkpoint.held import Region
from hybrid.checkpoint.manifest import Entry, FileRecord, Manifest
from hybrid.checkpoint.saving import write_regions
from hybrid.checkpoint.together import gather, meet
from hybrid.collectives.group import Group
from hybrid.collectives.pickled import pickled
from hybrid.compose import async_save, training_state
from hybrid.compose.checkpoint_contents import STATE_FILE, Beginning, Document, Found, Plain, begun, find, finished
from hybrid.compose.checkpoint_job import (
    Job,
    agree,
    begin_with,
    layout_record,
    path_of,
    refuse_saving_gradients,
    tied_names,
    whole_number,
)
from hybrid.compose.runtime import Runtime
from hybrid.errors import CheckpointError, CollectiveError

__all__ = ["AsyncSave", "async_save_checkpoint", "save_checkpoint"]

AsyncSave = async_save.AsyncSave

# What a file system needs besides the data: headers, blocks half full.
_SPARE_BYTES = 1 << 20


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    lr_scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    checksums: bool = True,
) -> Path:
    """Write the training state as `directory/step_<step>`; any layout can load it. *Collective.*

    Each rank writes what it holds, replicas a share each; nothing is gathered. The folder gets its name when
    everything in it is on the disk: whatever happens before, the checkpoints that were complete stay.

    Args:
        directory: of all checkpoints of the job, on a file system that every rank sees.
        model: from `distributed_model`; None with no optimizer: the one that was wrapped. A number is the step
            (Fleet's form: `save_checkpoint("ckpt_dir", epoch)`).
        optimizer: from `distributed_optimizer`; None with a model: weights alone.
        step: number of the checkpoint, 0 or more. One that exists is replaced.
        lr_scheduler, scaler, sampler: anything with `state_dict()` and `load_state_dict()`. The strategy's own loss
            scaler (float16) is saved by itself.
        extra: numbers, text, tensors, and lists and dicts of them.
        keep_last: remove older checkpoints of the directory but the newest so many.
        keep_every: of those, keep each whose step is a multiple.
        checksums: XXH3-64 of every file, which loading verifies; off only for speed.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: something that cannot be saved, a disk that is full or read-only, ranks that do not call
            alike, or an earlier async save that failed.
        CollectiveError: a rank is gone, or did not call within the timeout.
    """
    prepared = _prepare(
        "save_checkpoint",
        directory,
        model,
        optimizer,
        step=step,
        keep=(keep_last, keep_every),
        checksums=checksums,
        state={"lr_scheduler": lr_scheduler, "scaler": scaler, "sampler": sampler, "extra": extra},
    )
    return _write(prepared)


def async_save_checkpoint(
    directory: str | os.PathLike[str],
    model: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    lr_scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    checksums: bool = True,
) -> AsyncSave:
    """`save_checkpoint`, whose files are written while training goes on; the call lasts as long as one copy.

    The copy stays in memory (one copy of what this rank writes) until the next save. A save that failed raises at the
    next save, at `wait()` of what is returned, or ends the process with an error at its exit. Two never overlap: a
    save waits for the one before it.
    """
    prepared = _prepare(
        "async_save_checkpoint",
        directory,
        model,
        optimizer,
        step=step,
        keep=(keep_last, keep_every),
        checksums=checksums,
        state={"lr_scheduler": lr_scheduler, "scaler": scaler, "sampler": sampler, "extra": extra},
        hold=async_save.staged,
    )
    return async_save.start(lambda: _write(prepared), step=prepared.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """All that a rank needs to write its part; nothing in it but `regions` changes when training goes on."""

    runtime: Runtime
    directory: Path
    step: int
    writing: Path
    regions: list[Region]
    plain: Plain
    beginning: Beginning | None
    """On the first rank."""
    total_bytes: int
    layout: dict[str, Any]
    tied: dict[str, str]
    keep: tuple[int | None, int | None]
    checksums: bool


def _prepare(
    call: str,
    directory: str | os.PathLike[str],
    model: Any,
    optimizer: Any,
    *,
    step: int | None,
    keep: tuple[int | None, int | None],
    checksums: bool,
    state: Mapping[str, Any],
    hold: Callable[[list[Region]], list[Region]] = list,
) -> _Prepared:
    """What this rank writes. *Collective:* a rank that cannot, for want of memory for `hold` too, stops all of them."""
    number = whole_number(model)
    if number is not None:  # Fleet's form
        if step is not None:
            raise CheckpointError(f"{call}: the second argument is the step {model}, and step = {step} is given too")
        model, step = None, number
    path = path_of(directory, call=call)
    step = step if whole_number(step) is None else whole_number(step)
    asked = {"directory": str(path), "step": step, "keep_last": keep[0], "keep_every": keep[1], "checksums": checksums}
    found: Found | None = None

    def look(job: Job) -> tuple[int, dict[str, str]]:
        nonlocal found
        _check(call, job, path, step=step, keep=keep)
        found = find(job, state)
        return found.num_bytes, training_state.state_digests(found.state)

    job, everyone = begin_with(call, model, optimizer, asked, prepare=look)
    runtime, mesh = job.runtime, job.runtime.mesh
    assert found is not None and step is not None
    training_state.check_agreement(runtime, found.state, [digests for _, digests in everyone])
    groups = job.optimizer.whole_groups() if job.optimizer is not None else None
    total = sum(num_bytes for num_bytes, _ in everyone)
    regions: list[Region] = []
    made: Path | None = None
    beginning: Beginning | None = None
    problem: BaseException | None = None
    try:
        if mesh.rank == 0:
            beginning = begun(job, found, groups)
            total += beginning.num_bytes
            made = _make_room(path, step, total)
        regions = hold(found.regions)
    except Exception as error:
        problem = error
    try:
        writing, total = agree((made, total), problem, runtime=runtime, what=f"{call}, folder")[0]
    except CheckpointError:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        raise
    return _Prepared(
        runtime=runtime,
        directory=path,
        step=step,
        writing=writing,
        regions=regions,
        plain=found.plain,
        beginning=beginning,
        total_bytes=total,
        layout=layout_record(runtime),
        tied=tied_names(runtime) if job.model is not None else {},
        keep=keep,
        checksums=checksums,
    )


def _check(call: str, job: Job, path: Path, *, step: int | None, keep: tuple[int | None, int | None]) -> None:
    """Raises CheckpointError: what can be seen before anything is collected."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"{call} needs step=..., a number of at least 0, got {step!r}")
    for name, value in zip(("keep_last", "keep_every"), keep, strict=True):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise CheckpointError(f"{call}: {name} must be a number of at least 1, got {value!r}")
    if keep[0] is None and keep[1] is not None:
        raise CheckpointError(f"{call}: keep_every = {keep[1]} without keep_last removes nothing; give keep_last too")
    refuse_saving_gradients(job, call=call)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{call}: {path} is a file; it must be a folder, or not exist")


# -- files ---------------------------------------------------------------------------------------------------------


def _make_room(path: Path, step: int, total_bytes: int) -> Path:
    """The folder to write into. Raises CheckpointError: the directory cannot be made, or has not enough space."""
    try:
        folders.make_directory(path)
        folders.sweep(path)
        is_back = any(number > step for number in folders.step_numbers(path))
        newest = folders.latest_complete(path)[0] if is_back else None  # which reads manifests
        if newest is not None and newest.step > step:
            warnings.warn(
                f"checkpoint of step {step}: {path} has one of step {newest.step}, which stays the latest; if this run "
                "went back to an earlier step, remove the later ones or save into another directory",
                stacklevel=4,
            )
        free = shutil.disk_usage(path).free
        if free < total_bytes + _SPARE_BYTES:
            raise CheckpointError(
                f"checkpoint of step {step}: it needs {_size(total_bytes)}, {_size(free)} are free at {path}; free "
                "some or choose another directory. Nothing was written, earlier checkpoints stand"
            )
        return folders.new_writing_folder(path, step, f"{os.getpid()}-{time.time_ns():x}")
    except OSError as error:
        raise _unwritten(path, step, total_bytes, str(error)) from error


def _write(prepared: _Prepared) -> Path:
    """Write this rank's part and, on the first rank, what makes it a checkpoint. *Collective.*"""
    group = prepared.runtime.mesh.host_world()
    try:
        document = _document(prepared, group)
        write_regions(
            [*prepared.regions, *(document.regions if document is not None else ())],
            prepared.writing,
            group=group,
            checksums=prepared.checksums,
            conclude=lambda entries, files: _conclude(prepared, document, entries, files),
        )
    except CheckpointError as error:
        _give_up(prepared)
        raise _unwritten(prepared.directory, prepared.step, prepared.total_bytes, str(error)) from error.__cause__
    except CollectiveError as error:
        raise CollectiveError(
            f"checkpoint of step {prepared.step}, being written to {prepared.directory}: {error}; earlier ones stand"
        ) from error.__cause__
    return prepared.directory / folders.step_folder_name(prepared.step)


def _give_up(prepared: _Prepared) -> None:
    if prepared.runtime.mesh.rank == 0:
        shutil.rmtree(prepared.writing, ignore_errors=True)


def _document(prepared: _Prepared, group: Group) -> Document | None:
    """All that is no tensor of a parameter's shape, on the first rank. *Collective.*"""
    document: Document | None = None
    problem: BaseException | None = None
    shared = gather(pickled(prepared.plain), group=group)
    try:
        if prepared.beginning is not None:
            document = finished(prepared.beginning, [pickle.loads(plain) for plain in shared])
    except Exception as error:
        problem = error
    meet(problem, group=group)
    return document


def _conclude(
    prepared: _Prepared, document: Document | None, entries: dict[str, Entry], files: dict[str, FileRecord]
) -> None:
    assert document is not None, "called on the first rank"
    state = document.text.encode()
    record = folders.write_file(prepared.writing / STATE_FILE, state, checksum=prepared.checksums)
    manifest = Manifest(
        hybrid_version=__version__,
        torch_version=torch.__version__,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        step=prepared.step,
        layout=prepared.layout,
        contents=document.contents,
        files={STATE_FILE: record, **files},
        entries=entries,
        tied=prepared.tied | document.tied_buffers if "model" in document.contents else {},
    )
    folders.write_manifest(prepared.writing, manifest)
    place = folders.commit(prepared.writing, prepared.directory, prepared.step)
    keep_last, keep_every = prepared.keep
    if keep_last is None:
        return
    try:
        folders.retain(prepared.directory, keep_last=keep_last, keep_every=keep_every, never=place)
    except (CheckpointError, OSError) as error:  # the checkpoint itself is complete
        warnings.warn(f"{place} is saved, but older checkpoints could not be removed: {error}", stacklevel=2)


def _unwritten(path: Path, step: int, total_bytes: int, said: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint of step {step} could not be written to {path}, it needs {_size(total_bytes)}: {said}. Earlier "
        "checkpoints stand"
    )


def _size(num_bytes: int) -> str:
    amount = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
