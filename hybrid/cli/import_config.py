"""`hybrid import`: the configuration of another tool as a strategy, with an answer for every key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hybrid.errors import StrategyError
from hybrid.strategy.importing import ImportNotes, import_config
from hybrid.strategy.importing.given import parse_given
from hybrid.strategy.importing.source import FORMATS

__all__ = ["import_file"]


def import_file(
    config_file: Annotated[
        Path, typer.Argument(metavar="CONFIG_FILE", help="The configuration, as .json, .yaml or .yml.")
    ],
    *,
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", "-n", help="Number of processes to work it out for.", show_default=False),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A value that the file leaves open ('auto') or does not say; repeat it for each.",
            show_default=False,
        ),
    ] = None,
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="|".join(FORMATS),
            help="Whose configuration it is; found by its keys.",
            show_default=False,
        ),
    ] = None,
    allow_drop: Annotated[
        bool, typer.Option("--allow-drop", help="Leave out what cannot be done here, listed, instead of refusing it.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the strategy to this file (.yaml, .yml or .json)."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Turn a configuration of DeepSpeed, Accelerate (FSDP) or Fleet into a strategy.

    Every key of the file is answered: it becomes a setting, belongs in your script (optimizer, schedule, loggers: the
    lines are printed), is so here anyway, has nothing to act on, or is refused with the reason. Unknown and misspelt
    keys, wrong types, batch sizes that contradict each other and 'auto' that nobody filled in are listed together
    (exit code 2). What means something else here is said even where every key was taken.

    Printed is the strategy as YAML, then all the rest as YAML comments, so that the output is a strategy file; with
    --out the strategy goes to the file. With --world-size it is worked out, and must fit that many processes.

    \b
    Examples:
      hybrid import ds_config.json
      hybrid import ds_config.json --world-size 8 > strategy.yaml
      hybrid import ds_config.json --set train_micro_batch_size_per_gpu=4 --set lr=3e-4 --out strategy.yaml
      hybrid import ds_config.json --allow-drop
      hybrid import accelerate.yaml --json
      hybrid import fleet.yaml --world-size 16
      hybrid explain strategy.yaml --world-size 8

    \b
    A value by --set fills in what is open; where the file says something else it is refused:
      --set train_micro_batch_size_per_gpu=4        a key of the file
      --set zero_optimization.reduce_bucket_size=5e7    one in a section, other keys of it stay
      --set bf16=true                               the switch of a section
      --set lr=3e-4                                 a name that stands in one place
      --set hidden_size=4096                        from which transformers' Trainer takes bucket sizes
    """
    try:
        strategy, notes = import_config(
            config_file,
            world_size=world_size,
            given=_given(given or []),
            format=format_name,
            allow_drop=allow_drop,
        )
        if out is not None:
            strategy.save(out)
    except StrategyError as error:
        _print_problems(error.problems, json_output=json_output)
        raise typer.Exit(2) from None
    except OSError as error:
        raise typer.BadParameter(f"{out} cannot be written: {error.strerror}", param_hint="--out") from None
    if json_output:
        told = {"strategy": strategy.to_dict(), **notes.to_dict()}
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False, default=str))
    elif out is not None:
        typer.echo(f"{notes}\n\n{out}: the strategy; look at it by hybrid explain {out}")
    else:
        typer.echo(strategy.to_yaml() + _commented(notes), nl=False)


def _given(texts: Sequence[str]) -> dict[str, object]:
    """All KEY=VALUE; a key that stands twice with two values is refused."""
    values: dict[str, object] = {}
    problems: list[str] = []
    for text in texts:
        try:
            key, value = parse_given(text)
        except StrategyError as error:
            problems.extend(error.problems)
            continue
        if key in values and values[key] != value:
            problems.append(f"--set {key} stands twice: {values[key]!r} and {value!r}; keep one")
        values[key] = value
    if problems:
        raise StrategyError(problems)
    return values


def _commented(notes: ImportNotes) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in ("", *notes.to_text().splitlines()))


def _print_problems(problems: Sequence[str], *, json_output: bool) -> None:
    if json_output:
        typer.echo(json.dumps({"problems": list(problems)}, indent=2, ensure_ascii=False))
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]{len(problems)} problem{'s' * (len(problems) > 1)}[/]")
    for number, problem in enumerate(problems, 1):
        console.print(f"  {number}. {escape(problem)}")
