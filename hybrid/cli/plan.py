"""`hybrid plan`: the layouts of a model on a cluster, ranked, with memory, time and reasons."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hybrid.cli.plan_trials import run_trials
from hybrid.errors import PlanError
from hybrid.planner.constraints import shape_problems
from hybrid.planner.job import Candidate
from hybrid.planner.plan import Plans, plan_request
from hybrid.planner.request import Request, read_fixed
from hybrid.planner.request_reading import OPTIMIZERS, PRECISIONS, contradictions, make_request, with_trials
from hybrid.planner.search import search, why
from hybrid.planner.trials import Trial, read_trials
from hybrid.report.launch_files import write_launch_files
from hybrid.report.page import check_page_path, write_page
from hybrid.report.plan_page import plan_page
from hybrid.report.plan_table import advice_lines, best_in_full, ranking, rejections
from hybrid.report.trial_table import trial_table
from hybrid.units import parse_bytes

__all__ = ["plan"]

_FILE_WIDTH = 200
_BEST = 8  # layouts that are shown where nobody says how many
_OTHER_FILES = frozenset({".csv", ".htm", ".html", ".md", ".py", ".sbatch", ".sh", ".toml", ".txt"})
_MOST_ROWS = 200  # of `--why`, beyond which it only counts


def plan(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="A preset (llama3-70b, gpt3-175b, ...), a Hugging Face config.json or its folder, or "
            "package.module:factory, which returns (model, sample).",
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster", metavar="NxMxDEVICE", help="Nodes × devices × kind, as 16x8xH100; or a YAML file; or `local`."
        ),
    ],
    global_batch: Annotated[int, typer.Option("--global-batch", metavar="SAMPLES", help="Per optimizer step.")],
    seq: Annotated[
        int | None,
        typer.Option("--seq", metavar="TOKENS", help="Per sample.  [default: the model's]", show_default=False),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option("--network", metavar="8x400G", help="Of a node: cards × Gb/s.  [default: the device's usual]"),
    ] = None,
    oversubscription: Annotated[
        float | None, typer.Option("--oversubscription", help="Of the leaf switches; 1 for none.", show_default=False)
    ] = None,
    rails: Annotated[
        bool | None,
        typer.Option("--rails/--no-rails", help="Card i of every node on leaf switch i.", show_default=False),
    ] = None,
    domain: Annotated[
        int | None,
        typer.Option("--domain", metavar="DEVICES", help="Joined by fast links, where unusual.", show_default=False),
    ] = None,
    precision: Annotated[str, typer.Option("--precision", metavar="|".join(PRECISIONS))] = "bf16",
    optimizer: Annotated[str, typer.Option("--optimizer", metavar="|".join(OPTIMIZERS))] = "adamw",
    software: Annotated[
        str | None,
        typer.Option("--software", metavar="NAME", help="Constants of another stack, as megatron-core-2024."),
    ] = None,
    flash: Annotated[bool, typer.Option("--flash/--no-flash", help="Attention that stores no scores.")] = True,
    fix: Annotated[
        str, typer.Option("--fix", metavar="tp=4,pp=2", help="What is decided already.", show_default=False)
    ] = "",
    why_not: Annotated[
        str,
        typer.Option(
            "--why", metavar="tp=4,pp=2", help="Tell what became of these layouts; all with --json.", show_default=False
        ),
    ] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Also offload, and what this version cannot run: context and expert parallel.")
    ] = False,
    risk: Annotated[float, typer.Option("--risk", help="Highest accepted chance of running out of memory.")] = 0.05,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="70GiB", help="Of a device, if not all of it is to be used."),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            "--host-memory",
            metavar="1TB",
            help="Of one host, for offload.  [default: the usual machine's]",
            show_default=False,
        ),
    ] = None,
    best: Annotated[
        int | None,
        typer.Option("--best", metavar="N", help=f"Layouts to show.  [default: {_BEST}]", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE|DIR",
            help="Write the best one's strategy (.yaml, .json); or a folder: also the map of its ranks and scripts for "
            "torchrun, Slurm and Kubernetes.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write a page to look at: pictures, reasons, assumptions."),
    ] = None,
    measure: Annotated[
        int | None,
        typer.Option(
            "--measure",
            metavar="N",
            help="Then run the N layouts worth measuring first, on this machine: the cluster file must be its own "
            "(hybrid calibrate). Kept beside that file, and used from then on.",
        ),
    ] = None,
    measurements: Annotated[
        bool,
        typer.Option(
            "--measurements/--no-measurements", help="Correct the plan by layouts of this model measured earlier."
        ),
    ] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Find the layout that trains a model fastest on a cluster and fits: degrees, ZeRO stage, micro-batch, recompute.

    Nothing runs and no GPU is needed. Every layout is either ranked, with its memory and time in parts, or left out
    with a reason; the constants behind the figures, their sources and how far off they are: docs/accuracy.md.

    \b
    Examples:
      hybrid plan --model llama3-70b --cluster 16x8xH100 --global-batch 1024 --seq 8192
      hybrid plan --model llama3-8b --cluster 1x8xA100-80GB --global-batch 64 --out strategy.yaml
      hybrid plan --model llama3-70b --cluster 16x8xH100 --global-batch 1024 --out launch_70b   # scripts to start it
      hybrid plan --model gpt3-13b --cluster 4x8xV100-32GB --network 4x100G --global-batch 512 --fix tp=8
      hybrid plan --model llama3-70b --cluster 16x8xH100 --global-batch 1024 --why tp=16,pp=2
      hybrid plan --model my_package.model:build --cluster local --global-batch 32 --precision fp32
      hybrid plan --model my_package.model:build --cluster here.yaml --global-batch 32 --precision fp32 --measure 3
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_WIDTH)  # in a file or a pipe nothing is cut off
    try:
        if best is not None and best < 1:
            raise PlanError(f"--best {best}: expected a whole number of at least 1")
        request = _request(
            model=model,
            cluster=cluster,
            global_batch_size=global_batch,
            seq=seq,
            network=network,
            oversubscription=oversubscription,
            rails=rails,
            domain=domain,
            precision=precision,
            optimizer=optimizer,
            software=software,
            flash_attention=flash,
            fixed=fix,
            include_unbuilt=everything,
            risk=risk,
            memory_bytes=None if memory is None else _bytes(memory, "--memory"),
            host_memory_bytes=None if host_memory is None else _bytes(host_memory, "--host-memory"),
            num_plans=_BEST if best is None else best,
            use_measurements=measurements,
        )
        if measure is not None:
            _check_measure(request, model, measure, why_not=why_not, measurements=measurements)
        for option, given in (("--out", out), ("--report", report)):
            if why_not and given is not None:
                raise PlanError(
                    f"--why tells about layouts and makes no plan that {option} could write: leave one of them out"
                )
        if why_not and best is not None:
            raise PlanError(
                f"--why tells about layouts without ranking them, so --best {best} has no effect: leave one of them out"
            )
        _check_out(out)
        check_page_path(report, option="--report")
        if out is not None and report is not None and out.resolve() == report.resolve():
            raise PlanError(f"--out and --report both name {out}: give the page a name of its own")
        if why_not:
            _print_why(request, why_not, console, json_output=json_output)
            return
        with _progress(json_output) as progress:
            plans = plan_request(request, progress=progress)
        trials: tuple[Trial, ...] = ()
        if measure is not None:
            trials = run_trials(plans, measure, model=model, is_quiet=json_output)
            with _progress(json_output) as progress:
                plans = plan_request(with_trials(request, read_trials(request.job.cluster.path)), progress=progress)
        if out is not None:
            _save(plans, out)
        if report is not None:
            write_page(report, plan_page(plans), option="--report")
    except PlanError as error:
        _print_problems(error, json_output=json_output)
        raise typer.Exit(2) from None
    if json_output:
        measured = {"measured": [one.model_dump(mode="json") for one in trials]} if trials else {}
        typer.echo(json.dumps({**plans.to_dict(), **measured}, indent=2, ensure_ascii=False))
        return
    if trials:
        console.print(trial_table(trials))
        console.print()
    if report is not None:
        console.print(f"page: {report}")
    console.print(ranking(plans, width=console.width))
    console.print()
    console.print(best_in_full(plans.best))
    console.print()
    for line in advice_lines(plans):
        console.print(f"- {escape(line)}", soft_wrap=True)
    console.print()
    console.print(rejections(plans))
    result = plans.result
    console.print(
        f"\n{result.num_considered:,} layouts looked at, {result.num_priced:,} priced in full, "
        f"{result.seconds:.1f} s; --why tp=4,pp=2 tells about any of them",
        soft_wrap=True,
    )
    if out is not None:
        console.print(f"strategy of the best: {out}" if _is_file(out) else f"to start the best: {out}/launch.sh")


def _check_measure(request: Request, model: str, number: int, *, why_not: str, measurements: bool) -> None:
    """Before anything is searched; a PlanError with all that is wrong."""
    from hybrid.calibration.measure_plans import check_measurable

    problems = [f"--measure {number}: expected 1 or more"] if number < 1 else []
    if why_not:
        problems.append("--measure runs the best layouts, and --why looks at others: leave one of them out")
    if not measurements:
        problems.append(
            "--measure corrects the plan by what it finds, and --no-measurements says not to: leave one out"
        )
    if problems:
        raise PlanError(problems)
    check_measurable(request, model)


def _request(*, model: str, cluster: str, **options: Any) -> Request:
    """As `make_request`, also with a factory of one's own."""
    if not model.strip():
        raise PlanError("--model is empty: give a preset (llama3-8b), a config.json, or package.module:factory")
    if ":" in model and not Path(model).exists():
        from hybrid.strategy.live_model import build  # torch comes with it

        built, sample, _ = build(model)
        return make_request(built, cluster, sample=sample, **options)
    return make_request(model, cluster, **options)


def _is_file(out: Path) -> bool:
    return out.suffix.lower() in {".yaml", ".yml", ".json"} and not out.is_dir()


def _check_out(out: Path | None) -> None:
    """Raises PlanError: the name of a file in another form than those that are written, which would be a folder's."""
    if out is not None and out.suffix.lower() in _OTHER_FILES and not out.is_dir():
        raise PlanError(
            f"--out {out}: a strategy is written as .yaml or .json; a name without such an ending is a folder's"
        )


def _save(plans: Plans, out: Path) -> None:
    if not _is_file(out):
        write_launch_files(plans.best, out)
        return
    try:
        plans.strategy.save(out)
    except OSError as error:
        raise PlanError(f"--out {out}: {error.strerror or error}") from None


def _bytes(text: str, option: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise PlanError(f"{option}: {error}") from None


@contextmanager
def _progress(json_output: bool) -> Iterator[Any]:
    """A bar on a terminal, while the search runs."""
    console = Console(stderr=True)
    if json_output or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("searching"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("search")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_why(request: Request, text: str, console: Console, *, json_output: bool) -> None:
    wanted = read_fixed(text, option="--why")
    if not wanted and "=" not in text:
        raise PlanError(f"--why {text!r}: expected name=value, such as tp=4")
    clash = [name for name, value in wanted.items() if request.fixed.get(name, value) != value]
    if clash:
        raise PlanError([f"--why and --fix differ in {name}" for name in clash])
    asked = replace(request, fixed={**request.fixed, **wanted})
    reasons = contradictions(asked)
    told, num_more = ([], 0) if reasons else why(asked, limit=None if json_output else _MOST_ROWS)
    if not told:
        _print_no_candidates(asked, text, reasons, console, json_output=json_output)
        return
    summary = _beside_the_best(request, asked)
    if json_output:
        rows = [{"layout": candidate.label, "outcome": outcome} for candidate, outcome in told]
        typer.echo(json.dumps({"summary": summary, "layouts": rows}, indent=2, ensure_ascii=False))
        return
    console.print(escape(summary), soft_wrap=True)
    table = Table(title=escape(f"Layouts with {text}"), title_justify="left", box=None, pad_edge=False)
    table.add_column("layout", no_wrap=True)
    table.add_column("outcome", overflow="fold")
    for candidate, outcome in told:
        table.add_row(escape(candidate.label), escape(outcome))
    console.print(table)
    if num_more:
        console.print(
            f"… and {num_more:,} more: name more of the layout, as --why {escape(text)},zero_stage=1, or --json"
        )


def _beside_the_best(request: Request, asked: Request) -> str:
    """The fastest of the layouts that are asked about beside the fastest of all: what the table tells one by one."""
    with _progress(False) as progress:
        best, these = (search(replace(one, num_plans=1), progress=progress).found for one in (request, asked))
    if not best:
        return "no layout fits, these or others"
    told = f"{best[0].candidate.label} takes {best[0].time.total_seconds:.4g} s a step"
    if not these:
        return f"none of these fits; the fastest of all: {told}"
    if these[0].candidate == best[0].candidate:
        return f"the fastest of all is one of these: {told}"
    seconds = these[0].time.total_seconds
    return (
        f"the fastest of these that fits, {these[0].candidate.label}, takes {seconds:.4g} s a step, "
        f"{seconds / best[0].time.total_seconds - 1:.1%} more than the fastest of all: {told}"
    )


def _print_no_candidates(
    request: Request, text: str, reasons: Sequence[str], console: Console, *, json_output: bool
) -> None:
    """Why no layout has these values: what they contradict, what the model's sizes say against tp."""
    tp = request.fixed.get("tp", 1)
    alone = Candidate(tp=tp, dp_replicate=max(1, request.job.cluster.num_devices // tp))
    found = [problem.text for problem in shape_problems(request.job, alone, is_all=request.is_all)]
    told = [*reasons, *(one for one in found if one.startswith("tp = "))]
    if not told:
        told = ["the values divide neither the devices nor the batch as they would have to together"]
    summary = f"no layout with {text} is a candidate on {request.job.cluster.name}: {'; '.join(told)}"
    if json_output:
        typer.echo(json.dumps({"summary": summary, "layouts": []}, indent=2, ensure_ascii=False))
        return
    console.print(escape(summary), soft_wrap=True)


def _print_problems(error: PlanError, *, json_output: bool) -> None:
    if json_output:
        typer.echo(json.dumps({"problems": list(error.problems)}, indent=2, ensure_ascii=False))
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for problem in error.problems:
        console.print(f"[bold red]hybrid plan:[/] {escape(problem)}")
