"""Fenced blocks of README and docs/, with the marks above them.

A mark is a line `<!-- word: value -->` (or `<!-- word -->`) right above the fence:

    not run: REASON      this block is only looked at
    file: NAME           the page's commands find this block as a file of that name, and one of them uses it
    run                  the commands of this block are run, after the page's earlier ones
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Fence", "fences_of"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(
    r"(?P<marks>(?:^<!-- [^>]+ -->\n)*)^```(?P<language>[\w-]+)\n(?P<code>.*?)^```$", flags=re.DOTALL | re.MULTILINE
)
_MARK = re.compile(r"^<!-- (?P<word>[^:>]+?)(?:: (?P<value>[^>]+))? -->$", flags=re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """One fenced block; `line` is the page's line of its first statement."""

    page: str
    line: int
    language: str
    code: str
    marks: dict[str, str]

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"


def fences_of(page: Path, language: str | None = None) -> list[Fence]:
    """All blocks of a page that name a language, or those of one language."""
    text = page.read_text(encoding="utf-8")
    return [
        Fence(
            page=str(page.relative_to(ROOT)),
            line=text.count("\n", 0, found.start("code")) + 1,
            language=found["language"],
            code=found["code"],
            marks={mark["word"]: mark["value"] or "" for mark in _MARK.finditer(found["marks"])},
        )
        for found in _FENCE.finditer(text)
        if language in {None, found["language"]}
    ]
