"""What saving and loading have in common: which model and optimizer are meant, and agreement between the ranks."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from hybrid import shims
from hybrid.checkpoint.held import HeldState
from hybrid.checkpoint.together import describe, joined, ranks_text
from hybrid.collectives import ops
from hybrid.compose import async_save, context
from hybrid.compose.context import DATA_AXES
from hybrid.compose.model import DistributedModel
from hybrid.compose.optimizer import DistributedOptimizer
from hybrid.compose.runtime import Runtime
from hybrid.errors import CheckpointError, CollectiveError

__all__ = [
    "Job",
    "agree",
    "begin",
    "begin_with",
    "distinct_buffers",
    "extra_states",
    "find_job",
    "held_by",
    "layout_record",
    "outside_inference_mode",
    "path_of",
    "persistent_buffers",
    "refuse_loading_now",
    "refuse_saving_gradients",
    "tied_names",
    "whole_number",
    "writes_first",
]


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The model and the optimizer of a save or a load; None: that part is not meant."""

    runtime: Runtime
    model: DistributedModel | None
    optimizer: DistributedOptimizer | None


def begin(call: str, model: Any, optimizer: Any, asked: Mapping[str, Any]) -> Job:
    """`begin_with` nothing to prepare. *Collective.*"""
    job, _ = begin_with(call, model, optimizer, asked, prepare=lambda job: None)
    return job


def begin_with(
    call: str, model: Any, optimizer: Any, asked: Mapping[str, Any], *, prepare: Callable[[Job], _Result]
) -> tuple[Job, list[_Result]]:
    """Wait for the save under way, find the job, prepare, and see that all ranks ask for the same. *Collective.*

    All of that in one message: what the ranks prepared counts only if they are at the same call.

    Args:
        asked: name -> value of what the call was given and must be alike.
        prepare: what all ranks get to know of each; not collective.

    Returns:
        The job, and what each rank prepared.

    Raises:
        CheckpointError: no such model; a difference between the ranks; the save before failed, or what was to be
            prepared, on any rank.
        CollectiveError: which ranks are gone, or did not call within the timeout.
    """
    late = async_save.ended()
    try:
        job = find_job(model, optimizer, call=call)
    except CheckpointError:
        if late is not None:
            raise late from None
        raise
    runtime = job.runtime
    try:
        runtime.engine.gather.finish()
    except CollectiveError as error:  # at once: to tell a rank that is gone would take a timeout more
        raise CollectiveError(f"{call}: not all ranks came together. {error}") from error
    mine = {name: repr(value) for name, value in asked.items()}
    mine |= {name: "given" if part is not None else "None" for name, part in _parts(job).items()}
    prepared: _Result | None = None
    problem: BaseException | None = None
    try:
        if late is None:
            prepared = prepare(job)
    except Exception as error:  # of the user's own `state_dict()` too: no rank waits for one that failed there
        problem = error
    word = "" if problem is None else describe(problem)
    everyone = agree((mine, prepared, word), late, runtime=runtime, what=call, also=problem)
    different = []
    for name in mine:
        said = [one.get(name, "not given") for one, _, _ in everyone]
        if len(set(said)) > 1:
            where = ", ".join(
                f"{value} on {ranks_text([rank for rank, one in enumerate(said) if one == value])}"
                for value in dict.fromkeys(said)
            )
            different.append(f"{name} is {where}")
    if different:
        raise CheckpointError(f"{call}: the ranks do not ask for the same: {'; '.join(different)}")
    problems = joined([said for _, _, said in everyone])
    if problems:
        raise CheckpointError(problems) from problem
    try:
        # Made here and not by the first that needs it: a thread beside the training must not make groups.
        runtime.mesh.host_world()
    except RuntimeError as error:
        raise CollectiveError(f"{call}: the ranks could not make a group for it; one is gone ({error})") from error
    return job, [one for _, one, _ in everyone]


def outside_inference_mode(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Tensors made under torch.inference_mode could not be trained with later."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call


def path_of(given: Any, *, call: str, what: str = "the path of a folder") -> Path:
    """An absolute path. Raises CheckpointError: not one."""
    if not isinstance(given, str | os.PathLike):
        raise CheckpointError(f"{call} needs {what}, got {given!r}")
    text = os.fspath(given)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise CheckpointError(f"{call} needs {what}, got {text!r}")
    return Path(text).expanduser().absolute()


def whole_number(given: Any) -> int | None:
    """The number, NumPy's kinds too; None: it is none."""
    if isinstance(given, bool):
        return None
    try:
        return operator.index(given)
    except TypeError:
        return None


def refuse_saving_gradients(job: Job, *, call: str) -> None:
    """Raises CheckpointError: gradients of this rank wait for an update, and would be lost."""
    if job.runtime.holds_unused_gradients():
        raise CheckpointError(
            f"{call} between a backward, or train_batch(step=False), and the update that it is for: gradients are in "
            "no checkpoint; save after optimizer.step() or the next train_batch with step=True, or zero_grad() first"
        )


def refuse_loading_now(job: Job, *, call: str) -> None:
    """A load between these would be lost, or mixed with what was before. (Gradients of a plain loop are as in torch.)

    Raises:
        ModelError: inside `gather_parameters` at stage 3.
        CheckpointError: what train_batch has accumulated is of other weights.
    """
    job.runtime.engine.check_nothing_edited(call)
    if job.runtime.accumulated_weight is not None:
        raise CheckpointError(
            f"{call} between train_batch(step=False) and the update that it waits for: the gradients are those of the "
            "weights before; call model.zero_grad() first, or load after the update"
        )


def _parts(job: Job) -> dict[str, Any]:
    return {"model": job.model, "optimizer": job.optimizer}


def find_job(model: Any, optimizer: Any, *, call: str) -> Job:
    """What was given, or, if nothing was, the one model and the one optimizer that this process has wrapped.

    Raises:
        CheckpointError: not wrapped; not of one model; none or several to choose from.
    """
    if model is None and optimizer is None:
        runtimes = context.runtimes()
        if len(runtimes) != 1:
            raise CheckpointError(
                f"{call} without a model takes the one that was given to distributed_model; this process has "
                f"{len(runtimes)}: pass model and optimizer"
            )
        runtime = runtimes[0]
        model = None if runtime.model is None else runtime.model()
        optimizers = [shards.optimizer for shards in runtime.optimizers()]
        if len(optimizers) > 1:
            raise CheckpointError(
                f"{call} without an optimizer takes the one that was given to distributed_optimizer; this model has "
                f"{len(optimizers)}: pass the optimizer"
            )
        optimizer = optimizers[0] if optimizers else None
    if model is not None and not isinstance(model, DistributedModel):
        raise CheckpointError(
            f"{call} needs a model from distributed_model, got {type(model).__name__}"
            + ("; its second argument is a model, or a step (Fleet's form)" if not isinstance(model, nn.Module) else "")
        )
    if optimizer is not None and not isinstance(optimizer, DistributedOptimizer):
        raise CheckpointError(f"{call} needs an optimizer from distributed_optimizer, got {type(optimizer).__name__}")
    if model is not None and optimizer is not None and optimizer.hybrid_runtime is not model.hybrid_runtime:
        raise CheckpointError(f"{call}: the optimizer is that of another model")
    if model is not None:
        runtime = model.hybrid_runtime
    else:
        assert optimizer is not None, "one of them is there: given, or found with its runtime"
        runtime = optimizer.hybrid_runtime
    return Job(runtime=runtime, model=model, optimizer=optimizer)


def agree(
    value: Any, problem: BaseException | None, *, runtime: Runtime, what: str, also: BaseException | None = None
) -> list[Any]:
    """The values of all ranks, or, if any has a problem, the same error on all of them. *Collective.*

    Args:
        also: a problem that `value` tells the others; said here if they do not come.

    Raises:
        CheckpointError: a rank has a problem; or the ranks are not at the same call.
        CollectiveError: which ranks are gone, or did not come within the timeout.
    """
    word = "" if problem is None else describe(problem)
    try:
        everyone = ops.all_gather_object((what, value, word), group=runtime.mesh.world)
    except CollectiveError as error:
        own = problem or also
        here = f"\nOn this rank: {describe(own)}" if own is not None else ""
        raise CollectiveError(f"{what}: not all ranks came together. {error}{here}") from own
    calls = [called for called, _, _ in everyone]
    problems = joined([said for _, _, said in everyone])
    if len(set(calls)) > 1:
        said = "; ".join(
            f"{called} on {ranks_text([rank for rank, one in enumerate(calls) if one == called])}"
            for called in sorted(set(calls))
        )
        problems = f"the ranks are not at the same call: {said}" + (f"; {problems}" if problems else "")
    if problems:
        raise CheckpointError(problems) from problem
    return [one for _, one, _ in everyone]


def held_by(runtime: Runtime) -> HeldState:
    if runtime.held is None:
        mesh = runtime.mesh
        coordinates = {axis.name: mesh.coordinate(axis.name) for axis in mesh.layout.axes}
        runtime.held = HeldState(runtime.engine, coordinates=coordinates, degree=mesh.degree)
    return runtime.held


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every buffer of this rank that is part of the state dict, under every name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module.named_buffers(recurse=False)
        if shims.is_persistent(module, name)
    }


def distinct_buffers(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each persistent buffer under its first name; other name -> first name, of a module that is used twice."""
    first: dict[int, str] = {}
    buffers: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for name, buffer in persistent_buffers(model).items():
        if first.setdefault(id(buffer), name) == name:
            buffers[name] = buffer
        else:
            tied[name] = first[id(buffer)]
    return buffers, tied


def extra_states(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name in the state dict, module) of each module with extra state of its own."""
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}._extra_state" if prefix else "_extra_state", module


def tied_names(runtime: Runtime) -> dict[str, str]:
    """Other name -> the name under which a parameter is stored; of the whole model, equal on every rank."""
    if runtime.stages is not None:  # stages that share a weight know it under names of their own
        tied = {name: first for name, first in runtime.stages.whole.first.items() if name != first}
    else:
        tied = {name: record.fqn for record in runtime.engine.placements.values() for name in record.tied_fqns}
    return dict(sorted(tied.items()))


def writes_first(runtime: Runtime, name: str) -> bool:
    """Whether this rank writes the buffer or the module of this name, of which several ranks have copies.

    That is the first rank of the first stage that has it: what stands around the units of a model is on every stage,
    and so is a unit that several stages call.
    """
    if runtime.mesh.group(*DATA_AXES, "tp").rank != 0:
        return False
    if runtime.stages is None:
        return True
    staged = runtime.stages.staged
    while name and not staged.stages_of(name):  # of what is in a unit and was not there when the model was cut
        name = name.rpartition(".")[0]
    return staged.stage == (min(staged.stages_of(name)) if name else 0)


def layout_record(runtime: Runtime) -> dict[str, Any]:
    """The layout for people, and to see whether a resumed job has the same one."""
    strategy, mesh = runtime.strategy, runtime.mesh
    record: dict[str, Any] = {
        "world_size": mesh.world_size,
        "axes": {axis.name: axis.size for axis in mesh.layout.axes},
        "zero_stage": strategy.zero_stage,
        "shard_size": strategy.shard_size,
        "partition": runtime.engine.partition_kind,
        "bucket_bytes": strategy.bucket_bytes,
        "precision": "float32" if strategy.amp is None else f"{strategy.amp.dtype} {strategy.amp.level}",
        "sequence_parallel": strategy.tensor_parallel is not None and strategy.tensor_parallel.sequence_parallel,
    }
    if runtime.stages is not None and strategy.pipeline is not None:
        record["schedule"] = strategy.pipeline.schedule
        record["chunks"] = [[chunk.start, chunk.stop] for chunk in runtime.stages.staged.chunks]
    return record
