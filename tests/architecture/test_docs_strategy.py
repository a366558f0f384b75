"""docs/strategy.md lists every setting with its default and every field of Fleet, and nothing else."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import yaml

from hybrid.strategy import DistributedStrategy
from hybrid.strategy import fleet_fields as fleet
from hybrid.strategy.availability import _MISSING
from hybrid.strategy.gather import _PLACES
from hybrid.strategy.settings import Section, Settings, all_settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategy.md"
TEXT = PAGE.read_text(encoding="utf-8")

SECTIONS: dict[str, type[Settings]] = {kind.PATH: kind for kind in all_settings()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a table: the headings above it, and its cells by the table's header."""

    heading: str
    kind: str  # the first cell of the table's header
    cells: tuple[str, ...]


def rows() -> list[Row]:
    found = []
    heading, header = "", ""
    for line in TEXT.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            header = ""
            continue
        cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
        if not header:
            header = cells[0]
        elif set(cells[0]) != {"-"}:
            found.append(Row(heading=heading, kind=header, cells=cells))
    return found


def names(cell: str) -> list[str]:
    """The code spans of a cell; `a.{b,c}.d` stands for `a.b.d` and `a.c.d`."""
    listed = []
    for span in re.findall(r"`([^`]+)`", cell):
        pieces = [piece.split(",") for piece in re.split(r"[{}]", span)]
        listed += ["".join(choice) for choice in product(*pieces)]
    return listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """One setting as the page has it."""

    section: type[Settings]
    key: str
    default: str
    is_marked: bool
    """Whether a dagger says that it, or some of its values, are not available yet."""

    @property
    def path(self) -> str:
        return self.section.path_of(self.key)


def documented() -> list[Documented]:
    found = []
    for row in rows():
        if row.kind != "setting":
            continue
        home = names(row.heading)
        section = SECTIONS[home[0] if home else ""]
        [key] = names(row.cells[0])
        found.append(
            Documented(
                section=section, key=key, default="".join(names(row.cells[2])), is_marked="†" in "".join(row.cells)
            )
        )
    return found


DOCUMENTED = documented()
FLEET_PATHS = [name for row in rows() if row.kind == "Fleet's field" for name in names(row.cells[0])]


def canonical(schema: dict[str, object], kind: type[Settings]) -> list[str]:
    """Paths of all settings of the JSON schema under our own names, Fleet's fields and aliases left out."""
    paths = []
    properties = schema["properties"]
    assert isinstance(properties, dict)
    for key, inner in properties.items():
        if key not in kind.own_keys():
            continue
        paths.append(kind.path_of(key))
        section = kind.section_type(key)
        forms = inner.get("anyOf", [])
        paths += [path for form in forms if section and "properties" in form for path in canonical(form, section)]
    return paths


def test_every_setting_of_the_schema_stands_in_the_page() -> None:
    """The page is the reference: a setting that is not there does not exist for a reader."""
    wanted = canonical(DistributedStrategy.json_schema(), DistributedStrategy)
    assert len(wanted) > 50, "the walk over the schema finds the sections"
    assert sorted(setting.path for setting in DOCUMENTED) == sorted(wanted)


def test_aliases_stand_in_the_page() -> None:
    spans = {span for row in rows() if row.kind == "setting" for span in names(row.cells[-1])}
    aliases = {alias for kind in SECTIONS.values() for alias in kind.ALIASES}
    assert sorted(aliases - spans) == []


@pytest.mark.parametrize("setting", DOCUMENTED, ids=lambda setting: setting.path)
def test_defaults_are_true(setting: Documented) -> None:
    """The default in the table, read as the setting reads it, is the setting's default."""
    section = setting.section.section_type(setting.key)
    if section is not None and issubclass(section, Section):
        assert setting.default == ""
        return
    default = setting.section().default(setting.key)
    if setting.default == "":
        assert default is None
        return
    given = setting.section({setting.key: yaml.safe_load(setting.default)})
    assert getattr(given, setting.key) == default


def test_daggers_stand_where_something_is_not_available_yet() -> None:
    """Both ways: a feature that was built loses its dagger, and one that was not has it at every spelling."""
    refused = {place for missing in _MISSING for place in _PLACES[missing.setting]}
    flags_of_sections = {"tensor_parallel", "pipeline"}  # said there once more
    assert {setting.path for setting in DOCUMENTED if setting.is_marked} - flags_of_sections == refused


def test_every_field_of_fleet_stands_in_the_page_once() -> None:
    """Both ways: none is left out, and none is invented."""
    known = [field.path for field in fleet._TABLE.values()]
    assert sorted(FLEET_PATHS) == sorted(known)


def test_fleet_fields_stand_under_the_right_answer() -> None:
    """What the page calls used is used, what it calls refused is refused."""
    for row in rows():
        if row.kind != "Fleet's field":
            continue
        for path in names(row.cells[0]):
            section, _, key = path.rpartition(".")
            field = fleet.fleet_field(section, key)
            assert field is not None, path
            answer = "Refused" if field.refused else "Used" if field.setting else "Agree"
            assert row.heading.startswith(answer), f"{path} stands under {row.heading!r}"


def test_shown_output_is_real() -> None:
    """A block marked `<!-- output: the block above -->` is what the python block before it prints."""
    pattern = r"```python\n((?:(?!```).)*?)```(?:(?!```).)*?<!-- output: the block above -->\n```text\n(.*?)```"
    shown = re.findall(pattern, TEXT, flags=re.DOTALL)
    assert len(shown) == TEXT.count("<!-- output: the block above -->") > 0
    for code, expected in shown:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})
        assert printed.getvalue() == expected


def test_yaml_of_the_page_is_a_strategy() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        assert DistributedStrategy.from_yaml(block).problems(8) == ()
