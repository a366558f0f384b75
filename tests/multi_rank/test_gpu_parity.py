"""Plain torch on the host against layouts on GPUs: real ones under `-m gpu`, the stand-in in the default run."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.cuda_devices import cuda_devices
from tests.cuda_groups import order_problems
from tests.gpu_parity import CASES, Case, check
from tests.ranks import run_ranks

# Of the default run: each way that device code can take once.
_CHOSEN = [case for case in CASES if case.is_chosen]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_on_gpus(case: Case) -> None:
    """On NCCL, one GPU for each rank; see `gpu_parity` for the tolerances."""
    seen = torch.cuda.device_count()
    if seen < case.ranks:
        pytest.skip(f"needs {case.ranks} GPUs, and this machine has {seen}")
    run_ranks(check, case.ranks, case, backend="nccl", timeout_seconds=300)


def _on_stand_in(cases: Sequence[Case]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        with cuda_devices(case.ranks) as machine:
            try:
                result = check(case, on_stand_in=True)
            except BaseException as error:
                error.add_note(f"{case.id}; seen before: {machine.problems()}")
                raise
            gc.collect()
        found.append(
            {**result, "problems": machine.problems(), "launches": machine.groups.launches, "waits": machine.host_waits}
        )
    return found


def _check_together(cases: Sequence[Case]) -> None:
    ranks = run_ranks(_on_stand_in, cases[0].ranks, cases, timeout_seconds=240)
    for place, case in enumerate(cases):
        found = [rank[place] for rank in ranks]
        assert [one["problems"] for one in found] == [[]] * case.ranks, case.id
        assert order_problems([one["launches"] for one in found]) == [], case.id
        assert len({tuple(one["norms"]) for one in found}) == 1, case.id
        waits = found[0]["waits"]
        # Whether a forward wrote into a unit is not asked of the device for each unit.
        asked = {line for line in waits if line.startswith("aten::equal")}
        assert not asked or case.sharding.get("offload") == "parameters", (case.id, asked)
        assert not any("point_to_point" in line or "losses.py" in line for line in waits), (case.id, waits)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_the_stand_in(ranks: int) -> None:
    """Devices, streams, launch orders and dtypes as NCCL and CUDA want them, and the right numbers."""
    _check_together([case for case in _CHOSEN if case.ranks == ranks])


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_every_case_on_the_stand_in(case: Case) -> None:
    _check_together([case])
