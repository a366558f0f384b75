"""The site of docs/ leaves nothing out (pages, public names, commands), and quotes no message that is gone.

The build itself (`sphinx-build -W`, in .ci/run) finds broken links and references. What is here needs no Sphinx.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hybrid
from tests.command_line import command_names

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation() -> None:
    """A page that no one can find might as well not be there; one that is listed twice or gone confuses."""
    listed = [
        entry
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```$", page("index.md"), flags=re.DOTALL | re.MULTILINE)
        for entry in re.findall(r"^(?:[^:\n]*: ?)?(?:[^:<\n]*<)?(\w+)>?$", tree, flags=re.MULTILINE)
    ]
    assert sorted(listed) == sorted(path.stem for path in DOCS.glob("*.md") if path.name != "index.md")


def test_every_public_name_is_in_the_api_reference() -> None:
    """`hybrid.__all__` and `hybrid.tensor.__all__` are the promise; the page must hold exactly what they promise."""
    shown: dict[str, set[str]] = {}
    module = ""
    for directive, name in re.findall(
        r"^\.\. (currentmodule|data|auto\w+):: (\w[\w.]*)", page("api.md"), flags=re.MULTILINE
    ):
        if directive == "currentmodule":
            module = name
        elif not name.startswith("hybrid."):  # in full: what a call returns
            shown.setdefault(module, set()).add(name)
    tree = ast.parse((ROOT / "hybrid" / "tensor" / "__init__.py").read_text(encoding="utf-8"))
    tensor = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert shown == {"hybrid": set(hybrid.__all__) - {"tensor"}, "hybrid.tensor": set(tensor)}


def test_every_command_is_in_the_command_reference() -> None:
    text = page("command_line.md")
    shown = re.findall(r"^```\{command-help\} (.+)$", text, flags=re.MULTILINE)
    assert sorted(shown) == sorted(command_names())
    assert re.findall(r"^## hybrid (.+)$", text, flags=re.MULTILINE) == shown


# -- messages ------------------------------------------------------------------------------------------------------

HOLE = "\0"


def texts() -> Iterator[str]:
    """Every text of the package, with HOLE where a value goes."""
    for path in sorted((ROOT / "hybrid").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)


TEXTS = list(texts())


def messages() -> list[str]:
    """What the first column of troubleshooting.md's tables quotes."""
    found = []
    for row in re.findall(r"^\| (.+?) \| ", page("troubleshooting.md"), flags=re.MULTILINE):
        found += [quoted.strip() for _, quoted in re.findall(r"(`+)(.+?)\1(?!`)", row)]
    return found


def is_said(message: str) -> bool:
    """Whether one text of the package has all the literal parts of the message, in their order."""
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
    pattern = re.compile(".*?".join(parts), flags=re.DOTALL)
    return any(pattern.search(text) for text in TEXTS)


def test_a_message_that_nobody_says_is_found() -> None:
    """The search below would also pass if it accepted anything."""
    assert is_said("a rank is gone; look for the first error")
    assert not is_said("a rank is gone; look for the last error")
    assert not is_said("… did not come within … hours")


@pytest.mark.parametrize("message", messages())
def test_troubleshooting_quotes_what_is_said(message: str) -> None:
    """Somebody searches the page for the words on the screen; words that changed would never be found."""
    literal = [word for part in message.split("…") for word in re.findall(r"[\w.']+", part)]
    assert len(literal) >= 2, "too few words to find anything by"
    assert is_said(message)


def test_enough_messages_are_quoted() -> None:
    """If the pattern stopped matching, the test above would pass over nothing."""
    assert len(messages()) > 80
