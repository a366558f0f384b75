"""What torchrun is given for a job."""

from __future__ import annotations

import pytest

from hybrid.launch.job import LaunchJob


@pytest.mark.parametrize(
    ("given", "slurm_job", "expected"),
    [
        pytest.param("mine", "77", "mine", id="given"),
        pytest.param(None, "77", "77", id="slurm"),
        pytest.param(None, None, "hybrid", id="neither"),
    ],
)
def test_jobs_at_one_endpoint_have_names(
    monkeypatch: pytest.MonkeyPatch, given: str | None, slurm_job: str | None, expected: str
) -> None:
    """Two jobs of one name at one endpoint would meet and take each other's ranks."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if slurm_job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", slurm_job)
    job = LaunchJob(script="train.py", num_nodes=2, rdzv_endpoint="10.0.0.1:29500", rdzv_id=given)
    assert [text for text in job.torchrun_arguments() if text.startswith("--rdzv-id")] == [f"--rdzv-id={expected}"]
