"""`hybrid cluster`: the drawing, JSON, the list of devices, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from hybrid.cli.cluster import commands


def run(*arguments: str) -> Any:
    return CliRunner().invoke(commands, list(arguments), env={"COLUMNS": "100"})


def test_the_drawing() -> None:
    """Levels from the spine to the device, then what groups have of them."""
    result = run("show", "2x2xH100", "--network", "2x400G", "--oversubscription", "2")
    assert result.exit_code == 0
    assert result.stdout == (
        "2x2xH100  4 × H100-SXM-80GB, 338 GB of memory, 3.96 PFLOP/s in bf16\n"
        "spine switches, 2:1 oversubscribed\n"
        "└── 2 leaf switches, all cards of 1 node each\n"
        "    ├── ■ ■  2 × H100-SXM-80GB\n"
        "    │   ├── NVLink4+NVSwitch (SHARP): 450 GB/s per device\n"
        "    │   └── 2 network card(s) of 400 Gb/s per node of 2\n"
        "    └── ■ ■  2 × H100-SXM-80GB\n"
        "\n"
        "who                          each, one direction  latency\n"
        "two devices of a domain                 450 GB/s   0.9 µs\n"
        "rings over each domain of 2             450 GB/s   0.9 µs\n"
        "two devices of two domains               50 GB/s     3 µs\n"
        "rings over all 4                         50 GB/s     3 µs\n"
        "between the halves, all devices at once: 50 GB/s\n"
        "note: oversubscription without rails: 1 node(s) per leaf switch; for rail-optimised pods say rails \n"
        "and nodes_per_leaf\n"
    )


def test_a_slow_link_of_a_file_is_pointed_at(tmp_path: Path) -> None:
    """One cable among thirty-two."""
    file = tmp_path / "lab.yaml"
    file.write_text("cluster: 4x8xH100\nlinks: [{between: [node3/nic2, leaf0/rail2], speed: 100G}]\n", encoding="utf-8")
    result = run("show", str(file))
    assert "slower than its like: leaf0/rail2 - node3/nic2 has 12.5 GB/s, others 50 GB/s" in result.stdout
    assert "rings over all 32                       100 GB/s" in result.stdout


def test_json_has_bytes_per_second() -> None:
    """What a script reads has no rounded text in it, and no infinity, which is no JSON."""
    found = json.loads(run("show", "4x8xMI300X", "--json").stdout, parse_constant=lambda text: 1 / 0)
    assert (found["num_devices"], found["num_domains"], found["domain_size"]) == (32, 4, 8)
    assert found["network"]["nic_bytes_per_second"] == [50e9]
    assert [level["bytes_per_second"] for level in found["levels"]] == [64e9, 448e9, 50e9, 400e9]
    assert found["halves_bytes_per_second"] == 16 * 50e9
    assert found["refusal"] is None


def test_one_device_and_mixed_nodes_are_drawn() -> None:
    """Nothing to measure on one device; nothing to plan on two kinds, which the last line says."""
    assert "1 × H100-SXM-80GB" in run("show", "1xH100").stdout
    result = run("show", "1x8xH100+1x8xA100")
    assert result.exit_code == 0
    assert "8 × H100-SXM-80GB" in result.stdout
    assert "8 × A100-SXM-80GB" in result.stdout
    assert "nothing can be planned here: cluster 1x8xH100+1x8xA100 mixes" in result.stdout


def test_the_list() -> None:
    """Every device in one whole line, and with sources in JSON."""
    lines = run("list").stdout.splitlines()
    assert any(line.split()[:5] == ["H100-SXM-80GB", "989.4", "989.4", "1979", "66.9"] for line in lines)
    found = {kind["name"]: kind for kind in json.loads(run("list", "--json").stdout)}
    assert found["MI300X-192GB"]["peer_bytes_per_second"] == 64e9
    assert all(kind["source"] for kind in found.values())
