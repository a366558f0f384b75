"""The lines of `hybrid calibrate` and `hybrid plan --measure` that run on CUDA only, on a stand-in for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid.calibration import calibrate as calibrating
from hybrid.calibration.cluster_content import cluster_content, write_cluster_file
from hybrid.calibration.device_work import _low_dtype
from hybrid.calibration.measure_plans import _accelerator
from hybrid.calibration.ranks import Found, measure_here
from hybrid.calibration.trial import TrialResult, TrialSpec, run_trial
from hybrid.contracts.measurements import Measurements
from hybrid.errors import LaunchError, PlanError
from hybrid.launch.environment import LaunchEnvironment
from hybrid.mesh import start_process_group
from hybrid.planner.plan import plan
from hybrid.strategy import DistributedStrategy
from tests.cuda_stand_in import MEMORY_BYTES, cuda_stand_in
from tests.multi_rank.test_calibrate import REFERENCE, TINY, TOKENS
from tests.pure.test_planner_measured import content
from tests.ranks import run_ranks


def measured() -> tuple[Found, list[str]]:
    with cuda_stand_in() as calls:
        found = measure_here(is_quick=True, effort=replace(TINY, more_dtypes=(0,)))
    return found, sorted(set(calls.names))


def test_a_calibration_on_nccl_comes_to_its_end_and_is_one_of_accelerators(tmp_path: Path) -> None:
    (found, asked), (other, _) = run_ranks(measured, 2)
    measurements = found.measurements
    assert measurements.matmul == other.measurements.matmul
    machine = measurements.machine
    assert (machine.accelerator, machine.backend, machine.ranks_per_host) == ("NVIDIA H100 80GB HBM3", "nccl", 2)
    assert {"synchronize", "get_device_name", "get_device_properties", "mem_get_info", "set_device"} <= set(asked)
    assert found.free_bytes == MEMORY_BYTES
    assert measurements.context_bytes is not None
    assert measurements.context_bytes[1] == 10**9  # taken, and not by the allocator: 3 GB less 2 GB
    assert [point.dtype for point in measurements.matmul] == ["bf16", "bf16", "fp32", "fp32"]
    assert {curve.kind for curve in measurements.collectives} == {"all_reduce", "all_gather", "reduce_scatter", "send"}

    file = tmp_path / "here.yaml"
    made = cluster_content(measurements, found.free_bytes)
    (kind,) = made["kinds"].values()
    assert kind["like"].startswith("H100")
    write_cluster_file(file, made)
    best = plan("gpt3-125m", file, global_batch_size=8, seq=64).best
    assert best.time.total_seconds > 0


def trained() -> tuple[TrialResult, list[str]]:
    with cuda_stand_in() as calls:
        spec = TrialSpec(
            model=REFERENCE, seq=TOKENS, rows=2, micro_batch_size=1, optimizer="AdamW", steps=2, seconds=0.0
        )
        found = run_trial(spec, DistributedStrategy({"sharding": True, "sharding_configs": {"stage": 2}}))
    return found, calls.names


def test_a_measured_layout_on_nccl_counts_the_memory_of_the_device() -> None:
    """The allocator's at most, and what lies outside of it."""
    (found, asked), (other, _) = run_ranks(trained, 2)
    assert found == other
    assert found.process_bytes == 5 * 10**9
    assert asked.count("synchronize") >= 4
    assert found.torch == torch.__version__


@pytest.mark.parametrize(
    ("driver_name", "memory_gigabytes", "kind"),
    [
        ("Tesla V100-SXM2-32GB", 34, "V100"),
        ("NVIDIA A100-SXM4-40GB", 42, "A100-SXM-40GB"),
        ("NVIDIA A100-SXM4-80GB", 85, "A100-SXM-80GB"),
        ("NVIDIA A100 80GB PCIe", 85, "A100-PCIe"),
        ("NVIDIA H100 80GB HBM3", 85, "H100-SXM"),
        ("NVIDIA H100 PCIe", 85, "H100-PCIe"),
        ("NVIDIA H200", 150, "H200"),
        ("NVIDIA L40S", 48, "L40S"),
        ("NVIDIA GeForce RTX 4090", 25, "RTX4090"),
        ("NVIDIA B200", 192, "B200"),
        ("NVIDIA GB200", 192, "GB200"),
        ("AMD Instinct MI300X", 206, "MI300X"),
        ("NVIDIA GeForce RTX 3060", 12, "RTX4090"),
    ],
)
def test_the_drivers_names_are_those_of_the_list(driver_name: str, memory_gigabytes: float, kind: str) -> None:
    """One that is not in it has no links but those that were measured, and its own peaks."""
    file = content(machine={**content()["measured"]["machine"], "accelerator": driver_name, "backend": "nccl"})
    made = cluster_content(Measurements.model_validate(file["measured"]), memory_gigabytes * 1e9)
    (one,) = made["kinds"].values()
    assert one["like"].startswith(kind)
    assert ("bf16_teraflops_per_second" in one or "fp32_teraflops_per_second" in one) == driver_name.endswith("3060")


def test_a_device_without_units_for_bf16_is_measured_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated products would say of a V100 that it is slower than a processor."""
    assert _low_dtype(torch.device("cpu")) is torch.bfloat16
    with cuda_stand_in("Tesla V100-SXM2-32GB"):
        assert _low_dtype(torch.device("cuda", 0)) is torch.float16
    with cuda_stand_in():
        assert _low_dtype(torch.device("cuda", 0)) is torch.bfloat16


def test_one_rank_for_each_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine by default; more are refused, by the command and by a rank that finds none of its own."""
    monkeypatch.setattr(calibrating, "_DRIVERS", (str(tmp_path),))
    with cuda_stand_in():
        assert calibrating.default_ranks() == 2
        assert calibrating.checked_ranks(None) == 2
        with pytest.raises(PlanError, match=r"ranks = 3: this machine has 2 accelerator"):
            calibrating.checked_ranks(3)
        assert _accelerator() == "NVIDIA H100 80GB HBM3"
        alone = LaunchEnvironment(
            rank=2, world_size=3, local_rank=2, local_world_size=3, node_rank=0, master_addr="", master_port=0,
            launched=False,
        )  # fmt: skip
        with pytest.raises(LaunchError, match=r"LOCAL_RANK is 2 of 3 ranks on this machine, .* sees 2 accelerators"):
            start_process_group(alone, timeout_seconds=1.0, agreement="")
    assert calibrating.default_ranks() != 0
