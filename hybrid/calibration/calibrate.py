"""`hybrid.calibrate`: measure this machine, or the machines of the job that this process is part of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from hybrid.calibration.cluster_content import check_out, cluster_content, write_cluster_file
from hybrid.calibration.effort import PROGRESS_FILE, RESULT_FILE
from hybrid.calibration.measuring_alone import measuring_alone
from hybrid.calibration.stopped import raise_if_stopped, run_folder
from hybrid.contracts.cluster import Cluster, parse_cluster
from hybrid.contracts.measurements import Measurements
from hybrid.errors import PlanError
from hybrid.launch.environment import LaunchEnvironment, read_environment
from hybrid.launch.job import LaunchJob
from hybrid.launch.machine import problem_of_ranks, this_machine
from hybrid.launch.run import run_job

__all__ = ["calibrate", "check_out", "checked_ranks"]

# Of NVIDIA, of AMD, and of either under WSL.
_DRIVERS = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")

Progress = Callable[[int, int, str], None]
"""(measurements done, all of them, what is measured now)"""


def default_ranks() -> int:
    """One per accelerator, or where there is none per core that this process may use."""
    return num_accelerators() or this_machine().cores


def num_accelerators() -> int:
    """That torch sees; torch is loaded only where there may be some."""
    if not any(Path(name).exists() for name in _DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def calibrate(
    out: str | Path = "cluster.yaml", *, ranks: int | None = None, quick: bool = False, progress: Progress | None = None
) -> Cluster:
    """Measure matrix products, attention, memory, launches and collectives, and write a cluster file for the planner.

    Under torchrun or `hybrid run` all ranks of the job call it, and the first one writes; otherwise it starts ranks on
    this machine. They measure at the same time, so that what they share (cores, links) is shared as in training, and
    the file describes that number of ranks.

    Args:
        out: a YAML file; an earlier calibration there is replaced.
        ranks: on this machine; None: one per accelerator, or per core where there is none.
        quick: fewer sizes for shorter; a rough picture.
        progress: called with (measurements done, all of them, what is measured now).

    Returns:
        The cluster, as `hybrid.plan(cluster=...)` takes it.

    Raises:
        PlanError: a file that cannot be written, more ranks than accelerators, a rank that failed, or another
            measurement that runs on this machine.
        KeyboardInterrupt: Ctrl-C, after the ranks have ended.
        LaunchError: hosts that are not alike, or launch variables that are wrong.
    """
    path = Path(out)
    environment = read_environment()
    if environment.launched:
        return _in_this_job(path, environment, ranks, quick=quick, progress=progress)
    check_out(path)
    number = checked_ranks(ranks)
    with measuring_alone():
        measured, free_bytes = _on_new_ranks(number, quick=quick, progress=progress)
    write_cluster_file(path, cluster_content(measured, free_bytes))
    return parse_cluster(path)


def checked_ranks(ranks: int | None) -> int:
    """How many are started on this machine; a PlanError for a number that cannot be."""
    number = default_ranks() if ranks is None else ranks
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise PlanError(f"ranks = {number!r}: expected a whole number of at least 1")
    accelerators = num_accelerators()
    if accelerators and number > accelerators:
        raise PlanError(f"ranks = {number}: this machine has {accelerators} accelerator(s), one for each rank")
    if too_many := problem_of_ranks("ranks", number):
        raise PlanError(too_many)
    return number


def _in_this_job(
    path: Path, job: LaunchEnvironment, ranks: int | None, *, quick: bool, progress: Progress | None
) -> Cluster:
    from hybrid.calibration.ranks import measure_here  # torch comes with it

    rank = job.rank
    if ranks is not None and ranks != job.world_size:
        raise PlanError(
            f"ranks = {ranks}, but the launcher has started {job.world_size}: leave it out, or start without a launcher"
        )
    if rank == 0:
        check_out(path)
    is_told = progress is not None and rank == 0
    with measuring_alone() if job.local_rank == 0 else nullcontext():
        found = measure_here(is_quick=quick, say=progress if is_told and progress else lambda done, total, label: None)
    content = cluster_content(found.measurements, found.free_bytes)
    if rank == 0:
        write_cluster_file(path, content)
    return parse_cluster(content)


def _on_new_ranks(ranks: int, *, quick: bool, progress: Progress | None) -> tuple[Measurements, float]:
    folder = run_folder("hybrid-calibrate-")
    job = LaunchJob(
        script="hybrid.calibration.ranks",
        is_module=True,
        arguments=("--quick",) if quick else (),
        num_processes=ranks,
        log_dir=folder,
        show_output=False,
    )
    outcome = run_job(job, on_poll=_Teller(progress) if progress is not None else None)
    raise_if_stopped(outcome, folder)
    if outcome.exit_code != 0:
        raise PlanError(f"the measurement ended with code {outcome.exit_code}: {outcome.message}")
    content = json.loads((outcome.log_dir / RESULT_FILE).read_text(encoding="utf-8"))
    shutil.rmtree(folder, ignore_errors=True)
    return Measurements.model_validate(content["measurements"]), float(content["free_bytes"])


class _Teller:
    """Passes on what the first rank says of its progress."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._position = 0

    def __call__(self, log_dir: Path) -> None:
        path = log_dir / PROGRESS_FILE
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._position)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines()[-1:]:
            done, total, label = json.loads(line)
            self._progress(done, total, label)
