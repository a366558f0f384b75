"""`hybrid run`: a script on many ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hybrid.checkpoint.folder import latest_complete, step_folder_name
from hybrid.checkpoint.manifest import MANIFEST_NAME
from hybrid.cli.folder import given_folder
from hybrid.errors import LaunchError
from hybrid.launch.job import LaunchJob
from hybrid.launch.restart import run_with_restarts
from hybrid.launch.run import run_job

__all__ = ["run"]

NODES = "More than one machine"
RESTARTS = "Going on after a failure"


def run(
    script: Annotated[str, typer.Argument(help="Python file, or with -m the name of a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, passed on as they are.")
    ] = None,
    nproc: Annotated[int, typer.Option("--nproc", help="Ranks on this machine.")] = 1,
    strategy: Annotated[
        Path | None,
        typer.Option(
            "--strategy",
            metavar="FILE",
            help="Strategy file (YAML or JSON): checked for this number of ranks before any process starts, "
            "then taken by hybrid.distributed_model(model).",
        ),
    ] = None,
    log_dir: Annotated[
        Path, typer.Option("--log-dir", metavar="DIR", help="Each run makes a new folder in it.")
    ] = Path("hybrid_logs"),
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="DIR",
            parser=given_folder,
            help="Folder in which the script saves checkpoints: hybrid.load_checkpoint(None, ...) continues from the "
            "newest complete one in it, and hybrid.resume_directory() names it. Empty or missing at the first start.",
            rich_help_panel=RESTARTS,
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            metavar="N",
            help="After a failure start all ranks again, N times at most. Not after Ctrl-C or SIGTERM, and not when "
            "three attempts in a row end in the same error without a new checkpoint. Needs --resume; one machine.",
            rich_help_panel=RESTARTS,
        ),
    ] = 0,
    min_nproc: Annotated[
        int | None,
        typer.Option(
            "--min-nproc",
            metavar="M",
            help="A restart may use fewer ranks, M at least, as far as the strategy file (or its absence) allows: when "
            "ranks were killed by a signal in two attempts in a row, and either the same rank both times or no "
            "checkpoint came in between.  [default: as --nproc]",
            rich_help_panel=RESTARTS,
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    nnodes: Annotated[int, typer.Option("--nnodes", help="Number of machines.", rich_help_panel=NODES)] = 1,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", help="Number of this machine, from 0.", rich_help_panel=NODES)
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master-addr", help="Address of machine 0.", rich_help_panel=NODES)
    ] = None,
    master_port: Annotated[
        int | None, typer.Option("--master-port", help="Free port on machine 0 [29500].", rich_help_panel=NODES)
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            help="Meeting point instead of node rank and address (torchrun's c10d).",
            rich_help_panel=NODES,
        ),
    ] = None,
    rdzv_id: Annotated[
        str | None,
        typer.Option(
            "--rdzv-id",
            metavar="NAME",
            help="Name of the job at the meeting point, the same on its machines [$SLURM_JOB_ID].",
            rich_help_panel=NODES,
        ),
    ] = None,
) -> None:
    """Run a script on many ranks, with torchrun underneath.

    Rank 0's output is shown; the output of each rank is in DIR/<time>/rank<N>.stdout and .stderr. When one
    rank fails, dies or hangs, all are ended, and the failing rank's own traceback is printed last. Ctrl-C
    ends all.

    \b
    Examples:
      hybrid run --nproc 4 train.py --lr 1e-3
      hybrid run --nproc 4 --strategy zero2.yaml -m package.train
      hybrid run --nproc 4 --resume checkpoints --max-restarts 3 train.py
      hybrid run --nproc 8 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 train.py
    """
    job = LaunchJob(
        script=script,
        arguments=tuple(arguments or ()),
        is_module=module,
        num_processes=nproc,
        num_nodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
        strategy=strategy,
        resume=resume,
        max_restarts=max_restarts,
        min_processes=min_nproc,
        log_dir=log_dir,
    )
    if nproc == 1 and any(one.partition("=")[0] == "--nproc" for one in arguments or ()):
        _say(f"one rank: --nproc behind {script} is handed to the script; hybrid run's own stands before it")
    job.check()
    directory = job.resume_directory
    if directory is not None:
        if (directory / MANIFEST_NAME).exists():
            raise LaunchError(
                f"{directory} is itself a checkpoint; give the folder that it lies in: --resume {directory.parent}"
            )
        newest = newest_checkpoint(directory)
        _say(
            f"the newest complete checkpoint in {directory} is {newest}"
            if newest
            else f"no complete checkpoint in {directory} yet"
        )
    if directory is not None and max_restarts > 0:
        outcome = run_with_restarts(job, newest_checkpoint=lambda: newest_checkpoint(directory), say=_say)
    else:
        outcome = run_job(job)
    if outcome.message:
        _say(outcome.message)
    raise typer.Exit(outcome.exit_code)


def newest_checkpoint(directory: Path) -> str | None:
    """Name of the newest complete checkpoint; newer ones that are not complete are told."""
    newest, passed_over = latest_complete(directory.resolve())
    for folder, reason in passed_over:
        _say(f"passed over {folder.name}: {reason}")
    return None if newest is None else step_folder_name(newest.step)


def _say(text: str) -> None:
    print(f"\nhybrid run: {text}", file=sys.stderr, flush=True)
