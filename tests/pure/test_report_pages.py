"""Pages to look at: one file each, whole, with nothing loaded from elsewhere, and every figure that a picture shows."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import hybrid
from hybrid.cli.app import main
from hybrid.contracts.schedule import make_schedule
from hybrid.contracts.schedule_timing import time_schedule
from hybrid.planner.plan import Plans
from hybrid.report.page import Section, TableData, page
from hybrid.report.pictures import Point, points
from hybrid.report.plan_page import plan_page
from hybrid.report.plan_table import plan_columns, ranking
from hybrid.report.schedule_page import schedule_page

VOID = {"meta", "link", "br", "img", "input", "rect", "path", "circle"}


class Reader(HTMLParser):
    """Tags must be closed in order; notes what can be pointed at, and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.tips: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        given = dict(attributes)
        self.ids += [value for name, value in attributes if name == "id" and value]
        self.tips += [given["data-tip"] or ""] if "data-tip" in given else []
        self.addresses += [value or "" for name, value in attributes if name in {"src", "href"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(("width", "num_tables"), [(40, 5), (60, 4), (80, 2), (200, 1)])
def test_the_ranking_cuts_nothing_off_on_a_narrow_terminal(width: int, num_tables: int) -> None:
    """At 80 columns the chance of running out of memory was `0.…`, at 60 every cell, and the numbers were gone."""
    plans = hybrid.plan("llama3-8b", "1x8xH100", global_batch_size=64)
    told = StringIO()
    Console(width=width, file=told, force_terminal=False).print(ranking(plans, width=width))
    assert "…" not in told.getvalue()
    for head, cells in plan_columns(plans):
        assert all(cell in told.getvalue() for cell in [head, *cells]), head
    assert sum(line.lstrip().startswith("#") for line in told.getvalue().splitlines()) == num_tables


@pytest.fixture(scope="module")
def plans() -> Plans:
    return hybrid.plan("llama3-8b", "2x8xA100-80GB", global_batch_size=64, seq=2048, fixed="pp=2,tp=2", num_plans=5)


def test_a_plan_is_shown_with_all_its_parts(plans: Plans) -> None:
    """A picture that leaves a part out would be believed."""
    text = plan_page(plans)
    read = Reader(text)
    assert read.addresses == []
    assert not re.search(r"@import|url\(|https?://(?!arxiv|github)", text.split("<body>")[0])
    assert read.ids == [
        *("layouts", "memory", "step", "schedule", "graph", "ranks", "candidates", "left-out", "assumptions", "tip"),
    ]
    for stage in plans.best.memory.stages:
        shown = {tip.split(": ")[1].rsplit(" ", 2)[0] for tip in read.tips if tip.startswith(f"pp {stage.stage}: ")}
        assert {name.replace("_", " ") for name, size in stage.parts.items() if size > 0} <= shown
    actions = [tip for tip in read.tips if re.match(r"[FB]\d+\.\d+: ", tip)]
    chosen = plans.best.candidate
    assert len(actions) == 2 * chosen.pp * chosen.virtual_stages * chosen.num_micro_batches
    on_graph = {tip.split(":")[0]: tip for tip in read.tips if tip.startswith("rank ") and " link of " in tip}
    assert sum(tip.startswith("rank ") for tip in read.tips) == 16 + len(on_graph)
    assert len(on_graph) == 16
    assert "node1/gpu0, A100-SXM-80GB\npp 1, " in on_graph["rank 8"]
    told = {tip.split("\n")[0]: tip.split("\n")[-1] for tip in read.tips if " mb" in tip}
    assert len(told) > len(plans.result.found)
    for one in plans.result.found:
        assert re.fullmatch(r"the best|fits, and is [\d.]+% slower than the best", told[one.candidate.label])
    assert list(told.values()).count("the best") == 1
    for rejection in plans.result.rejections:
        assert f"{rejection.count:,}" in text


def test_the_map_of_thousands_of_ranks_is_whole() -> None:
    """A map that ends with the first pipeline stages would say nothing of the others: nodes are squares then."""
    plans = hybrid.plan("llama3-70b", "256x8xH100", global_batch_size=512, seq=2048, fixed="pp=4,tp=8", num_plans=1)
    tips = [tip for tip in Reader(plan_page(plans)).tips if tip.startswith("ranks ")]
    assert len(tips) == 256
    assert tips[-1].startswith("ranks 2040 to 2047: node255/gpu0 to node255/gpu7\npp 3, ")
    assert "tp 0 to 7" in tips[-1]


def test_what_a_user_named_cannot_break_the_page() -> None:
    section = Section(
        name="a", heading="<b>x</b>", points=["</script>"], table=TableData(heads=("<i>",), rows=[("a & b",)])
    )
    text = page("<title>", "&", [section])
    read = Reader(text)
    assert read.tags["b"] == read.tags["i"] == 0
    assert read.tags["script"] == 1
    assert "&lt;/script&gt;" in text


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_schedule_is_shown_action_by_action(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_schedule(name, num_stages=3, num_micro_batches=4)
    text = schedule_page(time_schedule(made, forward_seconds=1, backward_seconds=2))
    tips = {tip.split(":")[0] for tip in Reader(text).tips}
    assert tips == {str(action) for order in made.actions for action in order}
    monkeypatch.chdir(tmp_path)
    arguments = ["hybrid", "schedule", "--stages", "3", "--micro-batches", "4", "--schedule", name, "--html", "s.html"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in {0, None}
    assert (tmp_path / "s.html").read_text() == text
    monkeypatch.setattr("sys.argv", [*arguments[:-1], "none/s.html"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2


@pytest.mark.parametrize("values", [[(1e9, 1.0)], [(0.0, 0.0)], [(1e9, 1.0), (2e9, 1.0)], [(3e10, 80.0), (8e10, 81.0)]])
def test_points_lie_inside_the_picture(values: list[tuple[float, float]]) -> None:
    """Also one alone, all alike, or nothing at all."""
    drawn = points([Point(x_bytes=x, y_seconds=y, tip="t", fits=True) for x, y in values])
    places = [(float(x), float(y)) for x, y in re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', drawn)]
    assert len(places) == len(values)
    assert all(90 <= x <= 1080 and 8 <= y <= 300 for x, y in places)
