"""Which checkpoint is loaded: the newest complete one, or the one asked for, with its files verified."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from hybrid.checkpoint import folder as folders
from hybrid.checkpoint.manifest import MANIFEST_NAME, Manifest
from hybrid.checkpoint.verify import share_of_files, verify
from hybrid.compose.checkpoint_job import Job, agree, whole_number
from hybrid.errors import CheckpointError, HybridError
from hybrid.launch.variables import resume_directory

__all__ = ["Chosen", "choose"]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    path: Path
    manifest: Manifest
    passed_over: tuple[str, ...] = ()


def choose(
    job: Job, directory: Path | None, *, step: int | Literal["latest"], fallback: bool, checksums: bool
) -> Chosen | None:
    """The checkpoint to load, verified; None at the first start of a run that can be resumed. *Collective.*"""
    runtime = job.runtime
    passed_over: list[str] = []
    too_new: dict[Path, str] = {}
    while True:
        path, problem = None, None
        if runtime.mesh.rank == 0:
            try:
                path, said = _find_folder(directory, step, damaged=too_new)
                passed_over += [one for one in said if one not in passed_over]
            except (HybridError, OSError) as error:
                problem = error
        path, everything = agree((path, passed_over), problem, runtime=runtime, what="load_checkpoint")[0]
        if path is None:
            return None
        manifest = _together(job, f"load_checkpoint of {path}", partial(folders.read_manifest, path))
        digest = hashlib.sha256(manifest.to_json().encode()).hexdigest()
        digests = agree(digest, None, runtime=runtime, what="load_checkpoint, manifest")
        if len(set(digests)) > 1:
            raise CheckpointError(
                f"the ranks read different manifests in {path}: it must be one folder on a file system that all see"
            )
        world = runtime.mesh.world
        names = share_of_files(manifest, rank=world.rank, size=world.size)
        damaged = agree(
            verify(path, manifest, names=names, checksums=checksums),
            None,
            runtime=runtime,
            what="load_checkpoint, files",
        )
        problems = [problem for of_rank in damaged for problem in of_rank]
        if not problems:
            if everything and runtime.mesh.rank == 0:
                warnings.warn(f"load_checkpoint takes {path}, because: {'; '.join(everything)}", stacklevel=4)
            return Chosen(path=path, manifest=manifest, passed_over=tuple(everything))
        text = f"{path} is damaged: {'; '.join(problems)}"
        if not fallback or step != "latest":
            hint = "" if step != "latest" else "; fallback=True takes the newest one that is not"
            raise CheckpointError(f"{text}{hint}")
        passed_over = [*everything, text]
        too_new[path] = text


def _find_folder(
    directory: Path | None, step: int | str, *, damaged: Mapping[Path, str]
) -> tuple[Path | None, list[str]]:
    """The folder, and what is said of newer ones; no folder at a first start.

    Args:
        damaged: those that were verified, and what was found: no longer taken.

    Raises:
        CheckpointError: there is none.
    """
    if directory is None:
        directory = resume_directory()
        if step == "latest" and (directory is None or _is_empty(directory)):
            return None, []
        if directory is None:
            raise CheckpointError(
                f"load_checkpoint(None, step={step}) takes the directory of `hybrid run --resume DIR`, which was not "
                "given: pass the directory"
            )
    path = directory.absolute()
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}, so no checkpoint can be loaded from it")
    if (path / MANIFEST_NAME).exists():  # one checkpoint itself
        if step != "latest" and step != folders.read_manifest(path).step:
            raise CheckpointError(f"{path} is the checkpoint of one step, and step = {step} is asked for")
        if path in damaged:
            raise CheckpointError(f"{damaged[path]}. It is one checkpoint: there is no other to fall back to")
        return path, []
    listed = [one for one in folders.list_steps(path) if one.path not in damaged]
    if step != "latest":
        number = whole_number(step)
        if number is None:
            raise CheckpointError(f"step must be a number or 'latest', got {step!r}")
        found = [one for one in listed if one.step == number]
        complete = [one for one in found if one.problem is None]
        if complete:
            return complete[0].path, []
        steps = ", ".join(str(one.step) for one in listed if one.problem is None)
        why = f": {found[0].problem}" if found else ""
        raise CheckpointError(f"{path} has no complete checkpoint of step {step}{why}; complete are {steps or 'none'}")
    said: list[str] = []
    for one in listed:
        if one.problem is None:
            return one.path, said
        said.append(f"{one.path.name} was passed over: {one.problem}")
    said += damaged.values()
    raise CheckpointError(f"{path} has no complete checkpoint{': ' + '; '.join(said) if said else ''}")


def _is_empty(directory: Path) -> bool:
    """Whether nothing was saved in it so far. Whatever is there, also if damaged, is no first start."""
    return not (directory / MANIFEST_NAME).exists() and not folders.list_steps(directory)


def _together(job: Job, what: str, work: Callable[[], _Result]) -> _Result:
    """Do something that may fail on this rank alone; then it fails on all of them."""
    result: _Result | None = None
    problem: BaseException | None = None
    try:
        result = work()
    except (HybridError, OSError) as error:
        problem = error
    agree(None, problem, runtime=job.runtime, what=what)
    assert result is not None
    return result
