"""`hybrid explain`: what a strategy file means on a number of processes, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hybrid.errors import ModelError, StrategyError
from hybrid.strategy import DistributedStrategy
from hybrid.strategy.explain import Explanation, Row, explanation
from hybrid.strategy.live_model import build
from hybrid.strategy.model_table import ModelTable
from hybrid.strategy.stage_table import StageTable

__all__ = ["explain"]

FLEET = "Fleet's fields"  # the section of this name
MIN_VALUE_WIDTH = 8
GAPS_WIDTH = 4  # between three columns


def explain(
    strategy_file: Annotated[
        Path | None,
        typer.Argument(metavar="STRATEGY_FILE", help="The strategy, as .yaml, .yml or .json.", show_default=False),
    ] = None,
    *,
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", "-n", help="Number of processes to work it out for.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODULE:FACTORY",
            help="A function or class that makes the model, or (model, sample), as package.module:name; shows what "
            "becomes of each weight, and the stages of a pipeline.",
            show_default=False,
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of strategy files, for editors.")
    ] = False,
) -> None:
    """Show every setting of a strategy, its value, and whether you, a default or an equation gave it.

    With --world-size the degrees, the rank groups of each axis and the batch sizes are worked out, and all
    problems are listed (exit code 2). With --model every parameter is listed with its shape, its shape on each rank,
    and the rule that says so; with a pipeline also the layers, parameters, flops and micro-batches of each stage, and
    the bubble. The model is built on the meta device, so its size does not matter. Flops are counted on the sample, an
    input of the model, if the function returns (model, sample).

    \b
    Examples:
      hybrid explain strategy.yaml --world-size 16
      hybrid explain strategy.yaml --world-size 16 --json
      hybrid explain strategy.yaml -n 16 --model my_package.model:build
      hybrid explain --schema > strategy.schema.json

    \b
    A strategy file:
      sharding: true
      sharding_configs: {stage: 2, shard_size: 8}
      gradient_clipping: 1.0
    """
    if schema:
        _check_alone(strategy_file, **{"--world-size": world_size, "--model": model, "--json": json_output or None})
        typer.echo(json.dumps(DistributedStrategy.json_schema(), indent=2, ensure_ascii=False))
        return
    if strategy_file is None:
        raise typer.BadParameter("give a strategy file, or --schema", param_hint="STRATEGY_FILE")
    try:
        strategy = DistributedStrategy.load(strategy_file, world_size=world_size)
        built, sample, note = (None, None, "") if model is None else build(model)
        told = explanation(strategy, world_size, model=built, sample=sample, note=note)
    except (StrategyError, ModelError) as error:
        problems = error.problems if isinstance(error, StrategyError) else (str(error),)
        _print_problems(problems, json_output=json_output)
        raise typer.Exit(2) from None
    if json_output:
        typer.echo(json.dumps(told.to_dict(), indent=2, ensure_ascii=False))
    else:
        _print_tables(told)


def _check_alone(strategy_file: Path | None, **options: object) -> None:
    """Beside --schema, which is the same for every strategy, nothing else has an effect."""
    given = [option for option, value in options.items() if value is not None]
    given = [*([] if strategy_file is None else [str(strategy_file)]), *given]
    if given:
        raise typer.BadParameter(
            f"{', '.join(given)} has no effect beside it: the schema of strategy files, which is JSON, is one for all; "
            "leave one of them out",
            param_hint="--schema",
        )


def _print_problems(problems: Sequence[str], *, json_output: bool) -> None:
    if json_output:
        typer.echo(json.dumps({"problems": list(problems)}, indent=2, ensure_ascii=False))
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    many = len(problems) > 1
    console.print(f"[bold red]{len(problems)} problem{'s' if many else ''} in the strategy[/]")
    for number, problem in enumerate(problems, 1):
        console.print(f"  {number}. {escape(problem)}")


def _value_width(rows: Sequence[Row], width: int) -> int | None:
    """What the columns of settings and origins leave to the values on a line; None if that is too little.

    No word of those two is broken: the paths of settings are in them, to be read, copied and searched for.
    """
    settings = max(cell_len(row.setting) + 2 for row in rows)
    origins = max(cell_len(word) for row in rows for word in row.origin.split())
    values = max(cell_len(row.value) for row in rows)
    left = width - settings - origins - GAPS_WIDTH
    return min(values, left) if left >= min(values, MIN_VALUE_WIDTH) else None


def _print_tables(told: Explanation) -> None:
    console = Console(highlight=False)
    # Fleet's fields have long paths for names: a table of their own leaves the other one its room.
    parts = [[row for row in told.rows if (row.section == FLEET) is is_fleet] for is_fleet in (False, True)]
    tables = [(rows, _value_width(rows, console.width)) for rows in parts if rows]
    if any(width is None for _, width in tables):
        typer.echo(told.to_text())  # the model's table is in it
        return
    where = "any number of processes" if told.world_size is None else f"{told.world_size} processes"
    title: str | None = f"Strategy on {where}"
    for rows, value_width in tables:
        console.print(_table(rows, title=title, value_width=value_width))
        title = None
    if told.groups:
        groups = Table(title="\nRank groups", title_justify="left", box=None, pad_edge=False, show_header=False)
        groups.add_column("axis", no_wrap=True)
        groups.add_column("ranks", overflow="fold")
        for axis, text in told.groups:
            groups.add_row(f"  {axis}", escape(text))
        console.print(groups)
    for note in told.notes:
        console.print(f"note: {escape(note)}", soft_wrap=True)
    if told.world_size is None:
        console.print("Give --world-size to see degrees, rank groups and batch sizes.", soft_wrap=True)
    if told.model is not None:
        _print_model(told.model, console)


def _print_model(model: ModelTable, console: Console) -> None:
    stages = [] if model.stages is None else [model.stages]
    parts: list[ModelTable | StageTable] = [model, *stages]
    widths = [
        sum(max(map(cell_len, column)) + 2 for column in zip(part.header, *part.lines(), strict=True)) for part in parts
    ]
    if max(widths) > console.width and not console.is_terminal:
        typer.echo(f"\n{model.to_text()}")  # in a file or a pipe no line is folded
        return
    for part in parts:
        console.print()
        title = part.title[:1].upper() + part.title[1:]
        table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False)
        for index, name in enumerate(part.header):
            table.add_column(name, no_wrap=index in {1, 2}, overflow="fold", style="bold" if index == 0 else None)
        for line in part.lines():
            color = "dim" if isinstance(part, ModelTable) and len(line) > 2 and line[1] == line[2] else ""
            table.add_row(*map(escape, line), style=color)
        console.print(table)
        for remark in part.remarks():
            console.print(f"note: {escape(remark)}", soft_wrap=True)


def _table(rows: Sequence[Row], *, title: str | None, value_width: int | None) -> Table:
    """Rows under their sections; only the first table, the one with a title, has heads."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=title is not None)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", style="bold", overflow="fold", width=value_width)
    table.add_column("origin", overflow="fold")
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            table.add_row(f"[cyan]{escape(section)}[/]", "", "")
        color = {"user": "green", "derived": "yellow"}.get(row.origin.split(":")[0], "dim")
        table.add_row(f"  {escape(row.setting)}", escape(row.value), f"[{color}]{escape(row.origin)}[/]")
    return table
