"""The console script `hybrid`. A new command is one line in COMMANDS; its module reads the options.

A command's module is imported when the command is asked for: most need libraries that the others do not.
"""

from __future__ import annotations

import sys
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from hybrid import __version__
from hybrid.errors import HybridError

__all__ = ["app", "main"]

_PASSES_ON = {"allow_interspersed_args": False}  # what follows the name of a script is for the script

# Name -> module and function (or group) in it, and click's settings; in the order in which --help lists them.
COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": ("hybrid.cli.demo:demo", {}),
    "run": ("hybrid.cli.run:run", _PASSES_ON),
    "profile": ("hybrid.cli.profile:profile", _PASSES_ON),
    "explain": ("hybrid.cli.explain:explain", {}),
    "dryrun": ("hybrid.cli.dryrun:dryrun", {}),
    "import": ("hybrid.cli.import_config:import_file", {}),
    "plan": ("hybrid.cli.plan:plan", {}),
    "calibrate": ("hybrid.cli.calibrate:calibrate", {}),
    "schedule": ("hybrid.cli.schedule:schedule", {}),
    "verify-placement": ("hybrid.cli.verify_placement:verify_placement", {}),
    "cluster": ("hybrid.cli.cluster:commands", {}),
    "checkpoint": ("hybrid.cli.checkpoint:commands", {}),
}
# How pydantic names an error about a number -> what is expected.
_EXPECTED = {"int_": "a whole number", "float_": "a number"}
_SHORT_HELP = {
    "cluster": "Look at clusters: devices, links, switches, rates.",
    "checkpoint": "Look at checkpoints, check their files, export weights.",
}

HELP = """
Train an ordinary PyTorch model over many processes, as one strategy says.

\b
Start here:
  hybrid demo                                   a real model on 4 local ranks, under two minutes
  hybrid run --nproc 4 train.py --epochs 3      your script on 4 ranks of this machine
  hybrid profile --nproc 4 train.py             where the time of its steps goes, and what to change
  hybrid explain strategy.yaml --world-size 16  every setting of a strategy and where it comes from
  hybrid dryrun strategy.yaml --model llama3-70b --world-size 16384   one rank of a huge job, on this machine
  hybrid import ds_config.json                  a DeepSpeed, Accelerate or Fleet configuration as a strategy
  hybrid plan --model llama3-8b --cluster 1x8xH100 --global-batch 64   the fastest layout that fits
  hybrid calibrate --ranks 4 --out here.yaml    measure this machine, for hybrid plan --cluster here.yaml
  hybrid cluster show 4x8xH100                  links and switches of a cluster, and their rates
  hybrid schedule --stages 4 --micro-batches 8  who does what when in a pipeline, and the bubble
  hybrid checkpoint ls runs/a                   checkpoints of a folder; verify, show, export

\b
In the script:
  model = hybrid.distributed_model(model, strategy=strategy)
  optimizer = hybrid.distributed_optimizer(optimizer)
"""


@cache
def _command(name: str) -> Any:
    home, settings = COMMANDS[name]
    module, _, attribute = home.partition(":")
    found = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        command = typer.main.get_command(found)
        command.short_help = _SHORT_HELP[name]
        return command
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, context_settings={"help_option_names": ["-h", "--help"], **settings})(found)
    return typer.main.get_command(alone)


class _Commands(TyperGroup):
    """The group of all commands, which imports the one that is asked for; `--help` all of them.

    Contexts and commands are click's; some versions of typer have a copy of their own (0.29 does): hence `Any`.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS:
            near = get_close_matches(args[0], COMMANDS)  # typer's own looks among commands that are imported already
            ctx.fail(
                f"No such command {args[0]!r}." + (f" Did you mean {' or '.join(map(repr, near))}?" if near else "")
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = _what_was_given(error) or error.message
            raise


def _what_was_given(error: typer.BadParameter) -> str | None:
    """What was given and what is expected, where typer hands on pydantic's words, which do not say what was given."""
    if not isinstance(error.__cause__, ValidationError):
        return None
    first = error.__cause__.errors(include_url=False)[0]
    expected = next((words for kind, words in _EXPECTED.items() if first["type"].startswith(kind)), None)
    return None if expected is None else f"got {first['input']!r}, expected {expected}"


app = typer.Typer(
    name="hybrid",
    cls=_Commands,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


if __name__ == "__main__":
    main()
