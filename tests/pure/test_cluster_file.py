"""Clusters from YAML: nodes, single links, whole graphs, devices of one's own, and the errors of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid.contracts.cluster import parse_cluster
from hybrid.contracts.cluster_file import read_seconds, read_speed
from hybrid.errors import PlanError

GB = 1e9

# Two boxes of two devices; each has a PCIe switch with one card, and two cables to two top switches, one of them slow.
TWO_BOXES = """
name: two boxes
graph:
  kind: A100-80GB
  devices: [a0, a1, b0, b1]
  switches: [sa, sb, t1, t2]
  nics: [na, nb]
  links:
    - {between: [a0, sa], speed: 300 GB/s, latency: 0.5us}
    - {between: [a1, sa], speed: 300 GB/s, latency: 0.5us}
    - {between: [b0, sb], speed: 300 GB/s, latency: 0.5us}
    - {between: [b1, sb], speed: 200 GB/s, latency: 0.5us}
    - {between: [sa, na], speed: 31 GB/s, latency: 1us}
    - {between: [sb, nb], speed: 31 GB/s, latency: 1us}
    - {between: [na, t1], speed: 100G, latency: 1us}
    - {between: [na, t2], speed: 100G, latency: 1us}
    - {between: [nb, t1], speed: 100G, latency: 1us}
    - {between: [nb, t2], speed: 20G, latency: 1us}
"""


def two_boxes() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(TWO_BOXES)
    return content


def test_a_graph_is_taken_at_its_word(tmp_path: Path) -> None:
    """Half of each flow takes the slow cable, so twice its 2.5 GB/s is all that passes; groups share it."""
    file = tmp_path / "lab.yaml"
    file.write_text(TWO_BOXES, encoding="utf-8")
    cluster = parse_cluster(file)
    assert (cluster.name, cluster.ranks, cluster.domain_of) == ("two boxes", ("a0", "a1", "b0", "b1"), (0, 0, 1, 1))
    assert cluster.pair(0, 1) == pytest.approx((300 * GB, 1e-6))
    assert cluster.pair(2, 3)[0] == pytest.approx(200 * GB)
    assert cluster.pair(0, 2) == pytest.approx((5 * GB, 5e-6))
    assert cluster.links([(0, 1), (2, 3)]).inside_bytes_per_second == pytest.approx(200 * GB)
    assert cluster.links([(0, 2)]).across_bytes_per_second == pytest.approx(5 * GB)
    both = cluster.links([(0, 2), (1, 3)])
    assert both.across_bytes_per_second == pytest.approx(2.5 * GB)
    assert cluster.links([range(4)]).across_bytes_per_second == pytest.approx(5 * GB)


def test_groups_share_an_edge_between_switches_of_a_node() -> None:
    """Two PCIe switches under one host: pairs on one switch do not meet, pairs over the host halve its link."""
    links = [{"between": [f"d{i}", f"p{i // 2}"], "speed": "30 GB/s"} for i in range(4)]
    links += [{"between": ["p0", "h"], "speed": "20 GB/s"}, {"between": ["p1", "h"], "speed": "20 GB/s"}]
    graph = {"kind": "L40S", "devices": ["d0", "d1", "d2", "d3"], "switches": ["p0", "p1", "h"], "links": links}
    cluster = parse_cluster({"graph": graph})
    assert cluster.num_domains == 1
    assert cluster.links([(0, 1), (2, 3)]).inside_bytes_per_second == pytest.approx(30 * GB)
    assert cluster.links([(0, 2)]).inside_bytes_per_second == pytest.approx(20 * GB)
    assert cluster.links([(0, 2), (1, 3)]).inside_bytes_per_second == pytest.approx(10 * GB)


def test_domains_without_cards() -> None:
    """Devices straight on a switch are one domain, unless they name theirs: then the switch is a network."""
    links = [{"between": [name, "s"], "speed": "10 GB/s"} for name in "abcd"]
    graph: dict[str, Any] = {"kind": "L40S", "devices": list("abcd"), "switches": ["s"], "links": links}
    assert parse_cluster({"graph": graph}).num_domains == 1
    links += [{"between": ["a", "b"], "speed": "50 GB/s"}, {"between": ["c", "d"], "speed": "50 GB/s"}]
    graph["devices"] = {name: {"domain": "left" if name in "ab" else "right"} for name in "abcd"}
    cluster = parse_cluster({"graph": graph})
    assert cluster.domain_of == (0, 0, 1, 1)
    assert cluster.pair(0, 1)[0] == pytest.approx(50 * GB)
    assert cluster.links([range(4)]).across_bytes_per_second == pytest.approx(20 * GB)
    assert cluster.links([(0, 2)]).nic_bytes_per_second == pytest.approx(10 * GB)


def test_one_slow_cable_slows_who_uses_it() -> None:
    """A shorthand with one link changed: the ring through it, and only that, gets slower."""
    content = {
        "cluster": "4x8xH100",
        "network": "8x400G",
        "links": [{"between": ["node3/nic2", "leaf0/rail2"], "speed": "100G"}],
    }
    cluster = parse_cluster(content)
    rings = [tuple(range(first, 32, 8)) for first in range(8)]
    assert cluster.links([rings[2]]).across_bytes_per_second == pytest.approx(12.5 * GB)
    assert cluster.links([rings[3]]).across_bytes_per_second == pytest.approx(50 * GB)
    assert cluster.links(rings).across_bytes_per_second == pytest.approx(12.5 * GB)
    assert cluster.pair(0, 8)[0] == pytest.approx(50 * GB)


def test_nodes_and_a_device_of_ones_own() -> None:
    """A kind that resembles a known one; a measurement on the other does not carry over to a changed peak."""
    content = {
        "kinds": {"Mine": {"like": "H100", "memory_gigabytes": 96, "bf16_teraflops_per_second": 500}},
        "nodes": [{"count": 2, "devices": 4, "kind": "Mine", "network": "2x200G"}],
        "oversubscription": 2,
    }
    cluster = parse_cluster(content)
    assert (cluster.num_devices, cluster.device.name, cluster.device.memory_bytes) == (8, "Mine", 96 * 0.985 * 2**30)
    assert cluster.device.flops["bf16"] == 500e12
    assert cluster.device.matmul_fraction is None
    assert cluster.axis_links(size=2, stride=4).across_bytes_per_second == pytest.approx(25e9 / 2 / 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "give one of cluster, nodes or graph; it has none"),
        ({"cluster": "8xH100", "nodes": [{"devices": 8, "kind": "H100"}]}, "it has cluster and nodes"),
        ({"clusterr": "8xH100"}, "clusterr: there is no such entry"),
        ({"nodes": [{"devices": -1, "kind": "H100"}]}, r"nodes.0.devices: .*greater than or equal to 1 \(it is -1\)"),
        ({"cluster": "8xH10O"}, "device 'H10O' is not known; the nearest known"),
        ({"cluster": "8xX", "kinds": {"X": {"memory_gigabytes": 1}}}, "kinds.X: say which known device it is like"),
        (
            {"cluster": "8xX", "kinds": {"X": {"like": "H100", "memory": 1}}},
            "no figure 'memory'; there are memory_giga",
        ),
        ({"cluster": "8xX", "kinds": {"X": {"like": "H100", "memory_gigabytes": -1}}}, "-1 is not a positive number"),
        (
            {"cluster": "2x8xH100", "kinds": {"X": {"like": "H100", "memory_gigabytes": 70}}},
            "kinds.X has no effect: no device of the cluster is one",
        ),
        (
            {"cluster": "2x8xH100", "links": [{"between": ["spine", "leaf0/rail0"], "remove": True, "speed": "1G"}]},
            "what is removed has no speed",
        ),
        (
            {"cluster": "2x8xH100", "links": [{"between": ["node0/nic9", "leaf0/rail0"], "speed": "1G"}]},
            "no node0/nic9 in this cluster; there are node0/gpu0",
        ),
        ({"cluster": "2x8xH100", "links": [{"between": ["spine", "node0/nic0"]}]}, "a new link needs a speed"),
        ({"cluster": "2x8xH100", "links": [{"between": ["spine", "leaf0/rail0"], "speed": "fast"}]}, "speed 'fast'"),
    ],
)
def test_errors_name_the_entry(content: dict[str, Any], message: str) -> None:
    """Whoever wrote the file finds the line."""
    with pytest.raises(PlanError, match=message):
        parse_cluster(content)


def test_a_graph_in_two_pieces_is_refused() -> None:
    """What cannot be reached is named."""
    content = two_boxes()
    content["links"] = [{"between": ["nb", "t1"], "remove": True}, {"between": ["nb", "t2"], "remove": True}]
    with pytest.raises(PlanError, match=r"not connected: b0, b1, sb, nb \(2 device\(s\) among them\) .* from a0"):
        parse_cluster(content)


def test_devices_that_meet_at_a_third_one_only_are_refused() -> None:
    """Whichever of them comes first: rings of two have no way there, which is no matter for a traceback later."""
    for devices in (["a", "b", "c"], ["b", "a", "c"]):
        links = [{"between": ["a", other], "speed": "100 GB/s"} for other in "bc"]
        with pytest.raises(PlanError, match=r"b and c are of one domain, and no link or switch joins them"):
            parse_cluster({"graph": {"kind": "A100-80GB", "devices": devices, "links": links}})


def test_a_device_of_no_other_domain_helps() -> None:
    """Joined, but only through a device that it shares no domain with: no library would take that way."""
    links = [{"between": ends, "speed": "50 GB/s"} for ends in (["a", "s"], ["b", "s"], ["b", "c"])]
    devices = {name: {"domain": name} for name in "abc"}
    with pytest.raises(PlanError, match=r"a and c reach each other by no path of switches and network cards"):
        parse_cluster({"graph": {"kind": "H100", "devices": devices, "switches": ["s"], "links": links}})


def test_a_peer_with_a_card_helps() -> None:
    """A card without a cable: its device sends through its neighbour's, whose card both then share. So do rails
    without a spine, where ranks of different rails talk."""
    dead = {"cluster": "2x2xH100", "links": [{"between": ["node1/nic1", "leaf0/rail1"], "remove": True}]}
    cluster = parse_cluster(dead)
    assert cluster.links([(1, 3)]).across_bytes_per_second == pytest.approx(50 * GB)
    assert cluster.links([(0, 2), (1, 3)]).across_bytes_per_second == pytest.approx(25 * GB)
    cluster = parse_cluster({"cluster": "2x2xH100", "links": [{"between": ["leaf0/rail1", "spine"], "remove": True}]})
    assert cluster.pair(0, 3)[0] == pytest.approx(50 * GB)
    assert cluster.pair(0, 3)[1] > cluster.pair(0, 2)[1]


def test_mixed_kinds_in_a_graph() -> None:
    """Refused as in the short form, and still drawn."""
    content = two_boxes()
    content["graph"]["devices"] = {
        name: {"kind": "H100" if name == "b1" else "A100"} for name in ("a0", "a1", "b0", "b1")
    }
    with pytest.raises(PlanError, match="mixes A100-SXM-80GB and H100-SXM-80GB"):
        parse_cluster(content)
    assert parse_cluster(content, describe=True).graph.nodes["b1"]["device"] == "H100-SXM-80GB"


def test_said_twice(tmp_path: Path) -> None:
    """A flag beside a file that says otherwise is a contradiction, not a preference; the same value is none."""
    file = tmp_path / "c.yaml"
    file.write_text("cluster: 4x8xH100\nnetwork: 8x400G\n", encoding="utf-8")
    assert parse_cluster(str(file), network="8x400G", oversubscription=1.0).num_devices == 32
    with pytest.raises(PlanError, match="network is 8x400G in the file and 4x400G beside it"):
        parse_cluster(str(file), network="4x400G")
    with pytest.raises(PlanError, match=r"oversubscription is 2 in the file and 1\.0 beside it"):
        parse_cluster({"cluster": "4x8xH100", "oversubscription": 2}, oversubscription=1.0)
    nodes = {"nodes": [{"count": 2, "devices": 8, "kind": "H100", "network": "8x400G"}]}
    with pytest.raises(PlanError, match=r"network is 8x400G in nodes\.0 of the file and 4x100G beside it"):
        parse_cluster(nodes, network="4x100G")
    with pytest.raises(PlanError, match="network 4x100G has no effect: each of nodes has its own"):
        parse_cluster({**nodes, "network": "4x100G"})
    assert parse_cluster(nodes, network="8x400G").notes == parse_cluster(nodes).notes == ()
    one: dict[str, Any] = {"nodes": [{"devices": 8, "kind": "H100"}]}
    with pytest.raises(PlanError, match="network 4x100G has no effect: cluster is one domain"):
        parse_cluster(one, network="4x100G")
    with pytest.raises(PlanError, match="network 8x400G has no effect: cluster is one domain"):
        parse_cluster({"nodes": [{**one["nodes"][0], "network": "8x400G"}]})
    with pytest.raises(PlanError, match="rails true has no effect: cluster is one domain"):
        parse_cluster(one, rails=True)
    with pytest.raises(PlanError, match="rails has no effect beside graph"):
        parse_cluster(two_boxes(), rails=True)


def test_files_that_are_none(tmp_path: Path) -> None:
    """Missing, not YAML, not a mapping: the file is named."""
    with pytest.raises(PlanError, match=r"cluster file nowhere.yaml: cannot be read \(No such file"):
        parse_cluster("nowhere.yaml")
    for text, message in (
        ("a: [", "is not YAML"),
        ("- 1", "it holds list"),
        ("cluster: 2x8xH100\ncluster: 4x8xH100", "'cluster' stands twice"),  # the last would win
        ("a: " + "[" * 2000 + "]" * 2000, "levels deep"),
    ):
        file = tmp_path / "bad.yaml"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(PlanError, match=message):
            parse_cluster(file)


def test_units() -> None:
    """Bits and bytes are a factor of eight apart: each spelling is what it says, a bare number is neither."""
    assert read_speed("400G") == read_speed("400 Gb/s") == read_speed("400Gbps") == 50e9
    assert read_speed("50 GB/s") == 50e9
    assert read_seconds("2us") == pytest.approx(read_seconds("2 µs")) == pytest.approx(2e-6)
    for bad in ("400", "fast", "0G"):
        with pytest.raises(PlanError, match="write 400G"):
            read_speed(bad)
    with pytest.raises(PlanError, match="write 2us"):
        read_seconds("2 minutes")
