"""Host memory of usual machines: where the figures come from, and what a plan says of them."""

from __future__ import annotations

import csv
from importlib import resources

import pytest

from hybrid.contracts.device_kind import device_kind
from hybrid.contracts.host_kind import usual_host
from hybrid.errors import PlanError
from hybrid.planner.plan import plan
from hybrid.planner.request_reading import make_request


def test_a_usual_machine_has_the_memory_of_its_data_sheet() -> None:
    """13B with offload keeps 18 bytes a parameter in the host: more than the 150 GB given, less than a DGX has. What a
    node of four has, nobody can know."""
    usual = make_request("llama2-13b", "1x8xA100-40GB", global_batch_size=8, seq=512, fixed="offload=parameters")
    assert usual.host is not None
    assert usual.host.name == "DGX A100 320GB"
    assert usual.host_memory_bytes == 2**40
    given = make_request("llama2-13b", "1x8xA100-40GB", global_batch_size=8, seq=512, host_memory_bytes=150e9)
    assert (given.host_memory_bytes, given.host) == (150e9, None)
    assert make_request("llama2-13b", "1x4xA100-40GB", global_batch_size=8, seq=512).host_memory_bytes is None
    plans = plan("llama2-13b", "1x8xA100-40GB", global_batch_size=8, seq=512, fixed="offload=parameters", num_plans=1)
    assert any("1 TiB, assumed, as in a DGX A100 320GB" in note for note in plans.advice.notes)
    assert plans.to_dict()["cluster"]["assumed_host"] == "DGX A100 320GB"
    with pytest.raises(PlanError, match=r"which has 1 TiB, assumed, as in a DGX A100 320GB .*--host-memory"):
        plan("llama3-70b", "1x8xA100-40GB", global_batch_size=8, seq=512, fixed="offload=parameters", num_plans=1)


def test_every_usual_host_belongs_to_a_device_with_a_source() -> None:
    rows = list(
        csv.DictReader(resources.files("hybrid.contracts").joinpath("data", "hosts.csv").read_text().splitlines())
    )
    assert len({(row["device"], row["devices"]) for row in rows}) == len(rows) > 10
    for row in rows:
        host = usual_host(device_kind(row["device"]).name, int(row["devices"]))
        assert host is not None
        assert (host.name, host.notes) == (row["name"], row["notes"])
        assert host.source
        assert host.date


def test_a_host_has_no_more_than_its_source_says_for_sure() -> None:
    """A data sheet that says "up to" says nothing of the machine at hand, and one in decimal units means them."""
    assert usual_host("GH200-96GB", 1) is None
    rack, tray = (usual_host("GB200-NVL72", devices) for devices in (72, 4))
    assert rack is not None
    assert tray is not None
    assert 16.99e12 < rack.memory_bytes <= 17e12
    assert 18 * tray.memory_bytes <= rack.memory_bytes


def test_what_a_figure_leaves_open_is_said_with_it() -> None:
    words = make_request("llama2-7b", "1x8xB200", global_batch_size=8, seq=512).host_words
    assert "2 TB, configurable to 4 TB, 2026-11, the smaller one); --host-memory" in words
    plain = make_request("llama2-7b", "1x8xH100", global_batch_size=8, seq=512).host_words
    assert "2 TB, 2026-11); --host-memory" in plain
