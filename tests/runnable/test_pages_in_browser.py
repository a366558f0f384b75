"""The pages in headless Chromium, as a reader has them: in light and dark, on the screen of a laptop.

Skipped without Chromium; `.ci/run` installs it, and sets HYBRID_NEEDS_BROWSER so that nothing is skipped there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import hybrid
from hybrid.cli.cluster_summary import ClusterSummary
from hybrid.contracts.cluster import parse_cluster
from hybrid.contracts.schedule import make_schedule
from hybrid.contracts.schedule_timing import time_schedule
from hybrid.report.plan_page import plan_page
from hybrid.report.profile_page import profile_page
from hybrid.report.schedule_page import schedule_page
from tests.browser import CHROMIUM, Browser
from tests.pure.test_profile_advice import profile_of
from tests.pure.test_report_cluster import LAB
from tests.pure.test_report_profile import WAITS, timelines

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None and not os.environ.get("HYBRID_NEEDS_BROWSER"),
        reason="no Chromium here: apt-get install chromium, or run .ci/run as root",
    ),
]

# Page -> (element, words that are shown when the mouse is over it).
HOVERS = {
    "plan": [
        ("#memory rect", "activations"),
        ("#schedule rect", "forward, chunk 0, micro-batch 0"),
        ("#graph rect[data-tip^='rank 5']", "pp 1, "),
        ("#graph .link", "GB/s"),
        ("#ranks rect[data-tip]", "rank 0: node0/gpu0"),
        ("#candidates circle.best", "the best"),
        ("#candidates circle.c0", "slower than the best"),
        ("#candidates circle.over", "more than there is"),
    ],
    "schedule": [("#clock rect", "F0.0: forward")],
    "cluster": [("#graph rect[data-tip^='rank 0']", "1 link of 450 GB/s"), ("#graph .slow", "12.5 GB/s")],
    "profile": [("#step rect", "forward 3 s"), ("#timeline rect.c4", "reduce_scatter on dp_shard")],
}

# In JavaScript: the contrast between the text of an element and what lies behind it, as WCAG counts it.
CONTRAST = """(selector => {
  const light = color => color.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const element = document.querySelector(selector), style = getComputedStyle(element);
  let behind = element;
  while (behind && /rgba\\(0, 0, 0, 0\\)/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
  const both = [light(element instanceof SVGElement ? style.fill : style.color),
                light(getComputedStyle(behind).backgroundColor)].sort((a, b) => b - a);
  return (both[0] + 0.05) / (both[1] + 0.05);
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> file, of all kinds of pages."""
    plans = hybrid.plan("llama3-8b", "1x8xA100-40GB", global_batch_size=64, seq=4096, fixed="pp=2", num_plans=4)
    timed = time_schedule(
        make_schedule("zb-h1", num_stages=4, num_micro_batches=8), forward_seconds=1, backward_seconds=2
    )
    made = {
        "plan": plan_page(plans),
        "schedule": schedule_page(timed),
        "cluster": ClusterSummary(cluster=parse_cluster(LAB)).page(),
        "profile": profile_page(profile_of(WAITS, dp_shard=2), timelines()),
    }
    folder = tmp_path_factory.mktemp("größe & pages")
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", HOVERS)
def test_a_page_is_whole_readable_and_loads_nothing(
    browser: Browser, pages: dict[str, Path], name: str, dark: bool
) -> None:
    """What must hold of each: no error in the console, no request but for itself, no picture without a size, nothing
    wider than the screen, text that can be read, and the reason of whatever the mouse is over."""
    page = browser.open(pages[name], dark=dark)
    assert page.requests() == [pages[name].as_uri()]
    sizes = page.value(
        "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect()).map(b => [b.width, b.height])"
    )
    assert sizes
    assert all(width > 10 and height > 10 for width, height in sizes)
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    for selector in ("h1", "p.dim", "svg text", "td"):
        assert page.value(f"{CONTRAST}({selector!r})") >= 4.5, selector
    is_dark = page.value("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
    assert is_dark == dark
    for selector, words in HOVERS[name]:
        page.hover("h1")
        assert page.tip() is None
        page.hover(selector)
        assert words in (page.tip() or ""), (selector, page.tip())
        left, top, right, bottom = page.value(
            "(b => [b.left, b.top, b.right, b.bottom])(document.getElementById('tip').getBoundingClientRect())"
        )
        assert 0 <= left < right <= 1366, selector
        assert 0 <= top < bottom <= 768, selector
    assert page.complaints() == []
    assert page.requests() == [pages[name].as_uri()]


def test_candidates_are_reached_without_a_mouse(browser: Browser, pages: dict[str, Path]) -> None:
    """By the tabulator key, as those do who have no mouse; and the tip goes with the focus."""
    page = browser.open(pages["plan"])
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert "the best" in (page.tip() or "")
    page.value("document.activeElement.blur()")
    assert page.tip() is None


def test_a_broken_page_is_noticed(browser: Browser, tmp_path: Path) -> None:
    """What the tests above would not see, they would not protect from."""
    file = tmp_path / "broken.html"
    file.write_text("<script>console.error('a'); undefined.b;</script><img src='https://example.invalid/c.png'>")
    page = browser.open(file)
    complaints = " ".join(page.complaints())
    assert '"a"' in complaints
    assert "Cannot read properties of undefined" in complaints
    assert any("example.invalid" in address for address in page.requests())
