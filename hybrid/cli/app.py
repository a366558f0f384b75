"""The console script `hybrid`. A new command is one line in COMMANDS; its module reads the options."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from hybrid import __version__
from hybrid.cli.checkpoint import commands as checkpoint_commands
from hybrid.cli.cluster import commands as cluster_commands
from hybrid.cli.demo import demo
from hybrid.cli.explain import explain
from hybrid.cli.import_config import import_file
from hybrid.cli.plan import plan
from hybrid.cli.profile import profile
from hybrid.cli.run import run
from hybrid.cli.schedule import schedule
from hybrid.cli.verify_placement import verify_placement
from hybrid.errors import HybridError

__all__ = ["app", "main"]

# Name, function, and click's settings for it, in the order in which --help lists them.
COMMANDS: tuple[tuple[str, Callable[..., None], dict[str, Any]], ...] = (
    ("demo", demo, {}),
    ("run", run, {"allow_interspersed_args": False}),
    ("profile", profile, {"allow_interspersed_args": False}),
    ("explain", explain, {}),
    ("import", import_file, {}),
    ("plan", plan, {}),
    ("schedule", schedule, {}),
    ("verify-placement", verify_placement, {}),
)

HELP = """
Train an ordinary PyTorch model over many processes, as one strategy says.

\b
Start here:
  hybrid demo                                   a real model on 4 local ranks, under two minutes
  hybrid run --nproc 4 train.py --epochs 3      your script on 4 ranks of this machine
  hybrid profile --nproc 4 train.py             where the time of its steps goes, and what to change
  hybrid explain strategy.yaml --world-size 16  every setting of a strategy and where it comes from
  hybrid import ds_config.json                  a DeepSpeed, Accelerate or Fleet configuration as a strategy
  hybrid plan --model llama3-8b --cluster 1x8xH100 --global-batch 64   the fastest layout that fits
  hybrid cluster show 4x8xH100 --network 8x400G links and switches of a cluster, and their rates
  hybrid schedule --stages 4 --micro-batches 8  who does what when in a pipeline, and the bubble
  hybrid checkpoint ls runs/a                   checkpoints of a folder; verify, show, export

\b
In the script:
  model = hybrid.distributed_model(model, strategy=strategy)
  optimizer = hybrid.distributed_optimizer(optimizer)
"""

app = typer.Typer(
    name="hybrid",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _function, _settings in COMMANDS:
    app.command(_name, context_settings={"help_option_names": ["-h", "--help"], **_settings})(_function)
app.add_typer(cluster_commands, short_help="Look at clusters: devices, links, switches, rates.")
app.add_typer(checkpoint_commands, short_help="Look at checkpoints, check their files, export weights.")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"hybrid {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of `hybrid` itself."""


def main() -> None:
    """Run the command line; an error that hybrid raises on purpose is one message and exit code 2."""
    try:
        app()
    except HybridError as error:
        print(f"hybrid: {error}", file=sys.stderr)
        sys.exit(2)
