"""`hybrid.measure_plans`: run the layouts of a plan on the machine that it is for, and keep what they took."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields
from datetime import date
from typing import TYPE_CHECKING, Any

from hybrid.calibration.measuring_alone import measuring_alone
from hybrid.calibration.stopped import raise_if_stopped, run_folder
from hybrid.errors import PlanError
from hybrid.launch.job import LaunchJob
from hybrid.launch.machine import this_machine
from hybrid.launch.run import run_job
from hybrid.planner.advice import measure_first
from hybrid.planner.job import Candidate, Job
from hybrid.planner.plan import Plans
from hybrid.planner.request import Request
from hybrid.planner.search import Priced
from hybrid.planner.strategy_of import strategy_of
from hybrid.planner.trials import Trial, TrialLayout, read_trials, save_trials, trials_file
from hybrid.strategy import DistributedStrategy

if TYPE_CHECKING:
    from hybrid.calibration.trial import TrialResult, TrialSpec

__all__ = ["check_measurable", "measure_plans"]

SECONDS_PER_LAYOUT = 8.0
_NAMED = 3  # layouts that a plan names as worth measuring first

Progress = Callable[[int, int, str], None]
"""(layouts done, all of them, label of the one that runs now)"""
Launch = Callable[["TrialSpec", DistributedStrategy, int], "TrialResult"]


def check_measurable(request: Request, model: Any) -> None:
    """Raise PlanError, with all reasons, where layouts of this request cannot be run here; before anything is searched.

    Args:
        model: as it was given to the plan.
    """
    job = request.job
    problems = [*_machine_problems(job), *_model_problems(job, model, is_all=request.is_all)]
    if problems:
        raise PlanError([f"--measure: {problem}" for problem in problems])
    assert job.cluster.path is not None  # else there is a problem
    read_trials(job.cluster.path)
    path = trials_file(job.cluster.path)
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise PlanError(f"--measure: {path} cannot be written, where measured layouts are kept; move the cluster file")


def _machine_problems(job: Job) -> list[str]:
    cluster = job.cluster
    ranks = cluster.num_devices
    if cluster.measured is None or cluster.path is None:
        return [
            f"layouts run on the machine of the cluster file, and {cluster.name} says nothing of this one; first "
            f"hybrid calibrate --ranks {ranks} --out here.yaml, then --cluster here.yaml"
        ]
    there, here = cluster.measured.machine, this_machine()
    if len(there.hosts) > 1:
        return [
            f"{cluster.path} describes {len(there.hosts)} hosts, and layouts are run on one: plan, start them yourself "
            "(--out DIR), and compare"
        ]
    differences = [
        f"{name} {theirs} there, {ours} here"
        for name, theirs, ours in (
            ("host", there.hosts[0], here.host),
            ("processor", there.processor, here.processor),
            ("cores", there.cores, here.cores),
            ("accelerator", there.accelerator or "none", _accelerator() or "none"),
        )
        if theirs != ours
    ]
    if not differences:
        return []
    return [
        f"{cluster.path} was measured on another machine ({'; '.join(differences)}): run it there, or hybrid calibrate "
        f"--ranks {ranks} --out FILE here"
    ]


def _accelerator() -> str | None:
    import torch  # the model is here already

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _model_problems(job: Job, model: Any, *, is_all: bool) -> list[str]:
    from hybrid.calibration.trial import TRIAL_OPTIMIZERS

    problems = []
    if not (isinstance(model, str) and ":" in model):
        problems.append(
            "only a model that can be built is run: give --model package.module:factory, which returns (model, sample)"
        )
    if job.optimizer.name not in TRIAL_OPTIMIZERS:
        known = ", ".join(TRIAL_OPTIMIZERS)
        problems.append(f"optimizer {job.optimizer.name}: one of {known} is run")
    if not job.is_flash:
        problems.append("--no-flash: the model runs with the attention that it has; leave --no-flash out")
    name = job.software if isinstance(job.software, str) else job.software.name
    if not name.startswith("hybrid"):
        problems.append(f"--software {name}: what runs is this library; leave --software out")
    if is_all:
        problems.append("--all: layouts that this version cannot run cannot be measured; leave --all out")
    return problems


def measure_plans(
    plans: Plans,
    count: int = 3,
    *,
    model: str,
    steps: int | None = None,
    progress: Progress | None = None,
    launch: Launch | None = None,
) -> tuple[Trial, ...]:
    """Run the layouts of a plan that are worth measuring first, on this machine, and keep what they took.

    The measurements go into a file beside the cluster file (`lab.yaml`: `lab.measured.yaml`), and correct the next plan
    of this model on this cluster; docs/calibrate.md has the rule.

    Args:
        plans: of `hybrid.plan(..., cluster="lab.yaml")`, which `hybrid.calibrate` wrote on this machine.
        count: of layouts.
        model: `package.module:factory`, which returns (model, sample): the same model as the plan's.
        steps: to measure of each; None: for some seconds.
        progress: called with (layouts done, all of them, label of the next).
        launch: instead of starting ranks: runs one layout.

    Raises:
        PlanError: a plan for another machine, a model that cannot be built, a layout that failed, or another
            measurement that runs on this machine.
    """
    for name, value in (("count", count), ("steps", 1 if steps is None else steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(f"{name} = {value!r}: expected a whole number of at least 1")
    check_measurable(plans.request, model)
    job = plans.request.job
    # Of those that the answer names the first; of more those that differ most.
    wanted = measure_first(plans.result.found, max(count, _NAMED))[:count]
    chosen = [next(one for one in plans.result.found if one.candidate.label == label) for label in wanted]
    with measuring_alone() if launch is None else nullcontext():
        trials = [*_run_each(chosen, job, model, steps=steps or 0, progress=progress, launch=launch or _launch)]
    if progress is not None:
        progress(len(chosen), len(chosen), "")
    return tuple(trials)


def _run_each(
    chosen: Sequence[Priced], job: Job, model: str, *, steps: int, progress: Progress | None, launch: Launch
) -> Iterator[Trial]:
    from hybrid.calibration.trial import TrialSpec

    assert job.cluster.path is not None  # checked before
    for place, priced in enumerate(chosen):
        if progress is not None:
            progress(place, len(chosen), priced.candidate.label)
        candidate = priced.candidate
        spec = TrialSpec(
            model=model,
            seq=job.seq,
            rows=candidate.micro_batch_size * candidate.num_micro_batches,
            micro_batch_size=candidate.micro_batch_size,
            optimizer=job.optimizer.name,
            steps=steps,
            seconds=SECONDS_PER_LAYOUT,
        )
        load = this_machine().load
        result = launch(spec, strategy_of(job, candidate), job.cluster.num_devices)
        if result.num_parameters != job.model.num_parameters:
            raise PlanError(
                f"{model} has {result.num_parameters:,} parameters, and the plan is for {job.model.name} with "
                f"{job.model.num_parameters:,}: give the model that was planned"
            )
        trial = _trial(job, priced, result, load)
        save_trials(job.cluster.path, [trial])  # at once: the next one may fail
        yield trial


_STATE_PARTS = ("parameters", "masters", "optimizer_state", "gradients", "gradient_shards")


def _trial(job: Job, priced: Priced, result: TrialResult, load: float) -> Trial:
    measured = job.cluster.measured
    assert measured is not None
    plain = Candidate()
    layout = {
        item.name: getattr(priced.candidate, item.name)
        for item in fields(Candidate)
        if getattr(priced.candidate, item.name) != getattr(plain, item.name)
    }
    points = [stage.at_point("after_backward") for stage in priced.memory.stages]
    return Trial(
        model=job.model.name,
        seq=job.seq,
        global_batch_size=job.global_batch_size,
        compute=job.precision.compute,
        optimizer=job.optimizer.name,
        layout=TrialLayout(**layout),
        predicted_seconds=priced.time.total_seconds,
        predicted_state_bytes=max(sum(point.get(name, 0) for name in _STATE_PARTS) for point in points),
        predicted_process_bytes=priced.memory.worst.device.expected,
        tensor_bytes=priced.memory.worst.tensors_bytes,
        hosts=measured.machine.hosts,
        date=date.today().isoformat(),
        load=round(load, 2),
        **asdict(result),
    )


def _launch(spec: TrialSpec, strategy: DistributedStrategy, ranks: int) -> TrialResult:
    """On new ranks, which end afterwards: what one layout leaves behind is no part of the next one's memory."""
    from hybrid.calibration.trial import RESULT_FILE, SPEC_FILE, TrialResult

    folder = run_folder("hybrid-measure-")
    strategy_file = folder / "strategy.yaml"
    strategy.save(strategy_file)
    (folder / SPEC_FILE).write_text(json.dumps(asdict(spec)), encoding="utf-8")
    job = LaunchJob(
        script="hybrid.calibration.trial",
        is_module=True,
        num_processes=ranks,
        strategy=strategy_file,
        log_dir=folder,
        show_output=False,
    )
    outcome = run_job(job)
    raise_if_stopped(outcome, folder)
    if outcome.exit_code != 0:
        raise PlanError(f"a measured layout ended with code {outcome.exit_code}: {outcome.message}")
    result = TrialResult(**json.loads((folder / RESULT_FILE).read_text(encoding="utf-8")))
    shutil.rmtree(folder, ignore_errors=True)
    return result
