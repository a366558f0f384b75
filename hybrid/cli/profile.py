"""`hybrid profile`: where the time of a script's training steps goes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hybrid.launch.job import LaunchJob
from hybrid.launch.profile_request import ProfileRequest
from hybrid.launch.run import run_job
from hybrid.profile.profile import Profile
from hybrid.profile.table import profile_as_text
from hybrid.profile.timeline import TIMELINE_FILE, read_timelines
from hybrid.report.page import check_page_path, write_page
from hybrid.report.profile_page import profile_page

__all__ = ["profile"]


def profile(
    script: Annotated[str, typer.Argument(help="Python file, or with -m the name of a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, passed on as they are.")
    ] = None,
    nproc: Annotated[int, typer.Option("--nproc", help="Ranks on this machine.")] = 1,
    strategy: Annotated[
        Path | None,
        typer.Option("--strategy", metavar="FILE", help="Strategy file, as with hybrid run."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that are traced.")] = 3,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Steps before them that are not.")] = 3,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="DIR", help="For a trace per rank and profile.json; earlier ones are replaced."),
    ] = Path("hybrid_profile"),
    go_on: Annotated[
        bool, typer.Option("--go-on", help="Let the script run to its end, instead of ending it after the last step.")
    ] = False,
    log_dir: Annotated[
        Path, typer.Option("--log-dir", metavar="DIR", help="Each run makes a new folder in it.")
    ] = Path("hybrid_logs"),
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with the parts and a timeline.")
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print profile.json, and nothing of the script, to compare runs.")
    ] = False,
) -> None:
    """Trace a few training steps of a script: compute, communication by axis, what of it nothing hides, and advice.

    The script trains with model.train_batch and ends after the last traced step. Its profile_configs give way to
    the options here. The traces (rank<N>.trace.json) open in https://ui.perfetto.dev or chrome://tracing.

    \b
    Examples:
      hybrid profile --nproc 4 train.py --lr 1e-3
      hybrid profile --nproc 4 --strategy zero2.yaml --steps 5 --json train.py > zero2.json
      hybrid profile --nproc 4 --html profile.html train.py
    """
    request = ProfileRequest(steps=steps, warmup=warmup, directory=str(out.resolve()), goes_on=go_on)
    job = LaunchJob(
        script=script,
        arguments=tuple(arguments or ()),
        is_module=module,
        num_processes=nproc,
        strategy=strategy,
        log_dir=log_dir,
        environment=request.environment(),
        show_output=not json_output,
    )
    check_page_path(html, option="--html")
    job.check()
    request.facts_path.unlink(missing_ok=True)
    (out / TIMELINE_FILE).unlink(missing_ok=True)
    outcome = run_job(job)
    if outcome.message:
        _say(outcome.message)
    if not request.facts_path.exists():
        if outcome.exit_code == 0:
            _say(
                f"the script ended before {warmup + steps} calls of model.train_batch ({warmup} to warm up, {steps} to "
                "trace), so there is no profile: let it train longer, or give --warmup and --steps; a loop with "
                "backward() and optimizer.step() is not profiled"
            )
        raise typer.Exit(outcome.exit_code or 1)
    text = request.facts_path.read_text(encoding="utf-8")
    if html is not None:
        made = profile_page(Profile.from_dict(json.loads(text)), read_timelines(out / TIMELINE_FILE))
        write_page(html, made, option="--html")
    if json_output:
        typer.echo(text)
    else:
        console = Console(highlight=False, markup=False, soft_wrap=True)
        for part in profile_as_text(Profile.from_dict(json.loads(text))):
            console.print(part)
    raise typer.Exit(outcome.exit_code)


def _say(text: str) -> None:
    print(f"\nhybrid profile: {text}", file=sys.stderr, flush=True)
