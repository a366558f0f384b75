"""docs/support.md says what the code refuses, and nothing else; `python -m tests.support` writes it anew.

In the default run the lines about settings are found again from nothing. Those about models and optimizers, whose
search takes minutes, are put to the test: each is true, and none is missing in what is drawn. The whole page is found
again with

    python -m pytest tests/architecture/test_docs_support.py -m full
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice

import pytest

import hybrid
from tests.support.__main__ import PAGE
from tests.support.axes import MODEL, SETTINGS, SWITCHES, refusals
from tests.support.calls import said_by_calls
from tests.support.models import MODELS
from tests.support.page import calls_of, in_order, matrix, matrix_of, page_of, rows_of, shown
from tests.support.rules import Rule, wrongly_told
from tests.support.sweep import all_rules, optimizer_choices, other_models, setting_choices, setting_rules

TEXT = PAGE.read_text(encoding="utf-8")
ROWS = rows_of(TEXT)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is on its way out, and a model of it is among those tried
        yield


def test_the_lines_about_settings_are_what_the_checks_say() -> None:
    """A refusal that is new, gone or said in other words changes the page."""
    found = [rule for rule in in_order(setting_rules()) if rule.floor == "strategy"]
    told = [row for row in ROWS if row.floor == "strategy"]
    assert [(shown(rule.said), _sets(rule)) for rule in found] == [(row.said, _sets(row)) for row in told]


def _sets(rule: Rule) -> dict[str, list[str]]:
    return {axis: sorted(map(repr, values)) for axis, values in rule.conditions.items()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.floor}-{'-'.join(map(str, row.example.values()))[:60]}")
def test_the_first_choice_of_a_line_is_refused_in_these_words(row: Rule) -> None:
    """And with any of its settings outside of the line it is not, or in other words."""
    choice = row.example
    if row.floor == "model":
        assert MODEL in choice, "every model"
    floor, said = refusals(choice)
    assert floor == row.floor
    assert row.said in map(shown, said)
    for axis in row.conditions:
        less = {name: value for name, value in choice.items() if name != axis}
        if None not in row.conditions[axis]:
            assert row.said not in map(shown, refusals(less)[1]), f"{axis} makes no difference"


def test_nothing_else_is_refused() -> None:
    """Choices that are drawn are refused where a line says so, and only there."""
    settings = list(setting_choices(600, seed=3))[-600:]
    models = list(other_models(7, seed=5))
    optimizers = list(islice(optimizer_choices(2, seed=5), 0, None, 4))
    assert wrongly_told(ROWS, [*settings, *models, *optimizers]) == []


def test_the_table_at_a_glance_is_what_the_lines_say() -> None:
    assert matrix_of(TEXT) == matrix(ROWS)


def test_calls_are_refused_in_these_words() -> None:
    assert calls_of(TEXT) == {name: shown(said) for name, said in said_by_calls().items()}


def test_a_section_that_is_off_is_refused() -> None:
    """Which the sweep leaves out: a line for each setting of these sections would say it."""
    for path, values in SETTINGS.items():
        section, _, key = path.rpartition(".")
        if section in SWITCHES:
            strategy = hybrid.DistributedStrategy({section: {key: values[0]}})
            assert any(f"is given, but {SWITCHES[section][0]} was not set" in said for said in strategy.problems())
    for flag in ("tensor_parallel", "pipeline"):
        assert f"{flag} = True, but no degree is given" in hybrid.DistributedStrategy({flag: True}).problems()[0]


@pytest.mark.full
def test_the_whole_page_is_what_the_checks_say() -> None:
    rules = all_rules()
    assert page_of(rules, said_by_calls()) == TEXT
    models = list(other_models(80, seed=50))
    assert len(models) == 80 * len(MODELS)
    assert wrongly_told(in_order(rules), [*setting_choices(5000, seed=50), *models, *optimizer_choices(50)]) == []
