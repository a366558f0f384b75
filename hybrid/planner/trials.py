"""Layouts that were run on a machine (`hybrid plan --measure`), kept in a file beside the machine's cluster file.

lab.yaml             the cluster, as `hybrid calibrate` wrote it
lab.measured.yaml    one entry per model, setting and layout; a later run of the same replaces it
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hybrid.errors import PlanError
from hybrid.planner.job import Candidate, Job

__all__ = ["Trial", "read_trials", "save_trials", "trials_file"]

Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


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
        date, torch: when, and of which version.
        load: before it began, see `Measurements.load`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    num_parameters: int
    seq: int
    global_batch_size: int
    compute: str
    optimizer: str
    layout: dict[str, Any]
    predicted_seconds: Above0
    predicted_state_bytes: Annotated[int, Field(ge=0)]
    predicted_process_bytes: Above0
    step_seconds: Above0
    spread: Annotated[float, Field(ge=0)]
    num_steps: Annotated[int, Field(ge=1)]
    state_bytes: Annotated[int, Field(ge=0)]
    process_bytes: Annotated[int, Field(ge=0)]
    tensor_bytes: Annotated[int, Field(ge=0)]
    hosts: tuple[str, ...]
    date: str
    torch: str
    load: float = 0.0

    @property
    def candidate(self) -> Candidate:
        """Raises PlanError: the entry names what a layout does not have."""
        try:
            values: dict[str, Any] = {
                name: tuple(value) if name == "split" else value for name, value in self.layout.items()
            }
            return Candidate(**values)
        except TypeError as error:
            raise PlanError(f"layout of {self.model}, measured {self.date}: {error}") from None

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
        PlanError: the file beside it cannot be read.
    """
    if cluster_file is None:
        return ()
    path = trials_file(cluster_file)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _File.model_validate(content or {}).trials
    except FileNotFoundError:
        return ()
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    raise PlanError(
        f"measured layouts {path}: {reason}; remove the file, or leave it out of account with --no-measurements"
    )


def save_trials(cluster_file: Path, new: Sequence[Trial]) -> Path:
    """Add them to what is known, in place of earlier runs of the same; the file is replaced as a whole.

    Raises:
        PlanError: it cannot be read or written.
    """
    kept = [old for old in read_trials(cluster_file) if not any(one.replaces(old) for one in new)]
    path = trials_file(cluster_file)
    content: Mapping[str, Any] = {"trials": [one.model_dump(mode="json") for one in (*kept, *new)]}
    text = "# Layouts that `hybrid plan --measure` has run on the machine of the file beside it.\n"
    text += yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    aside = path.with_name(f".{path.name}.new")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        raise PlanError(f"measured layouts {path}: cannot be written ({error.strerror or error})") from None
    return path
