"""`hybrid schedule`: a pipeline's timetable, its bubble and what it keeps in memory, before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hybrid.cli.schedule_drawing import draw, legend
from hybrid.contracts.schedule import SCHEDULE_NAMES, Schedule, make_schedule
from hybrid.contracts.schedule_check import check_schedule
from hybrid.contracts.schedule_choice import file_name, read_schedule
from hybrid.contracts.schedule_text import to_csv, to_text
from hybrid.contracts.schedule_timing import Timeline, closed_form, time_schedule
from hybrid.errors import StrategyError
from hybrid.report.page import check_page_path, write_page
from hybrid.report.schedule_page import schedule_page
from hybrid.units import format_seconds

__all__ = ["schedule"]

DEFAULT_SCHEDULE = "1f1b"
NO_NAME = "-"  # of a file that says none
DEFAULT_FORWARD, DEFAULT_BACKWARD = "1", "2"  # seconds
_MOST_ACTIONS = 1_000_000  # about half a minute


def schedule(
    stages: Annotated[int | None, typer.Option("--stages", help="Pipeline ranks.", show_default=False)] = None,
    micro_batches: Annotated[
        int | None, typer.Option("--micro-batches", help="Micro-batches per step.", show_default=False)
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--schedule", metavar="|".join(SCHEDULE_NAMES), help=f"Which order.  [default: {DEFAULT_SCHEDULE}]"
        ),
    ] = None,
    virtual_stages: Annotated[
        int | None, typer.Option("--virtual-stages", help="Chunks of the model on each rank.  [default: 1; zbv: 2]")
    ] = None,
    forward: Annotated[
        str | None,
        typer.Option(
            "--forward",
            metavar="SECONDS",
            help="Forward of one micro-batch on a stage, shared evenly by its chunks; or a list, one value per chunk.  "
            f"[default: {DEFAULT_FORWARD}]",
        ),
    ] = None,
    backward: Annotated[
        str | None,
        typer.Option(
            "--backward", metavar="SECONDS", help=f"Backward, in the same way.  [default: {DEFAULT_BACKWARD}]"
        ),
    ] = None,
    transfer: Annotated[
        float | None,
        typer.Option(
            "--transfer", metavar="SECONDS", help="From the end of an action to its result's arrival.  [default: 0]"
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="Your own schedule, .csv or text, instead of a made one."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    csv_output: Annotated[
        bool, typer.Option("--csv", help="Print the schedule as CSV, to edit and give back.")
    ] = False,
    text_output: Annotated[bool, typer.Option("--text", help="Print the schedule as text, one line per rank.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with the schedule on the clock.")
    ] = None,
) -> None:
    """Draw which rank of a pipeline does what, and when.

    Rows are ranks, columns are time. Below: how long each rank idles (the bubble) and how many micro-batches it keeps
    the activations of, beside the closed forms from the literature, which hold for stages of equal cost and transfers
    that take no time. A schedule of your own is checked first: complete, in a possible order, free of deadlock; all
    problems are listed (exit code 2).

    \b
    Examples:
      hybrid schedule --stages 4 --micro-batches 8
      hybrid schedule --stages 4 --micro-batches 8 --schedule gpipe
      hybrid schedule --stages 4 --micro-batches 8 --schedule interleaved --virtual-stages 2
      hybrid schedule --stages 4 --micro-batches 8 --schedule zbv
      hybrid schedule --stages 4 --micro-batches 8 --forward 1,1,1,1.5 --backward 2,2,2,3 --transfer 0.1
      hybrid schedule --stages 8 --micro-batches 32 --schedule zb-h1 --html schedule.html
      hybrid schedule --stages 2 --micro-batches 4 --csv > mine.csv
      hybrid schedule --file mine.csv

    \b
    Actions: F forward, B backward (or, split: I gradients of inputs, W gradients of weights).
    F2.0 is the forward of chunk 2 for micro-batch 0; chunk c lives on rank c modulo the number of
    stages, under zbv in a V (chunks r and 2·stages-1-r on rank r).
    """
    outputs = [flag for flag, on in (("--json", json_output), ("--csv", csv_output), ("--text", text_output)) if on]
    if len(outputs) > 1:
        raise typer.BadParameter(f"{' and '.join(outputs)} are given; give one of them", param_hint=outputs[1])
    if html is None and (csv_output or text_output):
        _check_times(outputs[0], **{"--forward": forward, "--backward": backward, "--transfer": transfer})
    check_page_path(html, option="--html")
    try:
        chosen = _chosen(file, name, stages, micro_batches, virtual_stages)
        check_schedule(chosen)
        timeline = time_schedule(
            chosen,
            forward_seconds=_seconds("--forward", DEFAULT_FORWARD if forward is None else forward, chosen),
            backward_seconds=_seconds("--backward", DEFAULT_BACKWARD if backward is None else backward, chosen),
            transfer_seconds=transfer or 0.0,
        )
    except StrategyError as error:
        _print_problems(error.problems, json_output=json_output)
        raise typer.Exit(2) from None
    if html is not None:
        write_page(html, schedule_page(timeline), option="--html")
    if json_output:
        typer.echo(json.dumps(_facts(timeline), indent=2))
    elif csv_output:
        typer.echo(to_csv(chosen), nl=False)
    elif text_output:
        typer.echo(to_text(chosen), nl=False)
    else:
        _print_drawing(timeline)


def _check_times(output: str, **times: object) -> None:
    given = [option for option, value in times.items() if value is not None]
    if given:
        raise typer.BadParameter(
            f"prints the order of the actions, on which {' and '.join(given)} {'has' if len(given) == 1 else 'have'} "
            "no effect; leave out one or the other, or add --html FILE, which draws the times",
            param_hint=output,
        )


def _chosen(
    file: Path | None, name: str | None, stages: int | None, micro_batches: int | None, virtual_stages: int | None
) -> Schedule:
    if file is None:
        missing = [
            f"{option} is needed, such as {option} {example}"
            for option, value, example in (("--stages", stages, 4), ("--micro-batches", micro_batches, 8))
            if value is None
        ]
        if stages is None or micro_batches is None:
            raise StrategyError([f"{line}; or give --file" for line in missing])
        num_actions = 2 * stages * micro_batches * (virtual_stages or 1)
        if stages > 0 and micro_batches > 0 and num_actions > _MOST_ACTIONS:
            raise StrategyError(
                f"--stages {stages} and --micro-batches {micro_batches} are {num_actions:,} actions, and at most "
                f"{_MOST_ACTIONS:,} are timed; give less of either"
            )
        return make_schedule(
            DEFAULT_SCHEDULE if name is None else name,
            num_stages=stages,
            num_micro_batches=micro_batches,
            virtual_stages=virtual_stages,
        )
    found = read_schedule(file, name=NO_NAME)
    has_name = found.name != NO_NAME
    if not has_name:
        found = _with_name(found, file, name)
    pairs = (
        ("--schedule", name, found.name),
        ("--stages", stages, found.num_stages),
        ("--micro-batches", micro_batches, found.num_micro_batches),
        ("--virtual-stages", virtual_stages, found.virtual_stages),
    )
    problems = [
        f"{option} is {given} but {file} says {in_file}; leave one of them out"
        for option, given, in_file in pairs
        if given is not None and given != in_file and (has_name or option != "--schedule")
    ]
    if not has_name and name is not None and not _has_actions_of(found, name):
        problems.append(
            f"--schedule is {name}, and {file} names none, but its actions are not those of {name} for "
            f"{found.num_stages} stages and {found.num_micro_batches} micro-batches; leave --schedule out"
        )
    if problems:
        raise StrategyError(problems)
    return found


def _with_name(found: Schedule, file: Path, wanted: str | None) -> Schedule:
    """Of a file that says none: that of the schedule with the same actions, else the file's."""
    names = [*([] if wanted is None else [wanted]), *SCHEDULE_NAMES]
    return replace(found, name=next((name for name in names if _has_actions_of(found, name)), file_name(file)))


def _has_actions_of(found: Schedule, name: str) -> bool:
    """Whether `make_schedule` makes the same under this name."""
    if 2 * found.num_chunks * found.num_micro_batches > sum(map(len, found.actions)):
        return False  # some are missing, so the sizes may be any, too large to make a schedule of
    try:
        made = make_schedule(
            name,
            num_stages=found.num_stages,
            num_micro_batches=found.num_micro_batches,
            virtual_stages=found.virtual_stages,
        )
    except StrategyError:  # there is none, or none of these sizes
        return False
    return made.actions == found.actions


def _seconds(option: str, text: str, chosen: Schedule) -> list[float]:
    """One value per chunk of the model."""
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        raise StrategyError(f"{option} is {text!r}: expected a number, or numbers with commas between") from None
    if len(values) == 1:
        return [values[0] / chosen.virtual_stages] * chosen.num_chunks
    if len(values) != chosen.num_chunks:
        raise StrategyError(
            f"{option} has {len(values)} values for {chosen.num_chunks} chunks; give one value, or one per chunk"
        )
    return values


def _print_problems(problems: tuple[str, ...], *, json_output: bool) -> None:
    if json_output:
        typer.echo(json.dumps({"problems": problems}, indent=2, ensure_ascii=False))
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    console.print(f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the schedule", style="bold red")
    for number, problem in enumerate(problems, 1):
        console.print(f"  {number}. {problem}")


def _facts(timeline: Timeline) -> dict[str, Any]:
    made = timeline.schedule
    form = closed_form(made)
    return {
        "name": made.name,
        "num_stages": made.num_stages,
        "num_micro_batches": made.num_micro_batches,
        "virtual_stages": made.virtual_stages,
        "total_seconds": timeline.total_seconds,
        "bubble_fraction": timeline.bubble_fraction,
        "max_in_flight_per_chunk": timeline.max_in_flight_per_chunk,
        "closed_form": form
        and {
            "bubble_fraction": form.bubble_fraction,
            "bubble_formula": form.bubble_formula,
            "max_in_flight": form.in_flight,
            "max_in_flight_formula": form.in_flight_formula,
        },
        "critical_path": [str(timed.action) for timed in timeline.critical_path],
        "ranks": [
            {
                "rank": rank,
                "busy_seconds": timeline.busy_seconds[rank],
                "bubble_fraction": timeline.bubble_fractions[rank],
                "max_in_flight": timeline.max_in_flight[rank],
                "actions": [
                    {
                        "action": str(timed.action),
                        "start_seconds": timed.start_seconds,
                        "end_seconds": timed.end_seconds,
                    }
                    for timed in order
                ],
            }
            for rank, order in enumerate(timeline.timed)
        ],
    }


def _print_drawing(timeline: Timeline) -> None:
    console = Console(highlight=False, markup=False)
    made, form = timeline.schedule, closed_form(timeline.schedule)
    chunks = f", {made.virtual_stages} chunks per rank" if made.virtual_stages > 1 else ""
    console.print(
        f"{made.name}: {made.num_stages} stages, {made.num_micro_batches} micro-batches{chunks}", style="bold"
    )
    for line in draw(timeline, width=console.width):
        console.print(line, soft_wrap=True)
    console.print(legend(timeline, width=console.width), style="dim", soft_wrap=True)
    console.print()
    table = Table(box=None, pad_edge=False)
    for column in ("rank", "bubble", "kept at most", *(["closed form"] if form else [])):
        table.add_column(column, justify="right" if column != "rank" else "left")
    for rank, (bubble, kept) in enumerate(zip(timeline.bubble_fractions, timeline.max_in_flight, strict=True)):
        table.add_row(str(rank), f"{bubble:.1%}", str(kept), *([str(form.in_flight[rank])] if form else []))
    console.print(table)
    unit = "chunks of a micro-batch" if made.virtual_stages > 1 else "micro-batches"
    formula = f", closed form {form.in_flight_formula} on rank r" if form else ""
    console.print(f"kept: {unit} whose activations a rank holds{formula}", soft_wrap=True)
    formula = f", closed form {form.bubble_formula} = {form.bubble_fraction:.1%}" if form else ""
    total = format_seconds(timeline.total_seconds)
    console.print(f"step {total}, bubble {timeline.bubble_fraction:.1%}{formula}", soft_wrap=True)
