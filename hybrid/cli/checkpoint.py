"""`hybrid checkpoint`: look at checkpoints, check their files, export weights; one process, no process group."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from hybrid.checkpoint.export import (
    STATE_FILE,
    TORCH_NAME,
    check_target,
    export_step,
    model_files,
    new_aside,
    read_beside,
    reveal,
)
from hybrid.checkpoint.folder import StepFolder, list_writing, problem_of_files, read_manifest, scan
from hybrid.checkpoint.manifest import MANIFEST_NAME, Manifest
from hybrid.checkpoint.verify import verify as problems_of
from hybrid.cli.checkpoint_tables import Listing, Shown
from hybrid.errors import CheckpointError
from hybrid.units import format_bytes, parse_bytes

__all__ = ["commands"]

FORMATS = ("safetensors", "torch")
DEFAULT_SHARD = "5GB"

HELP = """
Look at checkpoints, check their files, export weights.

DIR is the folder that was given to save_checkpoint, or the folder of one step in it. Nothing is started: no ranks,
and but for `export --format torch` no torch.

\b
Examples:
  hybrid checkpoint ls runs/a                             every step; which one a resume takes
  hybrid checkpoint verify runs/a                         sizes and checksums of all files
  hybrid checkpoint show runs/a --match '*.attn.*'        what the latest one holds
  hybrid checkpoint export runs/a weights                 model.safetensors for others to load
"""

SETTINGS = {"help_option_names": ["-h", "--help"]}

commands = typer.Typer(
    name="checkpoint", no_args_is_help=True, add_completion=False, rich_markup_mode=None, context_settings=SETTINGS
)

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of checkpoints, or of one step.", show_default=False)
]
Step = Annotated[
    int | None, typer.Option("--step", metavar="N", help="Which step.  [default: the latest complete one]")
]


@commands.callback(help=HELP)
def checkpoint() -> None:
    """The group; its help is HELP."""


@commands.command("ls", context_settings=SETTINGS)
def ls(
    directory: Directory,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the checkpoints of a folder, newest first.

    Reads the manifests, and names and sizes of the other files. The last lines say which step a resume takes, and why
    newer ones are passed over.

    \b
    Examples:
      hybrid checkpoint ls runs/a
      hybrid checkpoint ls runs/a --json
    """
    listing = Listing(directory=directory)
    for found in _folders(directory):
        listing.add(found)
    listing.writing = [path.name for path in list_writing(directory)]
    if json_output:
        typer.echo(json.dumps(listing.to_dict(), indent=2, ensure_ascii=False))
    else:
        listing.print()


@commands.command("verify", context_settings=SETTINGS)
def verify(
    directory: Directory,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="Which step.  [default: all]")] = None,
) -> None:
    """Check that the files are those that were saved: sizes, checksums, headers.

    Reads everything. Each problem is one line; the exit code is 1 if there is any.

    \b
    Examples:
      hybrid checkpoint verify runs/a
      hybrid checkpoint verify runs/a --step 1000
      hybrid checkpoint verify runs/a/step_00001000
    """
    is_any_wrong = is_any_there = False
    for found in _folders(directory, step):
        is_any_there = True
        name = found.path.name
        problems = [] if found.problem is None else [found.problem]
        if found.manifest is not None:
            with _progress(name, found.manifest.num_bytes) as bar:
                # The look at sizes stops at the first wrong file; this one lists all of them.
                problems = problems_of(found.path, found.manifest, on_progress=bar.advance) or problems
        is_any_wrong = is_any_wrong or bool(problems)
        for problem in problems:
            typer.echo(f"{name}: {problem}")
        if found.manifest is not None and not problems:
            typer.echo(f"{name}: {_verdict(found.manifest)}")
    if not is_any_there:
        raise _nothing_there(directory, step)
    if is_any_wrong:
        raise typer.Exit(1)


@commands.command("show", context_settings=SETTINGS)
def show(
    directory: Directory,
    step: Step = None,
    match: Annotated[
        str | None,
        typer.Option("--match", metavar="PATTERN", help="Only entries of these names, such as '*.weight'."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what a checkpoint holds: entries, sizes, the layout that saved it.

    Reads the manifest alone. An entry is one tensor under its name in the plain model (model.NAME), or of its
    optimizer's state (optimizer.NAME.KEY); its pieces lie in the files of several ranks.

    \b
    Examples:
      hybrid checkpoint show runs/a
      hybrid checkpoint show runs/a --step 1000 --match 'model.*'
      hybrid checkpoint show runs/a --json
    """
    found, manifest = _chosen(directory, step)
    shown = Shown(
        path=found.path,
        manifest=manifest,
        problem=found.problem,
        names=[name for name in manifest.entries if match is None or fnmatchcase(name, match)],
    )
    if match is not None and not shown.names:
        raise typer.BadParameter(f"no entry has a name like {match!r}", param_hint="--match")
    if json_output:
        typer.echo(json.dumps(shown.to_dict(), indent=2, ensure_ascii=False))
    else:
        shown.print()


@commands.command("export", context_settings=SETTINGS)
def export(
    directory: Directory,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="New folder, or one of an earlier export.", show_default=False)
    ],
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="|".join(FORMATS),
            help=f"safetensors files, or {TORCH_NAME}, a state dict for torch.load.",
        ),
    ] = "safetensors",
    max_shard_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-shard-bytes",
            metavar="BYTES",
            help=f"Most weights in one safetensors file.  [default: {DEFAULT_SHARD}]",
        ),
    ] = None,
    step: Step = None,
    no_checksums: Annotated[
        bool, typer.Option("--no-checksums", help="Trust the files; read only the weights in them.")
    ] = False,
) -> None:
    """Write the model's weights as ordinary files, under the plain model's names.

    safetensors: model.safetensors, or several files with an index, as transformers reads and writes them; of tied
    weights one name is there. torch: one file with all names. The weights are copied piece by piece, so the model may
    be larger than memory. OUT appears when everything is on the disk. The config.json of a transformers model is in no
    checkpoint: copy it into OUT.

    \b
    Examples:
      hybrid checkpoint export runs/a weights
      hybrid checkpoint export runs/a weights --step 1000 --max-shard-bytes 2GB
      hybrid checkpoint export runs/a weights --format torch
    """
    if format_ not in FORMATS:
        raise typer.BadParameter(f"is {format_!r}; expected one of {', '.join(FORMATS)}", param_hint="--format")
    if format_ == "torch" and max_shard_bytes is not None:
        raise typer.BadParameter("is for safetensors files; --format torch writes one", param_hint="--max-shard-bytes")
    try:
        most = parse_bytes(DEFAULT_SHARD if max_shard_bytes is None else max_shard_bytes)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-shard-bytes") from None
    target = out.absolute()
    check_target(target)
    found, manifest = _chosen(directory, step)
    if found.problem is not None:
        raise CheckpointError(f"{found.path} is not complete: {found.problem}")
    _export(found.path, manifest, target, is_torch=format_ == "torch", most=most, checksums=not no_checksums)


def _export(path: Path, manifest: Manifest, target: Path, *, is_torch: bool, most: int, checksums: bool) -> None:
    beside = read_beside(path, manifest)
    files = model_files(manifest, most, beside)
    stored = [entry for name, entry in manifest.entries.items() if name.startswith("model.")]
    stored += [manifest.entries[name] for name in beside.extra.values()]
    needed = sorted({STATE_FILE} | {chunk.file for entry in stored for chunk in entry.chunks})
    total = sum(manifest.files[name].bytes for name in needed) if checksums else 0
    with _progress("checking", total) as bar:
        problems = problems_of(path, manifest, names=needed, checksums=checksums, on_progress=bar.advance)
    if problems:
        raise CheckpointError(f"nothing was exported from {path}: {'; '.join(problems)}")
    aside: Path | None = None
    try:
        aside = new_aside(target, secrets.token_hex(4))
        room, wanted = shutil.disk_usage(aside).free, files.num_bytes * (2 if is_torch else 1)
        if room < wanted:
            raise CheckpointError(
                f"the export needs {format_bytes(wanted)} ({wanted} bytes) in {target.parent}, which has "
                f"{format_bytes(room)}"
            )
        with _progress("writing", sum(entry.num_bytes for entry in stored)) as bar:
            export_step(path, manifest, aside, files, beside=beside, on_progress=bar.advance)
        names = [file.name for file in files.files]
        if is_torch:
            from hybrid.checkpoint.torch_file import write_torch_file  # torch: only where it is asked for

            write_torch_file(aside, files, aside / TORCH_NAME, tied=manifest.tied)
            for name in names:
                (aside / name).unlink()
            names = [TORCH_NAME]
        reveal(aside, target)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {target}: {error.strerror or error}; {files.num_bytes} bytes are needed"
        ) from error
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
    num_tensors = sum(len(file.tensors) for file in files.files)
    typer.echo(
        f"step {manifest.step}: {num_tensors} tensors, {format_bytes(files.num_bytes)} in {target}: {_joined(names)}"
    )
    if manifest.tied and not is_torch:
        pairs = ", ".join(f"{name} (is {stored})" for name, stored in manifest.tied.items())
        typer.echo(f"tied, stored once: {pairs}")
    if beside.left_out:
        others = ", ".join(f"{name} ({kind})" for name, kind in beside.left_out.items())
        typer.echo(
            f"left out, since files of weights hold tensors and these modules' get_extra_state() gave none: {others}; "
            "load_checkpoint restores it",
            err=True,
        )
    typer.echo(
        "a model of transformers needs its config.json beside these: copy it from the original model's folder, or use "
        "hybrid.export_weights, which writes it"
    )


def _folders(directory: Path, step: int | None = None) -> Iterator[StepFolder]:
    """The steps of a folder, or the one that the folder is."""
    if not directory.is_dir():
        raise typer.BadParameter(f"{directory} is not a folder", param_hint="DIR")
    if not (directory / MANIFEST_NAME).is_file():
        yield from scan(directory, step=step)
        return
    manifest = read_manifest(directory)
    if step is None or step == manifest.step:
        problem = problem_of_files(directory, manifest)
        yield StepFolder(step=manifest.step, path=directory.absolute(), problem=problem, manifest=manifest)


def _chosen(directory: Path, step: int | None) -> tuple[StepFolder, Manifest]:
    """The step that is asked for, or the latest complete one; what is passed over is said."""
    problems: list[str] = []
    for found in _folders(directory, step):
        if found.manifest is not None and (found.problem is None or step is not None):
            for problem in problems:
                typer.echo(f"passed over {problem}", err=True)
            return found, found.manifest
        problems.append(f"{found.path.name}: {found.problem}")
    if not problems:
        raise _nothing_there(directory, step)
    raise CheckpointError(f"{directory} holds no complete checkpoint: {'; '.join(problems)}")


def _nothing_there(directory: Path, step: int | None) -> CheckpointError:
    which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    return CheckpointError(
        f"{directory} holds {which}: expected folders such as step_00001000, or {MANIFEST_NAME}; "
        f"`hybrid checkpoint ls` lists what is there"
    )


def _verdict(manifest: Manifest) -> str:
    size = f"{len(manifest.files)} files, {format_bytes(manifest.num_bytes)}"
    without = sum(record.xxh3_64 is None for record in manifest.files.values())
    if without == 0:
        return f"whole ({size})"
    which = "it was" if without == len(manifest.files) else f"{without} files were"
    return f"sizes and headers as saved ({size}); {which} saved without checksums"


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


class _Bar:
    """How far a reading has come; on a terminal only."""

    def __init__(self, progress: Progress, description: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(description, total=total)

    def advance(self, num_bytes: int) -> None:
        self._progress.advance(self._task, num_bytes)


@contextmanager
def _progress(description: str, total: int) -> Iterator[_Bar]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield _Bar(progress, description, total)
