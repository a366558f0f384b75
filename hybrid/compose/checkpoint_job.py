"""What saving and loading have in common: which model and optimizer are meant, and agreement between the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid import shims
from hybrid.checkpoint.held import HeldState
from hybrid.collectives import ops
from hybrid.compose import context
from hybrid.compose.context import DATA_AXES
from hybrid.compose.model import DistributedModel
from hybrid.compose.optimizer import DistributedOptimizer
from hybrid.compose.runtime import Runtime
from hybrid.errors import CheckpointError

__all__ = [
    "Job",
    "agree",
    "extra_states",
    "find_job",
    "held_by",
    "layout_record",
    "persistent_buffers",
    "writes_buffers",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The model and the optimizer of a save or a load; None: that part is not meant."""

    runtime: Runtime
    model: DistributedModel | None
    optimizer: DistributedOptimizer | None


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


def agree(value: Any, problem: BaseException | str | None, *, runtime: Runtime, what: str) -> list[Any]:
    """The values of all ranks, or, if any has a problem, the same error on all of them. *Collective.*

    Raises:
        CheckpointError: a rank has a problem; or the ranks are not at the same call.
    """
    text = None if problem is None else str(problem)
    everyone = ops.all_gather_object((what, value, text), group=runtime.mesh.world)
    calls = {called for called, _, _ in everyone}
    problems = [(rank, said) for rank, (_, _, said) in enumerate(everyone) if said is not None]
    if problems:
        first = problems[0][1]
        if all(said == first for _, said in problems):
            where = "" if len(problems) == len(everyone) else f" (on {_ranks([rank for rank, _ in problems])})"
            raise CheckpointError(f"{first}{where}")
        raise CheckpointError("; ".join(f"rank {rank}: {said}" for rank, said in problems))
    if len(calls) > 1:
        said = "; ".join(
            f"{called} on {_ranks([rank for rank, one in enumerate(everyone) if one[0] == called])}"
            for called in sorted(calls)
        )
        raise CheckpointError(f"the ranks are not at the same call: {said}")
    return [one for _, one, _ in everyone]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def held_by(runtime: Runtime) -> HeldState:
    mesh = runtime.mesh
    coordinates = {axis.name: mesh.coordinate(axis.name) for axis in mesh.layout.axes}
    return HeldState(runtime.engine, coordinates=coordinates, degree=mesh.degree)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every buffer of this rank that is part of the state dict, under every name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module.named_buffers(recurse=False)
        if shims.is_persistent(module, name)
    }


def extra_states(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name in the state dict, module) of each module with extra state of its own."""
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}._extra_state" if prefix else "_extra_state", module


def writes_buffers(runtime: Runtime) -> bool:
    """Whether this rank writes what every rank of its stage has: the first one of the stage does."""
    return runtime.mesh.group(*DATA_AXES, "tp").rank == 0


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
