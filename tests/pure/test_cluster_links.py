"""What groups of ranks have of a cluster's links: figures by hand, and the shortcut against the walked graph."""

from __future__ import annotations

import math
import random
import time
from dataclasses import fields

import pytest

from hybrid.contracts.cluster import Cluster, GroupLinks, parse_cluster
from hybrid.contracts.cluster_graph import GraphLinks
from hybrid.contracts.layout import Layout
from hybrid.errors import PlanError

GB = 1e9

# Every topology inside a node; cards equal to, fewer and more than devices, and not dividing them; rails with and
# without several sets; leaves of one node and of several, oversubscribed; a rack whose last domain is smaller.
SHAPES = [
    ("4x8xH100", {"network": "8x400G"}),
    ("4x8xH100", {"network": "4x400G", "rails": False}),
    ("6x4xH100", {"network": "8x400G", "rails": True, "nodes_per_leaf": 2, "oversubscription": 3}),
    ("6x4xA100", {"network": "2x200G", "nodes_per_leaf": 2, "oversubscription": 4}),
    ("4x6xA100", {"network": "4x200G", "rails": True, "nodes_per_leaf": 3}),
    ("2x8xMI300X", {"oversubscription": 2}),
    ("2x8xV100-16GB", {}),
    ("2x6xV100-16GB", {"network": "3x100G"}),
    ("2x16xV100-32GB", {}),
    ("3x4xA100-PCIe", {"network": "1x100G"}),
    ("2x8x4090", {}),
    ("3x8xL40S", {"rails": False}),
    ("5x4xGB200", {"domain": 8}),
    ("2x4xcpu", {}),
]


def walked(cluster: Cluster) -> GraphLinks:
    return GraphLinks(cluster.graph, cluster.ranks, cluster.domain_of)


def assert_same(found: GroupLinks, wanted: GroupLinks, what: object) -> None:
    for field in fields(GroupLinks):
        value, other = getattr(found, field.name), getattr(wanted, field.name)
        assert value == pytest.approx(other, rel=1e-9), f"{what}: {field.name} {value}, walked {other}"


def axes(num_devices: int) -> list[tuple[int, int]]:
    """(size, stride) of every axis that a layout of so many ranks can have."""
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    return [(size, stride) for size in sizes for stride in sizes if num_devices % (size * stride) == 0]


@pytest.mark.parametrize(("text", "options"), SHAPES, ids=str)
def test_shortcut_and_graph_agree(text: str, options: dict[str, object]) -> None:
    """The counted figures of regular clusters are those of their graph: all axes, pairs, a shuffled order, odd ones."""
    cluster = parse_cluster(text, **options)  # type: ignore[arg-type]
    graph = walked(cluster)
    num = cluster.num_devices
    for size, stride in axes(num):
        layout = Layout.of(order=("outer", "here", "inner"), outer=num // size // stride, here=size, inner=stride)
        groups = layout.groups(("here",))
        assert_same(cluster.axis_links(size=size, stride=stride), graph.links(groups), (size, stride))
        assert_same(cluster.links(groups), graph.links(groups), groups)
    rng = random.Random(text)
    order = rng.sample(range(num), num)
    odd = [order[:3], order[3:5], order[5 : 5 + num // 3]]
    assert_same(cluster.links(odd), graph.links(odd), odd)
    shuffled = cluster.with_rank_order(order)
    groups = [tuple(range(first, first + num // 2)) for first in (0, num // 2)]
    assert_same(shuffled.links(groups), walked(shuffled).links(groups), order)
    for _ in range(20):
        a, b = rng.sample(range(num), 2)
        assert cluster.pair(a, b) == pytest.approx(graph.pair(a, b)), (a, b)


def test_cards_of_a_group_add_up() -> None:
    """Eight ranks of a node send through eight cards, one rank through its own, whatever else goes on."""
    cluster = parse_cluster("4x8xH100", network="8x400G")
    whole = cluster.links([range(32)])
    assert (whole.num_domains, whole.ranks_per_domain) == (4, 8)
    assert whole.inside_bytes_per_second == 450 * GB
    assert whole.across_bytes_per_second == pytest.approx(400 * GB)
    strided = cluster.axis_links(size=4, stride=8)
    assert strided.across_bytes_per_second == pytest.approx(50 * GB)
    assert strided.inside_bytes_per_second == math.inf
    assert cluster.links([range(8)]).across_bytes_per_second == math.inf
    assert cluster.axis_links(size=16, stride=2).across_bytes_per_second == pytest.approx(200 * GB)


def test_groups_share_the_cards_of_their_node() -> None:
    """Half as many cards as devices: one group alone has a whole card, all eight groups half of one each."""
    cluster = parse_cluster("4x8xH100", network="4x400G")
    groups = [tuple(range(first, 32, 8)) for first in range(8)]
    assert cluster.links(groups[:1]).across_bytes_per_second == pytest.approx(50 * GB)
    assert cluster.links(groups).across_bytes_per_second == pytest.approx(25 * GB)
    assert cluster.links(groups[::2]).across_bytes_per_second == pytest.approx(50 * GB)


def test_an_oversubscribed_spine_limits_what_leaves_a_leaf() -> None:
    """Two nodes a leaf, 4:1: a ring over all leaves each leaf once, all groups of far nodes do, near ones do not."""
    cluster = parse_cluster("4x8xH100", network="8x400G", oversubscription=4, nodes_per_leaf=2)
    assert cluster.links([range(32)]).across_bytes_per_second == pytest.approx(200 * GB)
    far = [(rank, rank + 16) for rank in range(16)]
    near = [(rank, rank + 8) for rank in (*range(8), *range(16, 24))]
    assert cluster.links(far).across_bytes_per_second == pytest.approx(12.5 * GB)
    assert cluster.links(near).across_bytes_per_second == pytest.approx(50 * GB)
    assert cluster.links(far).across_latency_seconds > cluster.links(near).across_latency_seconds
    assert cluster.pair(0, 16)[0] == pytest.approx(50 * GB)  # alone


def test_rails_keep_rings_off_the_spine() -> None:
    """With rails a card meets its likes at its leaf: only what changes rail, or leaves the set, sees the spine."""
    cluster = parse_cluster("4x8xH100", network="8x400G", rails=True, nodes_per_leaf=2, oversubscription=8)
    same_rail = [(rank, rank + 8) for rank in range(8)]
    other_rail = [(rank, 8 + (rank + 1) % 8) for rank in range(8)]
    assert cluster.links(same_rail).across_bytes_per_second == pytest.approx(50 * GB)
    assert cluster.links(other_rail).across_bytes_per_second == pytest.approx(50 * GB / 8)


@pytest.mark.parametrize(
    ("text", "group", "gigabytes"),
    [
        ("1x8xMI300X", range(8), 448),
        ("1x8xMI300X", (0, 1), 64),
        ("1x8xMI300X", range(4), 192),
        ("1x8xV100-16GB", range(8), 150),
        ("1x8xV100-16GB", (0, 3), 50),
        ("1x8xV100-16GB", (0, 1), 25),
        ("1x8xV100-16GB", (0, 5), 15.75),  # no NVLink between them
        ("1x8xV100-16GB", range(4), 100),
        ("1x4xV100-32GB", (0, 1), 50),
        ("1x16xV100-32GB", (0, 1), 150),
        ("1x4xA100-PCIe", (0, 1), 300),
        ("1x4xA100-PCIe", (1, 2), 31),
        ("1x4xA100-PCIe", range(4), 62),  # two rings, a host link each
        ("1x8xL40S", range(8), 31),
        ("1x8x4090", range(8), 15.5),
        ("18x4xGB200", range(72), 900),
        ("18x4xGB200", (0, 71), 900),
    ],
)
def test_inside_a_domain(text: str, group: tuple[int, ...], gigabytes: float) -> None:
    """Per-pair links are not the group's, and the host carries what nothing else joins."""
    links = parse_cluster(text).links([group])
    assert links.inside_bytes_per_second == pytest.approx(gigabytes * GB)
    assert links.num_domains == 1


def test_the_rack_is_the_domain() -> None:
    """18 trays of 4 GB200 are one domain of 72, 36 are two, 20 leave a smaller one."""
    for text, sizes in (
        ("18x4xGB200", [72]),
        ("36x4xGB200", [72, 72]),
        ("20x4xGB200", [72, 8]),
        ("2x72xGB200", [72, 72]),
    ):
        cluster = parse_cluster(text)
        assert [cluster.domain_of.count(domain) for domain in range(cluster.num_domains)] == sizes
    assert parse_cluster("18x4xGB200").axis_links(size=18, stride=4).num_domains == 1
    assert not parse_cluster("20x4xGB200").is_uniform


def test_rank_order_moves_groups_over_nodes() -> None:
    """Ranks dealt out over the nodes: what was a node's group now crosses all of them."""
    cluster = parse_cluster("2x2xH100", network="2x400G")
    dealt = cluster.with_rank_order([0, 2, 1, 3])
    assert dealt.ranks == ("node0/gpu0", "node1/gpu0", "node0/gpu1", "node1/gpu1")
    assert dealt.domain_of == (0, 1, 0, 1)
    assert cluster.links([(0, 1), (2, 3)]).num_domains == 1
    assert dealt.links([(0, 1), (2, 3)]).across_bytes_per_second == pytest.approx(50 * GB)
    assert dealt.with_rank_order([0, 2, 1, 3]).ranks == cluster.ranks
    with pytest.raises(PlanError, match=r"each of the 4 ranks once; rank 1 stands there twice"):
        cluster.with_rank_order([0, 1, 1, 3])


def test_axis_that_does_not_divide() -> None:
    """Both numbers are in the message."""
    with pytest.raises(PlanError, match=r"groups of 3 ranks, 2 apart: 6 does not divide 16"):
        parse_cluster("2x8xH100").axis_links(size=3, stride=2)


def test_sixteen_thousand_devices_are_quick() -> None:
    """The search asks for dozens of axes: building and any axis stay far below half a second of processor time."""
    start = time.process_time()
    cluster = parse_cluster("2048x8xH100", network="8x400G", oversubscription=2)
    for size, stride in ((8, 1), (16, 8), (2048, 8), (16384, 1), (4, 4096)):
        cluster.axis_links(size=size, stride=stride)
    cluster.links([range(first, first + 6) for first in range(0, 16380, 6)])  # of no even part in each node
    assert time.process_time() - start < 0.5
