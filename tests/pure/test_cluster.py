"""Devices and the short text form of clusters: what is read, and what is refused in which words."""

from __future__ import annotations

import csv
import pickle
from importlib import resources

import pytest

from hybrid.contracts.cluster import device_kind, parse_cluster
from hybrid.contracts.device_kind import device_kinds
from hybrid.errors import PlanError


def test_every_device_has_its_figures_and_a_source() -> None:
    """A row with a slip of a unit, a bandwidth above its total, or no provenance must not get into the table."""
    kinds = {kind.name: kind for kind in device_kinds()}
    assert len(kinds) == 21
    for kind in kinds.values():
        assert all((kind.source, kind.date)), kind.name
        assert {"fp32"} < set(kind.flops), kind.name
        assert kind.peer_bytes_per_second <= kind.scale_up_bytes_per_second, kind.name
        assert kind.matmul_fraction is None or 0.4 < kind.matmul_fraction < 0.95, kind.name
        if kind.name != "cpu":
            assert 1e13 < min(kind.flops.values()) < max(kind.flops.values()) < 1e16, kind.name
            assert 1e10 < kind.memory_bytes < 1e12 < kind.memory_bytes_per_second * 3, kind.name
        if kind.topology == "mesh":
            share = kind.scale_up_bytes_per_second / (kind.scale_up_domain - 1)
            assert share == pytest.approx(kind.peer_bytes_per_second), kind.name


def test_links_have_sources() -> None:
    """Every constant of the data folder says its unit, where it comes from, and when that was."""
    text = resources.files("hybrid.contracts").joinpath("data", "links.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        assert all(row[column] for column in ("unit", "source", "date")), row
        assert float(row["value"]) > 0, row


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("H100", "H100-SXM-80GB"),
        ("h100-sxm", "H100-SXM-80GB"),
        ("A100", "A100-SXM-80GB"),
        ("A100-40GB", "A100-SXM-40GB"),
        ("A100 PCIe", "A100-PCIe-80GB"),
        ("4090", "RTX4090-24GB"),
        ("mi300x", "MI300X-192GB"),
        ("GB200", "GB200-NVL72"),
        ("V100-16GB", "V100-SXM2-16GB"),
    ],
)
def test_short_names(short: str, name: str) -> None:
    """People write the product, not the row of a table."""
    assert device_kind(short).name == name


def test_unknown_device_names_the_nearest() -> None:
    """One letter off is found again; nothing near lists all; a name of several is not guessed."""
    with pytest.raises(PlanError, match=r"device 'H10O' is not known; the nearest known: H100-SXM-80GB"):
        parse_cluster("4x8xH10O")
    with pytest.raises(PlanError, match=r"device 'zzzzzzz' is not known; known: V100"):
        device_kind("zzzzzzz")
    with pytest.raises(PlanError, match=r"device 'PCIe' may be any of A100-PCIe-80GB, H100-PCIe-80GB"):
        device_kind("PCIe")


def test_a_rate_that_the_device_lacks() -> None:
    """V100 has no bf16: the message names what it has."""
    assert device_kind("H100").peak("fp8") == 1978.9e12
    with pytest.raises(PlanError, match=r"V100-SXM2-32GB has no bf16 rate; it computes in fp16, fp32"):
        device_kind("V100").peak("bf16")


@pytest.mark.parametrize(
    ("text", "devices", "domains"),
    [
        ("16x8xH100", 128, 16),
        ("8xA100-80GB", 8, 1),
        ("8x4090", 8, 1),
        ("2x8x4090", 16, 2),
        ("2 × 8 × MI300X", 16, 2),
        ("1x4xcpu", 4, 1),
        ("2x8xH100 + 1x4xH100", 20, 3),
    ],
)
def test_shorthand(text: str, devices: int, domains: int) -> None:
    """Nodes × devices × kind; a kind that begins with digits; unequal nodes of one kind."""
    cluster = parse_cluster(text)
    assert (cluster.num_devices, cluster.num_domains) == (devices, domains)
    assert len(set(cluster.ranks)) == devices == len(cluster.domain_of)
    assert cluster.links([range(devices)]).size == devices


def test_unequal_nodes_of_one_kind() -> None:
    """A node with fewer devices has fewer ranks of a group, and a ring is as wide as its narrowest node."""
    cluster = parse_cluster("1x8xH100+1x4xH100")
    assert (cluster.domain_size, cluster.is_uniform) == (8, False)
    assert cluster.links([range(12)]).across_bytes_per_second == pytest.approx(4 * 50e9)


def test_local_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank per processor, of kind cpu; the caller fills in the memory."""
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    cluster = parse_cluster("local").with_device(memory_bytes=1e9)
    assert (cluster.num_devices, cluster.num_domains, cluster.device.name) == (6, 1, "cpu")
    assert cluster.device.memory_bytes == 1e9
    assert cluster.links([range(6)]).inside_bytes_per_second > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H100x8", "cannot read 'H100x8'; write 8xH100"),
        ("eight H100", "write NODESxDEVICESxKIND, for example 16x8xH100"),
        ("16x8", "cannot read '16x8'"),
        ("", "cannot read ''"),
        ("0x8xH100", "must be at least 1"),
        ("2x16xH100", "16 devices in a node, and NVLink4.* joins 8; write 4x8xH100-SXM-80GB, or give domain 16"),
        ("1x9xMI300X", "9 devices in a node, and xGMI full mesh joins 8"),
    ],
)
def test_malformed_shorthand(text: str, message: str) -> None:
    """Each refusal shows what would have been read."""
    with pytest.raises(PlanError, match=message):
        parse_cluster(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "fast"}, "network 'fast' is not CARDSxSPEED .* for example 8x400G"),
        ({"network": "8x50GB/s"}, "for example 8x400G, in bits"),
        ({"network": "0x400G"}, "is not CARDSxSPEED"),
        ({"oversubscription": 0.5}, "oversubscription 0.5: must be at least 1"),
        (
            {"oversubscription": 2, "rails": True},
            "the 4 nodes meet at one set of rails, which holds 32; give nodes",
        ),
        ({"oversubscription": 2, "nodes_per_leaf": 4}, "no effect: the 4 nodes meet at one leaf switch"),
        ({"nodes_per_leaf": 0}, "nodes_per_leaf 0: must be at least 1"),
        ({"domain": 4}, "domain 4: it must hold the 8 devices of a node"),
        ({"domain": 10**30}, "domain 10+: at most 1,048,576"),
        ({"domain": float("nan")}, "domain nan: expected a whole number of at least 1"),
        ({"nodes_per_leaf": "x", "rails": 1}, "nodes_per_leaf 'x': expected a whole number"),
        ({"network": 400}, "network 400: expected CARDSxSPEED of a node, such as '8x400G'"),
        ({"oversubscription": "2"}, "oversubscription '2': expected a number of at least 1"),
    ],
)
def test_settings_that_make_no_sense(options: dict[str, object], message: str) -> None:
    """No setting is ignored: one that changes nothing is refused as is one that cannot be."""
    with pytest.raises(PlanError, match=message):
        parse_cluster("4x8xH100", **options)  # type: ignore[arg-type]


def test_a_cluster_of_too_many_devices_is_refused_before_it_is_made() -> None:
    with pytest.raises(PlanError, match="cluster 9999999x8xH100: 79,999,992 devices; at most 1,048,576 are looked at"):
        parse_cluster("9999999x8xH100")


def test_one_domain_has_no_network() -> None:
    """What is said of a network that is not there would change nothing: refused, all of it at once."""
    with pytest.raises(PlanError, match="has no effect: 8xH100 is one domain"):
        parse_cluster("8xH100", oversubscription=2)
    with pytest.raises(PlanError) as refused:
        parse_cluster("8xH100", network="8x400G", rails=False, nodes_per_leaf=4)
    assert refused.value.problems == tuple(
        f"{told} has no effect: 8xH100 is one domain and has no network"
        for told in ("network 8x400G", "rails false", "nodes_per_leaf 4")
    )
    with pytest.raises(PlanError, match="network 8x400G has no effect"):
        parse_cluster("18x4xGB200", network="8x400G")


def test_mixed_devices_are_described_and_refused() -> None:
    """Planning on two kinds is refused with the reason; `describe` still gives the cluster to look at."""
    with pytest.raises(PlanError, match=r"mixes H100-SXM-80GB and A100-SXM-80GB .* plan one kind at a time"):
        parse_cluster("2x8xH100+2x8xA100")
    cluster = parse_cluster("2x8xH100+2x8xA100", describe=True)
    assert cluster.num_devices == 32
    assert cluster.graph.nodes["node3/gpu0"]["device"] == "A100-SXM-80GB"
    with pytest.raises(PlanError, match="mixes"):
        cluster.links([range(8)])


def test_what_is_assumed_is_noted() -> None:
    """A network that nobody named, staging without peer access, and links per pair are no secrets."""
    assert "network 8x400G per node is typical for the device" in parse_cluster("2x8xH100").notes[0]
    assert any("staged in host memory" in note for note in parse_cluster("8x4090").notes)
    assert any("two devices alone see 64 GB/s of 448" in note for note in parse_cluster("8xMI300X").notes)


def test_a_cluster_goes_to_another_process() -> None:
    """Devices hold a read-only mapping, which does not pickle by itself."""
    cluster = pickle.loads(pickle.dumps(parse_cluster("2x8xH100")))
    assert cluster.device == device_kind("H100")
    assert cluster.axis_links(size=16, stride=1).num_domains == 2
