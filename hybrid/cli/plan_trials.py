"""`hybrid plan --measure`: layouts of the plan are run, with a bar."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hybrid.planner.plan import Plans
from hybrid.planner.trials import Trial

__all__ = ["run_trials"]


def run_trials(plans: Plans, number: int, *, model: str, is_quiet: bool) -> tuple[Trial, ...]:
    """Run them; see `measure_plans`. Ctrl-C ends the command with code 130; layouts that have run are kept."""
    try:
        return _with_bar(plans, number, model=model, is_quiet=is_quiet)
    except KeyboardInterrupt as stop:
        typer.echo(f"hybrid: {str(stop) or 'stopped by Ctrl-C'}", err=True)
        raise typer.Exit(130) from None


def _with_bar(plans: Plans, number: int, *, model: str, is_quiet: bool) -> tuple[Trial, ...]:
    from hybrid.calibration.measure_plans import measure_plans

    console = Console(stderr=True)
    if is_quiet or not console.is_terminal:
        return measure_plans(plans, number, model=model)
    columns = (TextColumn("measuring {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=number)

        def tell(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=label)

        return measure_plans(plans, number, model=model, progress=tell)
