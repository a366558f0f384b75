"""Layouts that were run on a machine (`hybrid plan --measure`), kept in a file beside the machine's cluster file.

lab.yaml             the cluster, as `hybrid calibrate` wrote it
lab.measured.yaml    one entry per model, setting and layout; a later run of the same replaces it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from hybrid.contracts.entry_problems import entry_problems
from hybrid.contracts.kept_file import locked, replace_text
from hybrid.contracts.measurements import Day, Seconds, Spread
from hybrid.contracts.schedule import SCHEDULE_NAMES
from hybrid.errors import PlanError
from hybrid.planner.job import Candidate, Job, Offload
from hybrid.planner.model_spec import Recompute

__all__ = ["Trial", "TrialLayout", "read_trials", "save_trials", "trials_file"]

Degree = Annotated[int, Field(strict=True, ge=1, le=2**24)]
Count = Annotated[int, Field(strict=True, ge=1, le=2**50)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=10**18)]
SomeBytes = Annotated[float, Field(strict=True, gt=0, le=1e18, allow_inf_nan=False)]


class TrialLayout(BaseModel):
    """A `Candidate`, read from a file; what has its default is left out of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tp: Degree = 1
    pp: Degree = 1
    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    cp: Degree = 1
    ep: Degree = 1
    sequence_parallel: StrictBool = False
    zero_stage: Annotated[int, Field(strict=True, ge=0, le=3)] = 0
    schedule: StrictStr = "1f1b"
    virtual_stages: Degree = 1
    micro_batch_size: Degree = 1
    num_micro_batches: Degree = 1
    recompute: Recompute = "none"
    split: tuple[Degree, ...] = ()
    grad_reduce: Literal["every_micro_batch", "last_micro_batch"] = "last_micro_batch"
    reshard_after: Literal["unit", "run"] = "unit"
    is_overlapped: StrictBool = True
    offload: Offload = "none"

    @field_validator("schedule")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in SCHEDULE_NAMES:
            raise ValueError(f"{name!r} is no schedule; there are {', '.join(SCHEDULE_NAMES)}")
        return name

    @model_serializer
    def _changed(self) -> dict[str, Any]:
        fields = type(self).model_fields
        values = {name: getattr(self, name) for name in fields if getattr(self, name) != fields[name].default}
        return {name: list(value) if name == "split" else value for name, value in values.items()}

    @property
    def candidate(self) -> Candidate:
        return Candidate(**{name: getattr(self, name) for name in type(self).model_fields})


class Trial(BaseModel):
    """One layout of one model, run on one machine.

    Args:
        model, num_parameters, seq, compute, optimizer: what was trained: only plans of the same are corrected by it.
        layout: fields of `Candidate` that are not its defaults.
        predicted_seconds, predicted_process_bytes: by the plan that named it, corrections of earlier runs included.
        step_seconds: median of the measured steps.
        spread: of these, from the 10th to the 90th percentile over the median.
        num_steps: that were measured.
        state_bytes: parameters, gradients and optimizer state of the fullest rank, between backward and step.
        process_bytes: most that the fullest process had.
        tensor_bytes: live tensors at their most, by the plan: what `process_bytes` has beside its context.
        hosts: where.
        date, torch: when, and the version that ran.
        load: before it began, see `Measurements.load`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: StrictStr
    num_parameters: Count
    seq: Count
    global_batch_size: Count
    compute: StrictStr
    optimizer: StrictStr
    layout: TrialLayout
    predicted_seconds: Seconds
    predicted_state_bytes: Bytes
    predicted_process_bytes: SomeBytes
    step_seconds: Seconds
    spread: Spread
    num_steps: Count
    state_bytes: Bytes
    process_bytes: Bytes
    tensor_bytes: Bytes
    hosts: Annotated[tuple[StrictStr, ...], Field(min_length=1)]
    date: Day
    torch: StrictStr
    load: Annotated[float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _has_its_batch(self) -> Trial:
        one = self.layout.candidate
        rows = one.micro_batch_size * one.num_micro_batches * one.dp
        if rows != self.global_batch_size:
            raise ValueError(
                f"micro_batch_size {one.micro_batch_size} × num_micro_batches {one.num_micro_batches} × dp {one.dp} = "
                f"{rows} of its layout is not its global_batch_size {self.global_batch_size}"
            )
        return self

    @property
    def candidate(self) -> Candidate:
        """What ran."""
        return self.layout.candidate

    def is_about(self, job: Job) -> bool:
        """Whether it corrects plans of this job."""
        model = job.model
        measured = job.cluster.measured
        return (
            (self.model, self.num_parameters) == (model.name, model.num_parameters)
            and (self.seq, self.compute, self.optimizer) == (job.seq, job.precision.compute, job.optimizer.name)
            and measured is not None
            and self.hosts == measured.machine.hosts
            and self.candidate.world_size == job.cluster.num_devices
        )

    def replaces(self, other: Trial) -> bool:
        """Whether it is a later run of the same."""
        names = ("model", "num_parameters", "seq", "global_batch_size", "compute", "optimizer", "layout", "hosts")
        return all(getattr(self, name) == getattr(other, name) for name in names)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    trials: tuple[Trial, ...] = ()


def trials_file(cluster_file: Path) -> Path:
    """`lab.yaml` -> `lab.measured.yaml`."""
    return cluster_file.with_name(f"{cluster_file.stem}.measured.yaml")


def read_trials(cluster_file: Path | None) -> tuple[Trial, ...]:
    """Of the machine that this file describes; none where nothing was measured.

    Raises:
        PlanError: the file beside it cannot be read, or has entries that no run wrote; all of them.
    """
    if cluster_file is None:
        return ()
    path = trials_file(cluster_file)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _File.model_validate({} if content is None else content).trials
    except FileNotFoundError:
        return ()
    except ValidationError as error:
        problems = entry_problems(error, f"measured layouts {path}")
    except (OSError, yaml.YAMLError, ValueError) as error:  # a ValueError: no UTF-8, no day, endless digits
        problems = [f"measured layouts {path}: {str(error).splitlines()[0]}"]
    problems[-1] += "; take such entries out or remove the file, or leave it out of account with --no-measurements"
    raise PlanError(problems)


def save_trials(cluster_file: Path, new: Sequence[Trial]) -> Path:
    """Add them to what is known, in place of earlier runs of the same; the file is replaced as a whole.

    Raises:
        PlanError: it cannot be read or written.
    """
    path = trials_file(cluster_file)
    try:
        with locked(path):  # of two runs at once each would else write what it has read, without the other's
            kept = [old for old in read_trials(cluster_file) if not any(one.replaces(old) for one in new)]
            content: Mapping[str, Any] = {"trials": [one.model_dump(mode="json") for one in (*kept, *new)]}
            text = "# Layouts that `hybrid plan --measure` has run on the machine of the file beside it.\n"
            text += yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
            replace_text(path, text)
    except OSError as error:
        raise PlanError(f"measured layouts {path}: cannot be written ({error.strerror or error})") from None
    return path
