"""A cluster as a page: every link is told, equal nodes are drawn once, what differs is never folded away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybrid.cli.app import app
from hybrid.cli.cluster_summary import ClusterSummary
from hybrid.contracts.cluster import parse_cluster
from hybrid.report.cluster_folding import fold, link_kinds
from tests.pure.test_report_pages import Reader

LAB = {
    "name": "lab",
    "cluster": "64x8xH100",
    "network": "8x400G",
    "links": [{"between": ["node3/nic2", "leaf0/rail2"], "speed": "100G"}],
}


def page_of(source: object) -> tuple[str, Reader]:
    text = ClusterSummary(cluster=parse_cluster(source, describe=True)).page()  # type: ignore[arg-type]
    return text, Reader(text)


@pytest.mark.parametrize(
    ("cluster", "devices", "links"),
    [
        ("1xH100", 1, 1),
        ("1x8xH100", 8, 8),
        ("2x8xMI300X", 16, 2 * 28 + 16 + 16 + 8),  # pairs, cards, leaves, spine
        ("1x8xV100-32GB", 8, 16 + 8),  # some pairs, and the host
        ("1x8xH100+1x8xA100", 16, 2 * 8 + 16 + 16 + 8),
    ],
)
def test_a_small_cluster_is_drawn_whole(cluster: str, devices: int, links: int) -> None:
    """Every device and every link can be pointed at, also of a cluster on which nothing can be planned."""
    text, read = page_of(cluster)
    assert sum(tip.startswith("rank ") for tip in read.tips) == devices
    assert sum(" – " in tip for tip in read.tips) == links
    assert ("Nothing can be planned here" in text) == ("+" in cluster)
    assert read.addresses == []


def test_a_slow_link_is_not_folded_away() -> None:
    """One cable of 64 nodes: the node with it is drawn by itself, red, and named; the equal ones once each."""
    text, read = page_of(LAB)
    assert text.count('class="link slow"') == 1
    assert "leaf0/rail2 – node3/nic2: 12.5 GB/s" in read.tips
    assert "node0 × 31" in text
    assert "node32 × 32" in text
    assert "Slower than its like: leaf0/rail2 – node3/nic2 has 12.5 GB/s, others 50 GB/s." in text
    assert sum(tip.startswith("rank ") for tip in read.tips) == 24


def test_thousands_of_devices_stay_readable() -> None:
    """16,384 devices in a page of some kilobytes, with the number of everything that is not drawn."""
    text, read = page_of("2048x8xH100")
    assert len(text) < 40_000
    assert "node0 × 2048" in text
    assert "leaf switches (512)" in text
    assert sum(tip.startswith("rank ") for tip in read.tips) == 8
    assert re.search(r"device – card</td><td[^>]*>16,384", text)


def test_every_link_is_counted_once() -> None:
    """The table of links is of the graph, not of the picture."""
    for source in ("4x8xH100", "36x4xGB200", "2x4x4090", LAB):
        cluster = parse_cluster(source)
        folded = fold(cluster, room=500, width_of=lambda domain: 100, most_switches=8)
        assert sum(kind.count for kind in link_kinds(cluster, folded)) == cluster.graph.number_of_edges()
        assert sorted(number for one in folded.looks for number in one.alike) == list(range(cluster.num_domains))


def test_the_command_writes_the_page_and_still_prints(tmp_path: Path) -> None:
    """As `schedule --html`: beside what it prints; a file that cannot be written is named with the option."""
    file = tmp_path / "größe 1.html"
    result = CliRunner().invoke(app, ["cluster", "show", "2x2xH100", "--html", str(file)])
    assert result.exit_code == 0, result.output
    assert "rings over all 4" in result.stdout
    assert Reader(file.read_text(encoding="utf-8")).ids == ["graph", "rates", "domains", "links", "device", "tip"]
    result = CliRunner().invoke(app, ["cluster", "show", "2x2xH100", "--html", str(tmp_path / "none" / "a.html")])
    assert "--html" in str(result.exception)


@pytest.mark.parametrize(
    "arguments",
    [
        ("cluster", "show", "2x2xH100", "--html"),
        ("schedule", "--stages", "2", "--micro-batches", "2", "--html"),
        ("plan", "--model", "llama2-7b", "--cluster", "1x8xA100-80GB", "--global-batch", "16", "--report"),
    ],
)
def test_a_page_has_the_name_of_one(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """HTML under the name of a text file opens as its source."""
    file = tmp_path / "page.txt"
    result = CliRunner().invoke(app, [*arguments, str(file)])
    assert f"{arguments[-1]} {file}: what is written is a page of HTML; give it a name such as page.html" in str(
        result.exception
    )
    assert not file.exists()
