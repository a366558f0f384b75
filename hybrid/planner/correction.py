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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

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
_ROUNDS = 6
_CHANGE = 0.02

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
    """

    work: float
    communication: float
    fixed: float
    context_bytes: tuple[float, float, float] | None
    trials: tuple[Trial, ...]
    plain_job: Job
    error_before: float
    error_after: float

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
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "work": self.work,
            "communication": self.communication,
            "fixed": self.fixed,
            "context_bytes": None if self.context_bytes is None else list(self.context_bytes),
            "error_before": self.error_before,
            "error_after": self.error_after,
            "source": self.source,
            "trials": [one.model_dump(mode="json") for one in self.trials],
        }


def correction_of(job: Job, trials: Sequence[Trial]) -> Correction | None:
    """The factors of this job; None where no run is about it."""
    found = tuple(one for one in trials if one.is_about(job))
    if not found:
        return None
    software = software_of(job.software) if isinstance(job.software, str) else job.software
    measured = np.log([one.step_seconds for one in found])
    noise = np.array([max(_LEAST_NOISE, one.spread / 2) for one in found])

    def logs(factors: np.ndarray) -> np.ndarray:
        scaled = replace(job, software=scaled_software(software, *np.exp(factors)))
        return np.log([step_time(scaled, one.candidate).total_seconds for one in found])

    at = np.zeros(3)
    before = priced = logs(at)
    for _ in range(_ROUNDS):  # Gauss-Newton: the step is nearly a sum of its parts
        slopes = np.stack([(logs(at + _CHANGE * unit) - priced) / _CHANGE for unit in np.eye(3)], axis=1)
        rows = np.vstack([slopes / noise[:, None], np.eye(3) / _PRIOR])
        wanted = np.concatenate([(measured - priced) / noise, -at / _PRIOR])
        at = at + np.linalg.lstsq(rows, wanted, rcond=None)[0]
        priced = logs(at)
    work, communication, fixed = (float(value) for value in np.exp(at))
    return Correction(
        work=work,
        communication=communication,
        fixed=fixed,
        context_bytes=_context(found, job.cluster.device.name),
        trials=found,
        plain_job=job,
        error_before=_error(before - measured, noise),
        error_after=_error(priced - measured, noise),
    )


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


def _context(trials: Sequence[Trial], device_name: str) -> tuple[float, float, float] | None:
    """What processes had beside tensors, as the allocator keeps these."""
    found = [one.process_bytes - reserved_bytes(one.tensor_bytes, device_name).expected for one in trials]
    found = [size for size in found if size > 0]
    return (min(found) * 0.95, median(found), max(found) * 1.05) if found else None
