"""`hybrid calibrate`: measure this machine for the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from hybrid.contracts.cluster import Cluster
from hybrid.contracts.measurements import Measurements
from hybrid.launch.environment import read_environment
from hybrid.launch.machine import this_machine
from hybrid.units import format_bytes, format_seconds

__all__ = ["calibrate"]


def calibrate(
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FILE", help="Cluster file to write; an earlier calibration there is replaced."),
    ] = Path("cluster.yaml"),
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            metavar="N",
            help="Ranks on this machine, as many as will train.  [default: one per accelerator, or per core]",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, for shorter: a rough picture.")] = False,
) -> None:
    """Measure this machine, and write a cluster file that `hybrid plan` takes.

    Matrix products and attention over shapes, memory by size, the optimizer, what a launch, a micro-batch and a step
    cost the host, and collectives by group and size. All ranks measure at once, so that cores and links are shared as
    in training: the file holds for this number of ranks. It takes less than two minutes, beside starting the ranks.
    Figures are medians of windows on all ranks; the spread of each stands in the file. Let nothing else run.

    Under torchrun, on one host or several, it measures the ranks that are there, and the first writes; so does
    hybrid.calibrate("lab.yaml") in a script of hybrid run.

    \b
    Examples:
      hybrid calibrate --ranks 4 --out here.yaml
      hybrid plan --model my_package.model:build --cluster here.yaml --global-batch 32 --precision fp32 --measure 3
      torchrun --nnodes 2 --nproc-per-node 8 ... --no-python hybrid calibrate --out lab.yaml    # on each host
      hybrid cluster show here.yaml
    """
    from hybrid.calibration import calibrate as measuring  # torch may come with it

    environment = read_environment()
    is_first = environment.rank == 0
    console = Console(highlight=False, stderr=True)
    if not environment.launched:
        measuring.check_out(out)  # what cannot be is no matter of load
        _warn(measuring.checked_ranks(ranks), console)
    try:
        with _progress(console if is_first else None) as progress:
            cluster = measuring.calibrate(out, ranks=ranks, quick=quick, progress=progress)
    except KeyboardInterrupt as stop:
        typer.echo(f"hybrid: {str(stop) or 'stopped by Ctrl-C'}", err=True)
        raise typer.Exit(130) from None
    if not is_first:
        return
    assert cluster.measured is not None  # it was measured just now
    for part in _as_text(cluster, cluster.measured):
        Console(highlight=False).print(part)
    typer.echo(f"\ncluster file: {out}; next: hybrid plan --model ... --cluster {out} --global-batch ...")


def _warn(ranks: int, console: Console) -> None:
    machine = this_machine()
    if ranks > machine.cores:
        console.print(
            f"note: {ranks} ranks share {machine.cores} cores: each is measured, and planned, with its part of one",
            soft_wrap=True,
        )
    if machine.load > machine.cores / 2:
        console.print(
            f"note: other processes are busy (load {machine.load:.1f} on {machine.cores} cores): the figures will be "
            "of a machine that is shared with them",
            soft_wrap=True,
        )


@contextmanager
def _progress(console: Console | None) -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar on a terminal."""
    if console is None or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description:28}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting ranks", total=None)
        yield lambda done, total, label: bar.update(task, completed=done, total=total, description=label)


def _as_text(cluster: Cluster, measured: Measurements) -> Iterator[Table | str]:
    machine = measured.machine
    each = machine.accelerator or f"{machine.cores} core{'s' if machine.cores > 1 else ''} of {machine.processor}"
    yield (
        f"{len(machine.hosts)} host{'s' if len(machine.hosts) > 1 else ''} × {machine.ranks_per_host} ranks, {each}, "
        f"{machine.backend}; {measured.seconds:.0f} s, load before {measured.load:.1f}"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what", no_wrap=True)
    table.add_column("each rank", justify="right", no_wrap=True)
    table.add_column("spread", justify="right")
    for name, value, spread in _rows(measured):
        table.add_row(name, value, "" if spread is None else f"{spread:.0%}")
    yield table
    if measured.spread > _NOISY:
        yield (
            f"the windows differ by {measured.spread:.0%}: the machine was not quiet; measure again when it is, or "
            "take the plan's times for rough"
        )


_NOISY = 0.5


def _rows(measured: Measurements) -> Iterator[tuple[str, str, float | None]]:
    """(what, its best, spread): one line for each kind."""
    for dtype in dict.fromkeys(point.dtype for point in measured.matmul):
        best = max(
            (point for point in measured.matmul if point.dtype == dtype),
            key=lambda point: point.m * point.k * point.n / point.seconds,
        )
        rate = 2e-9 * best.m * best.k * best.n / best.seconds
        yield f"products in {dtype}, {best.m} × {best.k} × {best.n}", f"{rate:,.1f} GFLOP/s", best.spread
    for attention in measured.attention:
        shape = f"{attention.batch} × {attention.heads} heads, {attention.seq} × {attention.head_dim}"
        way = "backward" if attention.is_backward else "forward"
        yield f"attention {way}, {shape}", format_seconds(attention.seconds), attention.spread
    for point in measured.pointwise:
        rate = point.bytes_per_second / 1e9
        yield f"pointwise, {format_bytes(point.num_bytes)}", f"{rate:,.2f} GB/s", point.spread
    if measured.optimizer_bytes_per_second is not None:
        yield "optimizer", f"{measured.optimizer_bytes_per_second / 1e9:,.2f} GB/s", None
    if measured.launch is not None:
        yield "launch of an operation", format_seconds(measured.launch.forward_seconds), measured.launch.spread
    if measured.step is not None:
        yield "a step beside the model", format_seconds(measured.step.step_seconds), measured.step.spread
    for curve in measured.collectives:
        largest = max(curve.points, key=lambda one: one.num_bytes)
        least = min(curve.points, key=lambda one: one.num_bytes)
        apart = f", {curve.stride} apart" if curve.stride > 1 else ""
        name = f"{curve.kind.replace('_', '-')} over {curve.size}{apart}: {format_bytes(least.num_bytes)} and "
        name += format_bytes(largest.num_bytes)
        yield name, f"{format_seconds(least.seconds)}, {format_seconds(largest.seconds)}", largest.spread
