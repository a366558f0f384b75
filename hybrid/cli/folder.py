"""A folder given on the command line."""

from __future__ import annotations

from pathlib import Path

import typer

__all__ = ["given_folder"]


def given_folder(text: str) -> Path:
    """The path. An empty text, as of a shell's variable that is not set, is none: it would be the current folder."""
    if not text.strip():
        raise typer.BadParameter("is empty; expected a folder (is a variable of the shell not set?)")
    return Path(text).expanduser()
