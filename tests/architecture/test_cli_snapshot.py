"""The options of every command, frozen: a new flag, name or default is a decision, made in the same commit.

After such a decision `python -m tests.architecture.test_cli_snapshot` writes the new table.
"""

from __future__ import annotations

import json
import runpy
import sys
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from hybrid.cli.app import app

SNAPSHOT = Path(__file__).with_name("cli_options.json")


def options_of(command: Any, name: str) -> dict[str, dict[str, str]]:
    """Command path -> spellings -> type and default, for a command and everything below it.

    Types and defaults are those of the function: they do not depend on typer's inner classes.
    """
    types = get_type_hints(command.callback)
    given = signature(command.callback).parameters
    table = {name: {}}
    for parameter in command.params:
        if parameter.name in given:
            type_ = types[parameter.name]
            default = given[parameter.name].default
            table[name][" ".join([*parameter.opts, *parameter.secondary_opts])] = (
                f"{type_.__name__ if isinstance(type_, type) else type_}"
                f"{', required' if default is Parameter.empty else f' = {default}'}"
            )
    if hasattr(command, "list_commands"):
        context = typer.Context(command)
        for child in sorted(command.list_commands(context)):
            table |= options_of(command.get_command(context, child), f"{name} {child}")
    return table


def current_table() -> str:
    table = options_of(typer.main.get_command(app), "hybrid")
    return json.dumps(table, indent=2, sort_keys=True) + "\n"


def test_options_are_the_frozen_ones() -> None:
    assert json.loads(current_table()) == json.loads(SNAPSHOT.read_text(encoding="utf-8"))


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m hybrid.cli.app` did nothing, and ended with 0; `python -m hybrid` was no module."""
    monkeypatch.setattr(sys, "argv", ["hybrid", "--version"])
    for module in ("hybrid.cli.app", "hybrid"):
        monkeypatch.delitem(sys.modules, "hybrid.cli.app", raising=False)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
        assert not ended.value.code
        assert capsys.readouterr().out.startswith("hybrid ")


def test_a_misspelt_command_names_the_nearest() -> None:
    """typer looks for it among the commands that are imported already: none."""
    told = CliRunner().invoke(app, ["plna"])
    assert told.exit_code == 2
    assert "No such command 'plna'. Did you mean 'plan'?" in told.output
    assert "Did you mean" not in CliRunner().invoke(app, ["xyz"]).output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", "--nproc", "two", "train.py"), "got 'two', expected a whole number"),
        (("checkpoint", "show", "runs", "--step", "1e3"), "got '1e3', expected a whole number"),
        (("verify-placement", "map.json", "--timeout", "long"), "got 'long', expected a number"),
    ],
)
def test_what_is_no_number_is_said_with_what_was_given(words: tuple[str, ...], told: str) -> None:
    """typer hands on pydantic's words: "unable to parse string as an integer"."""
    assert told in CliRunner().invoke(app, list(words)).output


@pytest.mark.parametrize("words", [(), ("cluster",), ("checkpoint",)])
def test_helps_are_alike(words: tuple[str, ...]) -> None:
    """Groups offered to install completion, which `hybrid` itself does not."""
    told = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"}).output
    assert "Commands:" in told
    assert "completion" not in told


if __name__ == "__main__":
    SNAPSHOT.write_text(current_table(), encoding="utf-8")
