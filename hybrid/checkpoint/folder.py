"""The folder of a job's checkpoints: one folder per step, each complete by construction.

    step_00000100/                     got its name by a rename, after everything in it was on the disk
    .writing-step_00000120-<nonce>/    a save under way, or one that died: never looked at
    .old-step_00000100-<nonce>/        between the two renames of an overwrite: looked at like the first
    .gone-step_00000080-<nonce>/       on its way out: never looked at

A process that is killed at any moment, or a machine that stops, leaves every checkpoint that was complete complete and
findable. The next save clears up. One job at a time saves into a folder.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from hybrid.checkpoint.checksums import Checksum
from hybrid.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, parse_manifest
from hybrid.checkpoint.verify import verify
from hybrid.errors import CheckpointError

__all__ = [
    "StepFolder",
    "commit",
    "latest_complete",
    "list_steps",
    "list_writing",
    "make_directory",
    "new_writing_folder",
    "problem_of_files",
    "read_manifest",
    "retain",
    "scan",
    "step_folder_name",
    "step_numbers",
    "sweep",
    "sync_folder",
    "verify",
    "write_file",
    "write_manifest",
    "writing_folder_name",
]

_STEP = r"step_(\d{8,})"
_STEP_OR_OLD = re.compile(rf"{_STEP}|\.old-{_STEP}-.+")
_WRITING = re.compile(rf"\.writing-{_STEP}-.+")
_GONE = re.compile(rf"\.gone-{_STEP}-.+")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFolder:
    """One step's folder, looked at by its manifest and by the names and sizes of its files."""

    step: int
    path: Path
    problem: str | None  # why it is not a complete checkpoint
    manifest: Manifest | None = field(default=None, repr=False, compare=False)

    @property
    def is_aside(self) -> bool:
        """Whether an overwrite had renamed it, and did not come to its end."""
        return self.path.name.startswith(".old-")


# ---------------------------------------------------------------- looking


def step_folder_name(step: int) -> str:
    return f"step_{step:08d}"


def writing_folder_name(step: int, nonce: str) -> str:
    return f".writing-{step_folder_name(step)}-{nonce}"


def scan(directory: Path, *, step: int | None = None) -> Iterator[StepFolder]:
    """Each step's folder with its manifest, newest step first; one manifest is read at a time.

    Steps are compared as numbers. Of one step the folder of that name comes before what an overwrite put aside.

    Args:
        step: only this one.

    Raises:
        CheckpointError: `directory` cannot be read. One that does not exist yet has no steps.
    """
    for number, path in _step_paths(directory):
        if step is None or number == step:
            yield _look(path, number)


def step_numbers(directory: Path) -> list[int]:
    """Of the folders of steps, newest first, by their names alone."""
    return [number for number, _ in _step_paths(directory)]


def list_steps(directory: Path) -> list[StepFolder]:
    """As `scan`, without the manifests."""
    return [replace(found, manifest=None) for found in scan(directory)]


def list_writing(directory: Path) -> list[Path]:
    """What saves under way, or ones that died, have written so far; newest step first."""
    found = []
    for path in directory.iterdir():
        match = _WRITING.fullmatch(path.name)
        if match is not None:
            found.append((int(match.group(1)), path))
    return [path for _, path in sorted(found, reverse=True)]


def latest_complete(directory: Path) -> tuple[StepFolder | None, list[tuple[Path, str]]]:
    """The newest complete checkpoint, and which newer folders were passed over for which reason."""
    passed_over: list[tuple[Path, str]] = []
    for found in scan(directory):
        if found.problem is None:
            return found, passed_over
        passed_over.append((found.path, found.problem))
    return None, passed_over


def read_manifest(step_path: Path) -> Manifest:
    """The manifest of one step's folder, checked.

    Raises:
        CheckpointError: there is none, or it is damaged, of a newer form or not ours; names the file.
    """
    path = step_path / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{step_path} has no {MANIFEST_NAME}: it is not a checkpoint, or not a whole one"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return parse_manifest(text, source=str(path))


def problem_of_files(step_path: Path, manifest: Manifest) -> str | None:
    """Which file is missing or has another size than the manifest says; None if none."""
    for name, record in manifest.files.items():
        try:
            num_bytes = (step_path / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if num_bytes != record.bytes:
            return f"{name} has {num_bytes} bytes, expected {record.bytes}"
    return None


def _step_paths(directory: Path) -> list[tuple[int, Path]]:
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                match = _STEP_OR_OLD.fullmatch(entry.name)
                if match is None or not entry.is_dir():
                    continue
                step = int(match.group(1) or match.group(2))
                if step_folder_name(step) not in entry.name:  # more zeros than this program writes: not ours
                    continue
                is_aside = entry.name.startswith(".")
                found.append((step, not is_aside, entry.stat().st_mtime_ns, directory / entry.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read the folder {directory}: {error.strerror}") from error
    return [(step, path) for step, _, _, path in sorted(found, reverse=True)]


def _look(path: Path, step: int) -> StepFolder:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return StepFolder(step=step, path=path, problem=str(error))
    problem = problem_of_files(path, manifest)
    if manifest.step != step:
        problem = f"its {MANIFEST_NAME} is of step {manifest.step}: it was renamed, or copied from elsewhere"
    return StepFolder(step=step, path=path, problem=problem, manifest=manifest)


# ---------------------------------------------------------------- writing


def make_directory(directory: Path) -> None:
    """Make the folder of a job's checkpoints where it is not there yet, so that it outlives a crash of the machine."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        with suppress(PermissionError):  # one may be allowed to make a folder where one may not list them
            sync_folder(path.parent)


def new_writing_folder(directory: Path, step: int, nonce: str) -> Path:
    """Make the folder that a save of `step` writes into, and `directory` where it is not there yet.

    Raises:
        CheckpointError: something that is not our checkpoint has the step's name.
        OSError: as the system says it.
    """
    make_directory(directory)
    _check_replaceable(directory / step_folder_name(step))
    path = directory / writing_folder_name(step, nonce)
    path.mkdir()
    return path


def write_file(path: Path, data: bytes, *, checksum: bool) -> FileRecord:
    """A small file, new, on the disk when this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if not checksum:
        return FileRecord(bytes=len(data))
    total = Checksum()
    total.update(data)
    return FileRecord(bytes=len(data), xxh3_64=total.text())


def write_manifest(step_path: Path, manifest: Manifest) -> None:
    """The last file of a save; on the disk when this returns."""
    write_file(step_path / MANIFEST_NAME, manifest.to_json().encode(), checksum=False)


def commit(writing: Path, directory: Path, step: int, *, manifest: Manifest | None = None) -> Path:
    """Give a whole save its name, in place of an older save of the same step. All its files are on the disk already.

    Args:
        writing: the folder from `new_writing_folder`.
        manifest: what was written there, if the caller has it at hand; read otherwise.

    Raises:
        CheckpointError: a file is not there or not whole, or something that is not ours has the step's name.
        OSError: as the system says it. What was complete before is still there.
    """
    problem = problem_of_files(writing, read_manifest(writing) if manifest is None else manifest)
    if problem is not None:
        raise CheckpointError(
            f"the checkpoint of step {step} is not whole: in {writing} {problem}. If its files are written on several "
            f"machines, {directory} must be on a file system that they share"
        )
    sync_folder(writing)
    final = directory / step_folder_name(step)
    _check_replaceable(final)
    old = None
    if final.is_dir():
        old = directory / f".old-{final.name}-{secrets.token_hex(4)}"
        os.rename(final, old)
        sync_folder(directory)
    try:
        os.rename(writing, final)
    except OSError:
        if old is not None:
            os.rename(old, final)
        raise
    sync_folder(directory)
    if old is not None:
        with suppress(OSError):  # the checkpoint is there all the same; the next sweep removes the old one
            _discard(old)
    return final


def sync_folder(path: Path) -> None:
    """Names of files are content of their folder: they too must be brought to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # some network file systems have no such call
            raise
    finally:
        os.close(descriptor)


def _check_replaceable(final: Path) -> None:
    """What has the step's name must be a checkpoint of ours, perhaps damaged: never remove what somebody else made."""
    if os.path.lexists(final) and not (final / MANIFEST_NAME).is_file():
        raise CheckpointError(
            f"{final} is there and is not a checkpoint of hybrid (it has no {MANIFEST_NAME}); move it away, or save "
            f"into another folder than {final.parent}"
        )


# ---------------------------------------------------------------- removing


def sweep(directory: Path, *, keep: Collection[Path] = ()) -> None:
    """Clear up after saves that died: what they had written is removed, what they had put aside gets its name back.

    Call it when no save is under way, or name its folder in `keep`.
    """
    if not directory.is_dir():
        return
    for name in sorted(os.listdir(directory)):
        path = directory / name
        if _GONE.fullmatch(name):
            _remove(path)
        elif _WRITING.fullmatch(name) and path not in keep:
            _discard(path)
    by_step: dict[int, list[StepFolder]] = {}
    for step, path in _step_paths(directory):
        by_step.setdefault(step, []).append(StepFolder(step=step, path=path, problem=None))
    for step, folders in by_step.items():
        asides = [_look(one.path, step) for one in folders if one.is_aside]
        if not asides:
            continue
        final = directory / step_folder_name(step)
        if not os.path.lexists(final):
            best = next((one for one in asides if one.problem is None), asides[0])
            os.rename(best.path, final)
            sync_folder(directory)
            asides.remove(best)
        if _look(final, step).problem is None:
            for one in asides:
                _discard(one.path)


def retain(
    directory: Path, *, keep_last: int | None, keep_every: int | None = None, never: Path | None = None
) -> list[int]:
    """Remove older checkpoints; the newest complete one always stays, and whatever is not complete is left alone.

    Args:
        keep_last: how many complete ones stay, counted from the newest. None: all, unless `keep_every` is given.
        keep_every: those whose step is a multiple of it stay as well.
        never: the folder of one that stays whatever the other rules say.

    Returns:
        The steps that were removed.
    """
    if keep_last is not None and keep_last < 1:
        raise CheckpointError(f"keep_last is {keep_last}; the newest checkpoint always stays: give 1 or more, or None")
    if keep_every is not None and keep_every < 1:
        raise CheckpointError(f"keep_every is {keep_every}; give 1 or more steps, or None")
    if keep_last is None and keep_every is None:
        return []
    complete = [found for found in list_steps(directory) if found.problem is None and not found.is_aside]
    removed = []
    for found in reversed(complete[1 if keep_last is None else keep_last :]):  # a kill in between leaves the newer
        is_multiple = keep_every is not None and found.step % keep_every == 0
        if not is_multiple and found.path != never:
            _discard(found.path)
            removed.append(found.step)
    return removed


def _discard(path: Path) -> None:
    """Remove a folder: under its name it is there whole or not at all."""
    step = re.search(_STEP, path.name)
    assert step is not None, path
    gone = path.with_name(f".gone-{step.group()}-{secrets.token_hex(4)}")
    try:
        os.rename(path, gone)
    except FileNotFoundError:
        return
    sync_folder(path.parent)
    _remove(gone)  # what is left, such as a file that is open on NFS, goes at the next sweep


def _remove(path: Path) -> None:
    """A folder with all in it; of a link, by which somebody moved a checkpoint to another disk, the link alone."""
    if path.is_symlink():  # `rmtree` refuses these
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
