"""One rank's share of a job: the real rewrite, the real optimizer and one real step, on tensors without values."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hybrid import shims
from hybrid.collectives.dry import set_inbox
from hybrid.collectives.ranges import get_listener, set_listener
from hybrid.collectives.trace import Recording, trace
from hybrid.compose.model import distributed_model
from hybrid.compose.optimizer import distributed_optimizer
from hybrid.compose.own_forward import inputs_and_labels
from hybrid.compose.runtime import Runtime
from hybrid.compose.tensor_parallel import plan_for
from hybrid.contracts.partition import BucketPartition
from hybrid.dry.batch import Batch, stand_in_loss
from hybrid.dry.counting import StepWatch, state_bytes
from hybrid.dry.crossings import Crossings, find_crossings
from hybrid.dry.passed_types import passed_types, with_passed_types
from hybrid.dry.result import LocalParameter, RankDryRun, Traffic
from hybrid.dry.values import Untouched, without_values
from hybrid.dry.world import DryMesh, alone
from hybrid.pipeline.layers import PipelineLayer, is_chain
from hybrid.planner.model_spec import ModelSpec
from hybrid.precision.casting import cast_buffers
from hybrid.sharding.units import plan_units
from hybrid.strategy import DistributedStrategy, ResolvedStrategy

__all__ = ["DryJob", "RankRun", "passing", "run_rank"]

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(kw_only=True)
class DryJob:
    """What is to be run, the same for every rank.

    Args:
        strategy: as the user has it.
        resolved: the same worked out, without what needs values or kernels (`verify`, `profile`, `compile`).
        make_model: builds the model, best on the meta device; called once for each rank.
        make_batch: model and sample -> what a rank trains on.
        make_optimizer: parameters -> an ordinary optimizer.
        notes: what was left out.
        crossings: what crosses the cuts of a pipeline, by the coordinate on the axes that it depends on.
        has_signatures: whether `shard_signatures` are wanted, which look at every place of the shard group.
    """

    strategy: DistributedStrategy
    resolved: ResolvedStrategy
    make_model: Callable[[], tuple[nn.Module, Any]]
    make_batch: Callable[[Any], Batch]
    make_optimizer: MakeOptimizer
    notes: tuple[str, ...] = ()
    crossings: dict[int, Crossings] = field(default_factory=dict)
    has_signatures: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """Args:
    found: what the rank holds and does.
    chunks: units of each chunk of the model, as it was cut; one chunk without a pipeline.
    local_sizes: by tp rank, for each parameter that is cut how much of it is there; ranks with equal ones hold alike.
    parameter_dtype: of the model as it was built.
    seq: tokens of a sample, the second size of the first tensor of the sample; 1 where it has none.
    micro_batch_size: samples of a micro-batch.
    shard_signatures: by place in the shard group; places with equal ones hold as much. Empty where nobody asked.
    """

    found: RankDryRun
    chunks: tuple[tuple[str, ...], ...]
    local_sizes: tuple[tuple[int, ...], ...]
    parameter_dtype: str
    seq: int
    micro_batch_size: int
    shard_signatures: tuple[tuple[int, ...], ...]


def run_rank(job: DryJob, rank: int) -> RankRun:
    """Rewrite the model as this rank would, and run one step.

    Raises:
        ModelError, StrategyError, OptimizerError: as the real run would; or a model that decides by values.
    """
    started = time.perf_counter()
    if job.resolved.pipeline is not None:
        tp = job.resolved.layout.coordinate(rank).get("tp", 0)
        if tp not in job.crossings:
            job.crossings[tp] = _cross(job, tp)
        set_inbox(job.crossings[tp].receive)
    try:
        with alone(job.strategy, job.resolved, rank) as mesh:
            run = _run(job, mesh)
    finally:
        set_inbox(None)
    seconds = time.perf_counter() - started
    return replace(run, found=replace(run.found, seconds=seconds))


def passing(job: DryJob, spec: ModelSpec) -> ModelSpec:
    """The planner's description, with the types in which values go from layer to layer under autocast."""
    amp, resolved = job.resolved.amp, job.resolved
    if amp is None or amp.level != "O1" or (resolved.tensor_parallel is None and resolved.pipeline is None):
        return spec
    with _values() as values:
        model, sample = _hollow(job, values)
        planned = plan_for(model, resolved)
        if amp.buffer_dtype != "float32":
            cast_buffers(model, dtype=getattr(torch, amp.buffer_dtype), custom_fp32=amp.custom_fp32)
        (args, kwargs), _ = inputs_and_labels((job.make_batch(sample).sample, None), has_loss_fn=True)
        types = passed_types(model, args, kwargs, dtype=getattr(torch, amp.dtype))
    return with_passed_types(spec, types, None if planned is None else planned.plan)


def _cross(job: DryJob, tp: int) -> Crossings:
    """Run the whole model once, chunk by chunk, on one rank that has all of them."""
    layout = job.resolved.layout
    whole = type(layout)(tuple(replace(axis, size=1) if axis.name == "pp" else axis for axis in layout.axes))
    with alone(job.strategy, job.resolved, whole.rank_of(tp=tp), layout=whole), _values() as values:
        model, sample = _hollow(job, values)
        batch = job.make_batch(sample)
        wrapped: Any = distributed_model(model, sample=_cutting_sample(job, model, batch))
        return find_crossings(wrapped.hybrid_runtime, batch)


def _run(job: DryJob, mesh: DryMesh) -> RankRun:
    with _values() as values:
        model, sample = _hollow(job, values)
        batch = job.make_batch(sample)
        dtype = next((str(one.dtype).removeprefix("torch.") for one in model.parameters()), "float32")
        wrapped: Any = distributed_model(model, sample=_cutting_sample(job, model, batch))
        optimizer = distributed_optimizer(job.make_optimizer(wrapped.parameters()))
        runtime: Runtime = wrapped.hybrid_runtime
        points = {"after_wrap": state_bytes(wrapped, runtime)}
        if job.resolved.zero_stage == 3 and job.resolved.prefetch > 1:
            # The first forward of a job fetches nothing ahead: the order of the units is known after it.
            wrapped.train_batch(batch.data, optimizer, loss_fn=stand_in_loss)
        watch = StepWatch(wrapped, runtime)
        optimizer.register_step_pre_hook(lambda *_: points.update(after_backward=state_bytes(wrapped, runtime)))
        before = get_listener()
        set_listener(watch)
        try:
            with trace() as recording:
                wrapped.train_batch(batch.data, optimizer, loss_fn=stand_in_loss)
        finally:
            set_listener(before)
        points["after_step"] = state_bytes(wrapped, runtime)
        if watch.between is not None and job.resolved.accumulate_steps > 1:
            points["between_backwards"] = watch.between
        for point in ("between_backwards", "after_backward"):
            if point in points:
                points[point] = _in_later_steps(points[point], points["after_step"])
        chunks = _chunks(wrapped, runtime)
        found = RankDryRun(
            rank=mesh.rank,
            coordinates=MappingProxyType({axis.name: mesh.coordinate(axis.name) for axis in mesh.layout.axes}),
            stage=mesh.coordinate("pp"),
            layers=chunks[0] if runtime.stages is None else tuple(runtime.stages.staged.names_here()),
            parameters=tuple(_parameters(runtime)),
            bytes_by_point=MappingProxyType(points),
            gathered_bytes=watch.most_gathered,
            traffic=_traffic(recording, mesh),
            actions=tuple(watch.actions),
            notes=job.notes,
        )
        return RankRun(
            found=found,
            chunks=chunks,
            local_sizes=_local_sizes(runtime, mesh),
            parameter_dtype=dtype,
            seq=batch.seq,
            micro_batch_size=batch.micro_batch_size,
            shard_signatures=tuple(_shard_signatures(runtime, mesh)) if job.has_signatures else (),
        )


@contextmanager
def _values() -> Iterator[Untouched]:
    """Inside, tensors have no values; random states come back as they were."""
    with torch.random.fork_rng(devices=[]), Untouched() as values:
        yield values


def _cutting_sample(job: DryJob, model: nn.Module, batch: Batch) -> Any:
    """What a pipeline cuts the model by, if it needs anything."""
    if job.resolved.pipeline is None:
        return None
    is_balanced = getattr(model, "seg_method", job.resolved.pipeline.split) in {None, "auto"}
    return batch.sample if is_balanced or not is_chain(model) else None


def _hollow(job: DryJob, values: Untouched) -> tuple[nn.Module, Any]:
    """A new model with the sample that came with it: on the CPU, and without values."""
    model, sample = job.make_model()
    if isinstance(model, PipelineLayer) and not model.is_built:
        model.build(device="meta")
    values.names = {id(module): name for name, module in model.named_modules()}
    for parameter in model.parameters():
        if parameter.is_meta:
            shims.give_memory(parameter, without_values(parameter))
        else:
            parameter.data = without_values(parameter)
    for buffer in list(model.buffers()):
        if buffer.is_meta:
            _replace_buffer(model, buffer, without_values(buffer))
    return model, sample


def _replace_buffer(model: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """Under all of its names, plain attributes too."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer is old:
                setattr(module, name, new)
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


# Made by the first update, and there from then on.
_KEPT = ("optimizer_state", "host_optimizer_state", "bookkeeping")


def _in_later_steps(at_point: Mapping[str, int], after_step: Mapping[str, int]) -> Mapping[str, int]:
    """The same moment of a step that is not the first."""
    kept = {kind: after_step[kind] for kind in _KEPT if kind in after_step}
    return MappingProxyType({**at_point, **kept})


def _chunks(model: nn.Module, runtime: Runtime) -> tuple[tuple[str, ...], ...]:
    """Units of each chunk of the model."""
    if runtime.stages is None:
        return (tuple(unit.name for unit in plan_units(model, class_names=runtime.strategy.units)),)
    return runtime.stages.staged.chunk_names()


def _local_sizes(runtime: Runtime, mesh: DryMesh) -> tuple[tuple[int, ...], ...]:
    cuts = {} if runtime.cuts is None else runtime.cuts.cuts
    return tuple(tuple(cut[tp].local_size for cut in cuts.values()) for tp in range(mesh.degree("tp")))


def _shard_signatures(runtime: Runtime, mesh: DryMesh) -> Iterator[tuple[int, ...]]:
    """Of each place in the shard group: trained elements that it updates, and into how many slices they fall."""
    sums: dict[int, tuple[list[int], list[int]]] = {}  # by the number of shards: of each, elements and slices
    for bucket in runtime.engine.buckets:
        partition = bucket.partition
        shards = partition.num_shards
        elements, slices = sums.setdefault(shards, ([0] * (shards + 1), [0] * (shards + 1)))
        _add_steps(partition, elements, slices)
    counted = {shards: tuple(tuple(accumulate(steps)) for steps in both) for shards, both in sums.items()}
    for place in range(mesh.degree("dp_shard")):
        found = [(elements[place % shards], slices[place % shards]) for shards, (elements, slices) in counted.items()]
        yield sum(elements for elements, _ in found), sum(slices for _, slices in found)


def _add_steps(partition: BucketPartition, elements: list[int], slices: list[int]) -> None:
    """Add by how much each shard has more of a bucket than the shard before it."""

    def add(steps: list[int], first: int, last: int, value: int) -> None:
        steps[first] += value
        steps[last + 1] -= value

    bounds = partition.bounds
    for entry in partition.entries:
        begin, end = entry.offset_elements, entry.offset_elements + entry.num_elements
        if begin == end:
            continue
        first, last = bisect_right(bounds, begin) - 1, bisect_left(bounds, end) - 1
        add(slices, first, last, 1)
        if first == last:
            add(elements, first, first, end - begin)
            continue
        add(elements, first, first, bounds[first + 1] - begin)
        add(elements, last, last, end - bounds[last])
        if last > first + 1:  # such shards are all of one size
            add(elements, first + 1, last - 1, bounds[first + 2] - bounds[first + 1])


def _parameters(runtime: Runtime) -> Iterator[LocalParameter]:
    engine = runtime.engine
    for fqn, parameter in engine.parameters.items():
        bucket = engine.home_of(fqn)
        part = None if bucket is None else bucket.slice_of.get(fqn)
        yield LocalParameter(
            fqn=fqn,
            global_shape=engine.placements[fqn].global_shape,
            local_shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            bucket=None if bucket is None else bucket.index,
            own=None if part is None else (part.start, part.stop),
            trainable=parameter.requires_grad,
        )


def _traffic(recording: Recording, mesh: DryMesh) -> tuple[Traffic, ...]:
    sizes = mesh.group_sizes()
    return tuple(
        Traffic(
            axis=axis,
            op=op,
            group_size=sizes[axis],
            calls=sums.calls,
            payload_bytes=sums.payload_bytes,
            sent_bytes=sums.sent_bytes,
            is_control=control,
        )
        for control in (False, True)
        for axis, by_op in sorted(recording.totals(control=control).items())
        for op, sums in sorted(by_op.items())
    )
