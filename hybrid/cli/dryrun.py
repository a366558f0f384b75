"""`hybrid dryrun`: what ranks of a job of any size would hold and do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from hybrid.errors import HybridError, StrategyError
from hybrid.strategy import DistributedStrategy
from hybrid.units import format_bytes

if TYPE_CHECKING:
    from hybrid.dry.result import DryRun, RankDryRun

__all__ = ["dryrun"]

_MOST_PARAMETERS = 24
_MOST_ACTIONS = 24
_FILE_WIDTH = 160
_SECONDS_BETWEEN_LINES = 15.0


def dryrun(
    strategy_file: Annotated[
        Path, typer.Argument(metavar="STRATEGY_FILE", help="The strategy, as .yaml, .yml or .json.", show_default=False)
    ],
    *,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="A preset (llama3-70b, ...), a Hugging Face config.json or its folder, or package.module:factory, "
            "which returns (model, sample).",
            show_default=False,
        ),
    ],
    world_size: Annotated[
        int, typer.Option("--world-size", "-n", help="Processes of the job.", min=1, show_default=False)
    ],
    rank: Annotated[
        str | None, typer.Option("--rank", "-r", metavar="RANKS", help="Which ranks: 0,7,4095.  [default: 0]")
    ] = None,
    all_distinct: Annotated[
        bool, typer.Option("--all-distinct", help="One of each kind of ranks that hold and send the same.")
    ] = False,
    seq: Annotated[
        int | None, typer.Option("--seq", metavar="TOKENS", help="Per sample.  [default: the model's]", min=1)
    ] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", metavar="adamw|adam|sgd|sgd-momentum")] = "adamw",
    parameters: Annotated[bool, typer.Option("--parameters", help="List every parameter of each rank.")] = False,
    actions: Annotated[bool, typer.Option("--actions", help="List every action of the step.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Run single ranks of a job of any size, on this machine, without the others and without memory.

    The model is rewritten by the real distributed_model and trains one step with the real optimizer, on tensors that
    have shapes and types but no values. You see the shapes on that rank, the bytes that it holds by kind at each moment
    of a step, the collectives that it launches by axis with their bytes, and its list of actions. Where the planner
    knows the model, its figures stand beside those of the run; a difference is marked, and ends with exit code 1.

    \b
    Examples:
      hybrid dryrun strategy.yaml --model llama3-70b --world-size 16384
      hybrid dryrun strategy.yaml --model llama3-70b --world-size 16384 --rank 0,2048,16383
      hybrid dryrun strategy.yaml --model my_package.model:build -n 64 --all-distinct
      hybrid dryrun strategy.yaml --model config.json -n 512 --seq 4096 --json

    \b
    A factory for --model:
      def build():
          model = MyModel()                                # built on the meta device: its size does not matter
          return model, {"input_ids": torch.zeros(1, 4096, dtype=torch.long)}
    """
    try:
        strategy = DistributedStrategy.load(strategy_file, world_size=world_size)
        ranks = None if rank is None else _ranks(rank)
        lists = [option for option, on in (("--parameters", parameters), ("--actions", actions)) if on]
        if json_output and lists:
            raise StrategyError(f"{' and '.join(lists)} beside --json has no effect: JSON lists all; leave one out")
        strategy.resolve(world_size)  # before torch is loaded
        found = _run(
            strategy,
            model,
            world_size=world_size,
            ranks=ranks,
            all_distinct=all_distinct,
            seq=seq,
            optimizer=optimizer,
            is_shown=not json_output,
        )
    except HybridError as error:
        _refuse(error, json_output=json_output)
        raise typer.Exit(2) from None
    if json_output:
        typer.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
    else:
        _print(found, all_parameters=parameters, all_actions=actions)
    if any(one.differences for one in found.ranks):
        raise typer.Exit(1)


def _run(
    strategy: DistributedStrategy,
    model: str,
    *,
    world_size: int,
    ranks: Sequence[int] | None,
    all_distinct: bool,
    seq: int | None,
    optimizer: str,
    is_shown: bool,
) -> DryRun:
    from hybrid.dry.run import dryrun as run  # torch comes with it

    with _progress(is_shown) as tell:
        return run(
            strategy,
            model,
            world_size=world_size,
            ranks=ranks,
            all_distinct=all_distinct,
            seq=seq,
            optimizer=optimizer,
            progress=tell,
        )


def _ranks(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not word.isdecimal()]
    if wrong:
        raise StrategyError(f"--rank {text!r}: {wrong[0]!r} is no rank; give numbers with commas between, as 0,7,4095")
    return [int(word) for word in words]


def _refuse(error: HybridError, *, json_output: bool) -> None:
    problems = list(getattr(error, "problems", None) or (str(error),))
    if json_output:
        typer.echo(json.dumps({"problems": problems}, indent=2, ensure_ascii=False))
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]{len(problems)} problem{'s' if len(problems) > 1 else ''}[/]")
    for number, problem in enumerate(problems, 1):
        console.print(f"  {number}. {escape(problem)}")


@contextmanager
def _progress(is_shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A spinner on a terminal; elsewhere a line now and then, for what takes long."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _told_seldom()
        return
    if not is_shown:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("the first rank", total=None)

        def tell(done: int, total: int) -> None:
            bar.update(task, description=f"{done} of {max(done, total)} ranks")

        yield tell


def _told_seldom() -> Callable[[int, int], None]:
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if done < total and time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            typer.echo(f"hybrid dryrun: {done} of {total} ranks", err=True)

    return tell


# -- tables ------------------------------------------------------------------------------------------------------------


def _print(found: DryRun, *, all_parameters: bool, all_actions: bool) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_WIDTH)
    console.print(f"[bold]{escape(found.model)}[/] on {found.world_size:,} ranks: {escape(found.layout)}")
    for one in found.ranks:
        alike = "" if found.alike is None else f", like {found.alike[one.rank]:,} ranks"
        places = ", ".join(f"{axis} {place}" for axis, place in one.coordinates.items())
        console.print(f"\n[bold cyan]rank {one.rank}[/] ({places}){alike}; {one.seconds:.1f} s")
        console.print(f"  units  {_shortened(one.layers)}", soft_wrap=True)
        _print_parameters(console, one, everything=all_parameters)
        _print_bytes(console, one)
        _print_traffic(console, one)
        _print_actions(console, one, everything=all_actions)
        _print_comparison(console, one)
        for note in one.notes:
            console.print(f"  note: {escape(note)}", soft_wrap=True)


def _shortened(names: Sequence[str]) -> str:
    shown = names if len(names) <= 4 else [*names[:2], "…", *names[-2:]]
    return f"{', '.join(shown)} ({len(names)})"


def _print_parameters(console: Console, one: RankDryRun, *, everything: bool) -> None:
    table = Table(title="Parameters", title_justify="left", box=None, pad_edge=False)
    for name in ("parameter", "shape", "here", "type", "bucket", "own elements"):
        table.add_column(name, no_wrap=True, justify="right" if name in {"bucket", "own elements"} else "left")
    shown = one.parameters if everything else one.parameters[:_MOST_PARAMETERS]
    for parameter in shown:
        own = "–" if parameter.own is None else f"{parameter.own[0]:,} – {parameter.own[1]:,}"
        table.add_row(
            escape(parameter.fqn),
            _shape(parameter.global_shape),
            _shape(parameter.local_shape),
            parameter.dtype,
            "–" if parameter.bucket is None else str(parameter.bucket),
            own if parameter.trainable else "frozen",
        )
    console.print(table)
    if len(shown) < len(one.parameters):
        console.print(f"  … {len(one.parameters) - len(shown):,} more: --parameters lists all")


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{size:,}" for size in shape) or "a number"


def _print_bytes(console: Console, one: RankDryRun) -> None:
    points = {point: kinds for point, kinds in one.bytes_by_point.items() if point != "after_wrap"}
    table = Table(title="Bytes held", title_justify="left", box=None, pad_edge=False)
    table.add_column("kind", no_wrap=True)
    for point in points:
        table.add_column(point.replace("_", " "), justify="right", no_wrap=True)
    for kind in dict.fromkeys(kind for kinds in points.values() for kind in kinds):
        table.add_row(kind.replace("_", " "), *(f"{kinds.get(kind, 0):,}" for kinds in points.values()))
    sums = [sum(kinds.values()) for kinds in points.values()]
    table.add_row("[bold]together[/]", *(f"[bold]{total:,} ({format_bytes(total)})[/]" for total in sums))
    console.print(table)
    if one.gathered_bytes:
        console.print(f"  whole at a time while units compute, at most {one.gathered_bytes:,} bytes of parameters")


def _print_traffic(console: Console, one: RankDryRun) -> None:
    table = Table(title="Collectives of one step", title_justify="left", box=None, pad_edge=False)
    for name in ("axis", "operation", "ranks", "calls", "payload bytes", "sent bytes"):
        table.add_column(name, no_wrap=True, justify="left" if name in {"axis", "operation"} else "right")
    for row in one.traffic:
        table.add_row(
            row.axis,
            row.op + (" (control)" if row.is_control else ""),
            f"{row.group_size:,}",
            f"{row.calls:,}",
            f"{row.payload_bytes:,}",
            f"{row.sent_bytes:,}",
            style="dim" if row.is_control else "",
        )
    if one.traffic:
        console.print(table)
    else:
        console.print("No collectives: this rank works alone.")


def _print_actions(console: Console, one: RankDryRun, *, everything: bool) -> None:
    runs = [(name, len(list(group))) for name, group in groupby(one.actions)]
    shown = runs if everything else runs[:_MOST_ACTIONS]
    words = [name if count == 1 else f"{name} ({count} times)" for name, count in shown]
    more = len(runs) - len(shown)
    tail = f", … {more:,} more (--actions lists all)" if more else ""
    console.print(f"[italic]Actions[/]  {escape(', '.join(words))}{tail}", soft_wrap=True)


def _print_comparison(console: Console, one: RankDryRun) -> None:
    if not one.comparison:
        return
    if not one.differences:
        console.print(f"[green]The planner says the same[/]: {len(one.comparison)} figures of {len(one.comparison)}")
        return
    table = Table(title="The planner says otherwise", title_justify="left", title_style="bold red", box=None)
    for name in ("figure", "planner", "run"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for row in one.differences:
        table.add_row(row.what, _number(row.planned), _number(row.found))
    console.print(table)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else escape(str(value))
