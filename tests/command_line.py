"""The tree of commands of `hybrid`, as typer builds it, for tests that look at options without running anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from hybrid.cli.app import app

__all__ = ["COMMAND", "command_names", "subcommands"]

COMMAND: Any = typer.main.get_command(app)


def subcommands(command: Any) -> dict[str, Any]:
    """Name -> command, in the order of --help; empty for one that is no group."""
    if not hasattr(command, "list_commands"):
        return {}
    context = typer.Context(command)
    return {name: command.get_command(context, name) for name in command.list_commands(context)}


def command_names(command: Any = COMMAND, name: str = "") -> Iterator[str]:
    """Every command by its words after `hybrid`: "run", "checkpoint ls", ..."""
    inner = subcommands(command)
    if not inner:
        yield name
    for part, one in inner.items():
        yield from command_names(one, f"{name} {part}".strip())
