"""One page in one HTML file: sections of sentences, a picture, a table. Nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from hybrid.errors import HybridError

__all__ = ["Section", "TableData", "check_page_path", "page", "write_page"]

_SUFFIXES = {".html", ".htm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableData:
    """Rows of text; `numbers` are the heads of columns that stand to the right, `best` the row that stands out."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()
    best: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Everything but `picture`, which is SVG, is plain text."""

    name: str
    heading: str
    sentences: Sequence[str] = ()
    points: Sequence[str] = ()
    picture: Markup | None = None
    caption: str = ""
    table: TableData | None = None


def page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The file's text. What the sections say is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # here: every `hybrid` command loads this file

    environment = Environment(
        loader=PackageLoader("hybrid.report"), undefined=StrictUndefined, autoescape=True, trim_blocks=True
    )
    return environment.get_template("page.html.j2").render(title=title, subtitle=subtitle, sections=sections)


def check_page_path(path: Path | None, *, option: str) -> None:
    """Before long work: HybridError with the option's name where the folder is not there, a folder is, or the name is
    not one that a browser opens as a page."""
    if path is not None and path.suffix.lower() not in _SUFFIXES and not path.is_dir():
        raise HybridError(
            f"{option} {path}: what is written is a page of HTML; give it a name such as {path.stem}.html"
        )
    if path is not None and path.is_dir():
        raise HybridError(f"{option} {path}: Is a directory")
    if path is not None and not path.parent.is_dir():
        raise HybridError(f"{option} {path}: there is no folder {path.parent}")


def write_page(path: Path, text: str, *, option: str) -> None:
    """Raises HybridError with the option's name: it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HybridError(f"{option} {path}: {error.strerror or error}") from None
