"""How the pages of this folder become a site: `sphinx-build -W docs OUTPUT`, with the extra `docs` installed.

The pages are plain Markdown that reads well without the site; only api.md and command_line.md are filled in by it.
Nothing is fetched, neither here nor by a reader: no fonts, no scripts from elsewhere.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.testing import CliRunner

import hybrid
from hybrid.cli.app import app as command_line

project = "hybrid"
author = "the hybrid contributors"
copyright = "the hybrid contributors, Apache-2.0"
version = release = hybrid.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

# -- pages ---------------------------------------------------------------------------------------------------------

myst_heading_anchors = 4  # links such as training.md#losses, checked in the build
myst_enable_extensions = ["colon_fence"]
pygments_style = "friendly"
pygments_dark_style = "github-dark"
highlight_language = "text"

# -- theme ---------------------------------------------------------------------------------------------------------

html_theme = "furo"
html_title = f"hybrid {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False  # would be fetched, which a browser refuses to a page that is opened as a file
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}

# -- API -----------------------------------------------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
maximum_signature_line_length = 120
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Fields", "params_style")]
default_role = "code"  # docstrings quote code by single backticks


class CommandHelp(SphinxDirective):
    """`{command-help} NAME`: what `hybrid NAME --help` prints."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        words = self.arguments[0].split()
        answer = CliRunner().invoke(command_line, [*words, "--help"], prog_name="hybrid", env={"COLUMNS": "100"})
        if answer.exit_code:
            raise self.error(f"hybrid {' '.join(words)} --help: {answer.output}")
        return [nodes.literal_block(answer.output, answer.output, language="text", classes=["command-help"])]


# -- docstrings ----------------------------------------------------------------------------------------------------
#
# They are written to be read by help(): what is set off by its indentation is an example or a table and stays as it is,
# and a paragraph of lines `name: meaning` lists fields.

SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Fields):$")
FIELD = re.compile(r"^\w+(, \w+)*: ")


def _docstring_lines(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """What Sphinx calls for each docstring, before napoleon reads the sections."""
    lines[:] = [line for paragraph in _paragraphs(lines) for line in [*paragraph, ""]]


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    in_section = False
    for is_text, group in itertools.groupby(lines, key=lambda line: bool(line.strip())):
        if not is_text:
            continue
        paragraph = list(group)
        if SECTION.match(paragraph[0]):
            in_section = True
            yield list(_with_tables(paragraph))
        elif all(line.startswith(" ") for line in paragraph):
            yield paragraph if in_section else ["::", "", *paragraph]
        else:
            in_section = False
            fields = [line for line in paragraph if not line.startswith(" ")]
            if all(FIELD.match(line) for line in fields):
                yield ["Fields:", *(f"    {line}" for line in paragraph)]
            else:
                yield paragraph


def _with_tables(section: list[str]) -> Iterator[str]:
    """An entry that ends in a colon is followed by a table, which reaches to the next entry."""
    is_table = False
    for line in section:
        is_entry = not line.startswith(" " * 8)
        if not is_entry and is_table:
            yield f"    {line}"
            continue
        yield line
        is_table = is_entry and line.startswith("    ") and line.endswith(":")
        if is_table:
            yield from ("", "        ::", "")


# -- links ---------------------------------------------------------------------------------------------------------


def _titles_for_files(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """A link that reads `zero.md` on the page of the source reads as that page's title on the site."""
    for link in doctree.findall(nodes.reference):
        name = link.astext().removesuffix(".md")
        if link.get("internal") and name != link.astext() and name in app.env.titles:
            link.children = [nodes.inline(text=app.env.titles[name].astext().partition(":")[0])]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("doctree-resolved", _titles_for_files)
    app.add_directive("command-help", CommandHelp)
    app.connect("autodoc-process-docstring", _docstring_lines, priority=400)  # before napoleon's, at 500
