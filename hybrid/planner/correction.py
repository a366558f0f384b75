"""Plans corrected by layouts that were run: three factors, fitted to all runs of the model on the machine.

    log(measured step) ≈ log(step priced with: work · a, communication · b, fixed cost of a step · c)

Work is what a rank computes (products, attention, pointwise work, launches, the optimizer), communication every
collective and message. The squares of what is left, in units of the noise of a run, plus the squares of log a, log b
and log c in units of log 2, are least. So one run moves what it is made of, three runs that differ tell work from
communication, and without evidence a factor stays 1. Bubbles, waits and overlaps follow, since the whole schedule is
priced anew. A process's context is the median of what the runs had beside their tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from hybrid.errors import PlanError
from hybrid.planner.constraints import problems_of
from hybrid.planner.cost import step_time
from hybrid.planner.job import Job
from hybrid.planner.memory_layers import reserved_bytes
from hybrid.planner.software import Constant, Software, software_of
from hybrid.planner.trials import Trial

__all__ = ["Correction", "corrected_job", "correction_of", "scaled_software"]

# The noise of a run is at least this (as the logarithm of a step); what is not known of a factor before any run is
# within a factor of 2.
_LEAST_NOISE = 0.03
_PRIOR = math.log(2.0)
# Of the fit: rounds at most, the change of a logarithm whose slope is taken, that which ends it, the longest step of a
# round, and how often one is halved that would make the fit worse.
_ROUNDS = 30
_CHANGE = 0.02
_SETTLED = 1e-4
_LONGEST = 1.5
_HALVINGS = 10
# A factor beyond this says that something else is wrong with the plan or the run.
_DOUBTFUL = 30.0

# Constants of a stack -> (which factor, its power): time is proportional to some and inversely to others.
_SCALED = {
    "matmul_fraction": ("work", -1),
    "attention_fraction": ("work", -1),
    "memory_fraction": ("work", -1),
    "optimizer_memory_fraction": ("work", -1),
    "host_memory_bytes_per_second": ("work", -1),
    "launch_seconds": ("work", 1),
    "micro_batch_seconds": ("work", 1),
    "collective_fraction": ("communication", -1),
    "collective_seconds": ("communication", 1),
    "owner_seconds": ("communication", 1),
    "step_seconds": ("fixed", 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Args:
    work, communication, fixed: factors of the times that the plan would have without the runs.
    context_bytes: low, expected and high of a process beside its tensors.
    trials: the runs.
    plain_job: that was corrected.
    error_before, error_after: how far off these steps are without and with the factors: root mean square of the
        logarithms, each run with the weight that it has in the fit.
    notes: what speaks against relying on it: factors beyond what a machine explains, another version of torch.
    """

    work: float
    communication: float
    fixed: float
    context_bytes: tuple[float, float, float] | None
    trials: tuple[Trial, ...]
    plain_job: Job
    error_before: float
    error_after: float
    notes: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """Runs, and when the last one was."""
        runs = f"{len(self.trials)} measured layout{'s' if len(self.trials) > 1 else ''}"
        return f"{runs} of {self.trials[0].model} on {self.trials[0].hosts[0]}"

    @property
    def sentence(self) -> str:
        """For people."""
        return (
            f"corrected by {self.source}, the last of {max(one.date for one in self.trials)}: work × {self.work:.2f}, "
            f"communication × {self.communication:.2f}, fixed cost × {self.fixed:.2f}; these steps were "
            f"{self.error_before:.0%} off without it and are {self.error_after:.0%} with it (--no-measurements for "
            "none)"
        ) + "".join(f"; {note}" for note in self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "work": self.work,
            "communication": self.communication,
            "fixed": self.fixed,
            "context_bytes": None if self.context_bytes is None else list(self.context_bytes),
            "error_before": self.error_before,
            "error_after": self.error_after,
            "notes": list(self.notes),
            "source": self.source,
            "trials": [one.model_dump(mode="json") for one in self.trials],
        }


def correction_of(job: Job, trials: Sequence[Trial]) -> Correction | None:
    """The factors of this job; None where no run is about it.

    Raises:
        PlanError: a run of a layout that this model cannot have on this cluster.
    """
    found = tuple(one for one in trials if one.is_about(job))
    if not found:
        return None
    _check_layouts(job, found)
    software = software_of(job.software) if isinstance(job.software, str) else job.software
    measured = np.log([one.step_seconds for one in found])
    noise = np.array([max(_LEAST_NOISE, one.spread / 2) for one in found])

    def logs(factors: np.ndarray) -> np.ndarray:
        scaled = replace(job, software=scaled_software(software, *np.exp(factors)))
        return np.log([step_time(scaled, one.candidate).total_seconds for one in found])

    before = logs(np.zeros(3))
    at = fitted(logs, measured, noise)
    priced = logs(at)
    work, communication, fixed = (float(value) for value in np.exp(at))
    return Correction(
        work=work,
        communication=communication,
        fixed=fixed,
        context_bytes=_context(found, is_processor=job.cluster.device.is_processor),
        trials=found,
        plain_job=job,
        error_before=_error(before - measured, noise),
        error_after=_error(priced - measured, noise),
        notes=_notes(job, found, (work, communication, fixed), np.asarray(measured - before)),
    )


def fitted(logs: Callable[[np.ndarray], np.ndarray], measured: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Logarithms of the factors whose cost is least, never above that of no correction.

    Damped Gauss-Newton: the step is nearly a sum of its parts, whose shares change with the factors. A change that
    would raise the cost is halved until it does not.

    Args:
        logs: logarithms of the factors, `[3]` -> of the priced steps, `[runs]`.
        measured: logarithms of the measured steps, `[runs]`.
        noise: of each, `[runs]`.
    """

    def cost(at: np.ndarray, priced: np.ndarray) -> float:
        return float(np.sum(((measured - priced) / noise) ** 2) + np.sum((at / _PRIOR) ** 2))

    at = np.zeros(3)
    priced = logs(at)
    least = cost(at, priced)
    for _ in range(_ROUNDS):
        slopes = np.stack([(logs(at + _CHANGE * unit) - priced) / _CHANGE for unit in np.eye(3)], axis=1)
        rows = np.vstack([slopes / noise[:, None], np.eye(3) / _PRIOR])
        wanted = np.concatenate([(measured - priced) / noise, -at / _PRIOR])
        change = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        change *= min(1.0, _LONGEST / max(float(np.abs(change).max()), 1e-9))
        for _ in range(_HALVINGS):
            there = logs(at + change)
            found = cost(at + change, there)
            if found < least:
                break
            change = change / 2
        else:
            break  # no way down from here
        at, priced, least = at + change, there, found
        if float(np.abs(change).max()) < _SETTLED:
            break
    return at


def _check_layouts(job: Job, trials: Sequence[Trial]) -> None:
    problems = [
        f"measured layouts, {one.candidate.label} of {one.date}: {problem.text}; take this entry out of the file, or "
        "leave it out of account with --no-measurements"
        for one in trials
        for problem in problems_of(
            replace(job, global_batch_size=one.global_batch_size), one.candidate, is_tp_given=True
        )[:1]
    ]
    if problems:
        raise PlanError(problems)


def _notes(job: Job, trials: Sequence[Trial], factors: tuple[float, float, float], off: np.ndarray) -> tuple[str, ...]:
    """off: logarithms of measured over planned, `[runs]`."""
    notes = []
    if any(abs(math.log(factor)) > math.log(_DOUBTFUL) for factor in factors):
        worst = trials[int(np.abs(off).argmax())]
        ratio = math.exp(float(np.abs(off).max()))
        way = "slower" if float(off[np.abs(off).argmax()]) > 0 else "faster"
        notes.append(
            f"no machine explains a factor beyond {_DOUBTFUL:g}: {worst.candidate.label} ran {ratio:,.0f} times {way} "
            "than planned; measure it again, or take it out"
        )
    calibrated = job.cluster.measured.torch if job.cluster.measured is not None else ""
    others = sorted({one.torch for one in trials} - {calibrated})
    if others:
        notes.append(f"measured with torch {', '.join(others)}, and the machine calibrated with {calibrated}")
    return tuple(notes)


def _error(differences: np.ndarray, noise: np.ndarray) -> float:
    return float(np.sqrt(np.average(differences**2, weights=noise**-2)))


def corrected_job(job: Job, correction: Correction) -> Job:
    """The same job, priced with the factors; every constant that they change says so."""
    software = software_of(job.software) if isinstance(job.software, str) else job.software
    factors = correction.work, correction.communication, correction.fixed
    scaled = scaled_software(software, *factors)
    date = max(one.date for one in correction.trials)
    names = [name for name in _SCALED if getattr(scaled, name) != getattr(software, name)]
    sources = {
        name: Constant(
            value=getattr(scaled, name),
            unit=software.sources[name].unit if name in software.sources else "",
            source=f"{_source(software, name)}; × by {correction.source}",
            date=date,
            fitted_on=correction.source,
        )
        for name in names
    }
    return replace(
        job,
        software=replace(scaled, sources={**software.sources, **sources}),
        context_bytes=correction.context_bytes or job.context_bytes,
    )


def _source(software: Software, name: str) -> str:
    return software.sources[name].source if name in software.sources else "default of hybrid/planner/software.py"


def scaled_software(software: Software, work: float, communication: float, fixed: float) -> Software:
    """A stack whose work, collectives and fixed cost take so many times as long."""
    factors = {"work": work, "communication": communication, "fixed": fixed}
    changed = {name: getattr(software, name) * factors[kind] ** power for name, (kind, power) in _SCALED.items()}
    return replace(software, **changed)


def _context(trials: Sequence[Trial], *, is_processor: bool) -> tuple[float, float, float] | None:
    """What processes had beside tensors, as the allocator keeps these."""
    found = [one.process_bytes - reserved_bytes(one.tensor_bytes, is_processor=is_processor).expected for one in trials]
    found = [size for size in found if size > 0]
    return (min(found) * 0.95, median(found), max(found) * 1.05) if found else None
