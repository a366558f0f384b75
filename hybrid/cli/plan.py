"""`hybrid plan`: the layouts of a model on a cluster, ranked, with memory, time and reasons."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hybrid.errors import PlanError
from hybrid.planner.plan import Plans, plan_request
from hybrid.planner.request import Request, read_fixed
from hybrid.planner.request_reading import OPTIMIZERS, PRECISIONS, make_request
from hybrid.planner.search import why
from hybrid.report.plan_table import advice_lines, best_in_full, ranking, rejections
from hybrid.units import parse_bytes

__all__ = ["plan"]

_FILE_WIDTH = 200


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
        str, typer.Option("--why", metavar="tp=4,pp=2", help="Tell what became of these layouts.", show_default=False)
    ] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Also what this version cannot run: context and expert parallel, offload.")
    ] = False,
    risk: Annotated[float, typer.Option("--risk", help="Highest accepted chance of running out of memory.")] = 0.05,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="70GiB", help="Of a device, if not all of it is to be used."),
    ] = None,
    best: Annotated[int, typer.Option("--best", metavar="N", help="Layouts to show.")] = 8,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the best one's strategy, .yaml or .json.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Find the layout that trains a model fastest on a cluster and fits: degrees, ZeRO stage, micro-batch, recompute.

    Nothing runs and no GPU is needed. Every layout is either ranked, with its memory and time in parts, or left out
    with a reason; the constants behind the figures, their sources and how far off they are: docs/accuracy.md.

    \b
    Examples:
      hybrid plan --model llama3-70b --cluster 16x8xH100 --global-batch 1024 --seq 8192
      hybrid plan --model llama3-8b --cluster 1x8xA100-80GB --global-batch 64 --out strategy.yaml
      hybrid plan --model gpt3-13b --cluster 4x8xV100-32GB --network 4x100G --global-batch 512 --fix tp=8
      hybrid plan --model llama3-70b --cluster 16x8xH100 --global-batch 1024 --why tp=16,pp=2
      hybrid plan --model my_package.model:build --cluster local --global-batch 32 --precision fp32
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_WIDTH)  # in a file or a pipe nothing is cut off
    try:
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
            memory_bytes=None if memory is None else _bytes(memory),
            num_plans=best,
        )
        if why_not:
            _print_why(request, why_not, console, json_output=json_output)
            return
        with _progress(json_output) as progress:
            plans = plan_request(request, progress=progress)
        if out is not None:
            _save(plans, out)
    except PlanError as error:
        _print_problems(error, json_output=json_output)
        raise typer.Exit(2) from None
    if json_output:
        typer.echo(json.dumps(plans.to_dict(), indent=2, ensure_ascii=False))
        return
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
        console.print(f"strategy of the best: {out}")


def _request(*, model: str, cluster: str, **options: Any) -> Request:
    """As `make_request`, also with a factory of one's own."""
    if ":" in model and not Path(model).exists():
        from hybrid.strategy.live_model import build  # torch comes with it

        built, sample, _ = build(model)
        return make_request(built, cluster, sample=sample, **options)
    return make_request(model, cluster, **options)


def _save(plans: Plans, out: Path) -> None:
    try:
        plans.strategy.save(out)
    except OSError as error:
        raise PlanError(f"--out {out}: {error.strerror or error}") from None


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise PlanError(f"--memory: {error}") from None


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
    clash = [name for name, value in wanted.items() if request.fixed.get(name, value) != value]
    if clash:
        raise PlanError([f"--why and --fix differ in {name}" for name in clash])
    asked = Request(
        job=request.job,
        fixed={**request.fixed, **wanted},
        is_all=request.is_all,
        risk=request.risk,
        memory_bytes=request.memory_bytes,
        num_plans=request.num_plans,
    )
    told = why(asked)
    if json_output:
        rows = [{"layout": candidate.label, "outcome": outcome} for candidate, outcome in told]
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    table = Table(title=escape(f"Layouts with {text}"), title_justify="left", box=None, pad_edge=False)
    table.add_column("layout", no_wrap=True)
    table.add_column("outcome", overflow="fold")
    for candidate, outcome in told:
        table.add_row(escape(candidate.label), escape(outcome))
    console.print(table if told else f"no layout has {escape(text)} on {escape(request.job.cluster.name)}")


def _print_problems(error: PlanError, *, json_output: bool) -> None:
    if json_output:
        typer.echo(json.dumps({"problems": list(error.problems)}, indent=2, ensure_ascii=False))
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for problem in error.problems:
        console.print(f"[bold red]hybrid plan:[/] {escape(problem)}")
