"""What the planner says of a rank, beside what the rank has done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hybrid.contracts.cluster import parse_cluster
from hybrid.dry.result import Difference, RankDryRun, Traffic
from hybrid.planner.axis_bytes import axis_bytes
from hybrid.planner.job import Candidate, Job, OptimizerSpec, Precision
from hybrid.planner.memory import Point, StageMemory, memory
from hybrid.planner.model_spec import ModelSpec
from hybrid.planner.stages import stage_ranges
from hybrid.strategy import ResolvedStrategy

__all__ = ["candidate_of", "compare", "job_of"]

# Moment of a step: in a dry run, and for the planner.
_POINTS: Mapping[str, Point] = {
    "between_backwards": "accumulating",
    "after_backward": "after_backward",
    "after_step": "after_step",
}
_UNEVEN = "bytes over dp are not compared: with whole parameters (partition) ranks own, and send, unequal parts"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def job_of(
    spec: ModelSpec, resolved: ResolvedStrategy, *, parameter_dtype: str, optimizer: OptimizerSpec, seq: int, size: int
) -> Job:
    """The planner's job for a strategy.

    Args:
        spec: of the model.
        resolved: the strategy.
        parameter_dtype: of the model as it is built.
        optimizer: of the run.
        seq: tokens per sample.
        size: samples of a micro-batch.
    """
    amp = resolved.amp
    compute = amp.dtype if amp is not None and amp.level == "O2" else parameter_dtype
    parameter = _BYTES[compute]
    low = parameter == 2
    gradient = parameter if not low or resolved.grad_dtype == "param" else _BYTES[resolved.grad_dtype]
    precision = Precision(
        compute="fp32" if not low and amp is None else "bf16",
        parameter=parameter,
        gradient=gradient,
        reduce=gradient if resolved.reduce_dtype == "grad" else _BYTES[resolved.reduce_dtype],
        master=4 if low else 0,
        activation=2 if low or amp is not None else parameter,
        norm=4 if amp is not None and amp.level == "O2" else 0,
    )
    return Job(
        model=spec,
        cluster=parse_cluster("local"),
        global_batch_size=size * resolved.accumulate_steps * resolved.data_parallel_size,
        seq=seq,
        precision=precision,
        optimizer=replace(optimizer, is_element_wise=resolved.partition != "parameter"),
        bucket_bytes=resolved.bucket_bytes,
        prefetch=resolved.prefetch,
    )


def candidate_of(resolved: ResolvedStrategy, *, size: int, split: Sequence[int] = ()) -> Candidate:
    """The planner's name for the layout of a strategy. `size`: samples of a micro-batch; `split`: units per chunk."""
    degree, pipeline, tensor = resolved.layout.degree, resolved.pipeline, resolved.tensor_parallel
    return Candidate(
        tp=degree("tp"),
        pp=degree("pp"),
        dp_replicate=degree("dp_replicate"),
        dp_shard=degree("dp_shard"),
        sequence_parallel=tensor is not None and tensor.sequence_parallel,
        zero_stage=resolved.zero_stage,
        schedule="1f1b" if pipeline is None else pipeline.schedule,
        virtual_stages=1 if pipeline is None else pipeline.virtual_stages,
        micro_batch_size=size,
        num_micro_batches=resolved.accumulate_steps,
        recompute="none" if resolved.recompute is None else resolved.recompute.policy,
        split=tuple(split),
        grad_reduce="every_micro_batch" if resolved.grad_reduce == "every_micro_batch" else "last_micro_batch",
        reshard_after=resolved.reshard_after,
        is_overlapped=resolved.overlap_comm,
        offload=resolved.offload,
    )


def compare(
    found: RankDryRun,
    job: Job,
    resolved: ResolvedStrategy,
    *,
    size: int,
    chunks: Sequence[Sequence[str]],
    local_sizes: Sequence[Sequence[int]],
) -> tuple[tuple[Difference, ...], tuple[str, ...]]:
    """(each figure of the planner beside that of the run, what could not be compared and why).

    Args:
        found: the rank.
        job: of `job_of`.
        resolved: the strategy.
        size: samples of a micro-batch.
        chunks: units of each chunk of the model, as the run has cut it; one chunk without a pipeline.
        local_sizes: by tp rank, of each parameter that is cut what is there.
    """
    reason = _not_compared(resolved)
    own = local_sizes[found.coordinates.get("tp", 0)]
    if not reason and any(mine < max(sizes) for mine, sizes in zip(own, zip(*local_sizes, strict=True), strict=True)):
        reason = "not compared with the planner, which counts for the tp rank that holds most; this one holds less"
    if reason:
        return (), (reason,)
    figures: list[Difference] = []
    split: tuple[int, ...] = ()
    if len(chunks) > 1:
        counts = _counts(job.model, chunks)
        if counts is None:
            return (), (
                "not compared with the planner: the run has cut the model inside of what the planner takes for "
                "one unit",
            )
        split = counts
        balanced = tuple(len(chunk) for chunk in stage_ranges(job, candidate_of(resolved, size=size)))
        figures.append(Difference(what="units of each chunk", planned=list(balanced), found=list(split)))
    candidate = candidate_of(resolved, size=size, split=split)
    planned = memory(job, candidate, shard=found.coordinates.get("dp_shard", 0)).stages[found.stage]
    for point, name in _POINTS.items():
        kinds = found.bytes_by_point.get(point)
        if kinds is not None:
            if resolved.zero_stage == 3:  # what is gathered is counted apart
                kinds = {**kinds, "parameters": found.bytes_by_point["after_wrap"].get("parameters", 0)}
            at_point = planned.at_point(name)
            if candidate.dp_shard == 1 and not (candidate.is_offloaded and point == "after_backward"):
                # What a rank owns alone is whole and a shard.
                kinds, at_point = _as_whole(kinds), _as_whole(at_point)
            figures += _state(point, at_point, kinds, is_offloaded=candidate.is_offloaded)
            if candidate.is_offloaded and point == "after_step":
                figures += _on_host(planned, kinds)
    if resolved.zero_stage == 3:
        gathered = planned.at_point("backward")["gathered_units"]
        figures.append(Difference(what="gathered units", planned=gathered, found=found.gathered_bytes))
    sent = axis_bytes(job, candidate)[found.stage]
    uneven = {"dp", "tied"} if resolved.partition == "parameter" else set()
    for axis, (num_bytes, calls) in _by_axis(found.traffic).items():
        if axis in uneven:
            continue
        expected = sent.get(axis, 0)
        # A trace cuts the fraction of a byte off each call.
        is_equal = 0 <= expected - num_bytes < max(1, calls)
        planned_bytes = num_bytes if is_equal else round(expected)
        figures.append(Difference(what=f"sent over {axis}", planned=planned_bytes, found=num_bytes))
    return tuple(figures), (_UNEVEN,) if uneven else ()


def _state(
    point: str, planned: Mapping[str, int], kinds: Mapping[str, int], *, is_offloaded: bool
) -> Iterator[Difference]:
    same = {name: (name,) for name in ("masters", "optimizer_state", "bookkeeping", "gradients", "gradient_shards")}
    if is_offloaded and point == "after_backward":  # they go to the host: before it for the run, behind it for the plan
        del same["gradient_shards"]
    for name, held in {"parameters": ("parameters", "parameter_shards"), **same}.items():
        there = sum(kinds.get(kind, 0) for kind in held)
        if there or planned.get(name, 0):
            yield Difference(what=f"{name}, {point}", planned=planned.get(name, 0), found=there)


def _as_whole(kinds: Mapping[str, int]) -> Mapping[str, int]:
    gradients = kinds.get("gradients", 0) + kinds.get("gradient_shards", 0)
    return {**kinds, "gradients": gradients, "gradient_shards": 0}


def _on_host(planned: StageMemory, kinds: Mapping[str, int]) -> Iterator[Difference]:
    """What stays in host memory from step to step; mirrors of parameters are no kind of a dry run."""
    held = {"masters": "masters", "optimizer_state": "optimizer_state", "parameters": "parameter_shards"}
    for name, kind in held.items():
        there, said = kinds.get(f"host_{kind}", 0), planned.host_parts.get(name, 0)
        if there or said:
            yield Difference(what=f"{name} on the host, after_step", planned=said, found=there)


def _by_axis(traffic: Sequence[Traffic]) -> dict[str, tuple[int, int]]:
    """Axis, as the planner divides them -> (sent bytes, calls), without control traffic."""
    sums = dict.fromkeys(("tp", "pp", "tied", "dp"), (0, 0))
    for one in traffic:
        axes = one.axis.split("+")
        if one.is_control:
            continue
        if one.op == "send":
            key = "pp"
        elif any(axis.startswith("pp") for axis in axes):
            key = "tied"
        else:
            key = "dp" if any(axis.startswith("dp_") for axis in axes) else "tp"
        sums[key] = sums[key][0] + one.sent_bytes, sums[key][1] + one.calls
    return {axis: both for axis, both in sums.items() if both[1]}


def _counts(model: ModelSpec, chunks: Sequence[Sequence[str]]) -> tuple[int, ...] | None:
    """Units of the planner in each chunk; None where a chunk begins inside of one."""
    blocks = {unit.name for unit in model.units if unit.kind == "block"}
    first = [name for name in chunks[0] if name not in blocks]
    counts = []
    for number, names in enumerate(chunks):
        own = [name for name in names if name in blocks]
        others = len(names) - len(own)
        is_end = number in (0, len(chunks) - 1)
        if others and not is_end:
            return None
        counts.append(len(own) + (number == 0 and bool(first)) + (number == len(chunks) - 1 and others > 0))
    return tuple(counts) if sum(counts) == len(model.units) else None


def _not_compared(resolved: ResolvedStrategy) -> str:
    """What of a strategy the planner has no words for."""
    what = ""
    chunks = 1 if resolved.pipeline is None else resolved.pipeline.virtual_stages
    if isinstance(resolved.grad_reduce, int):
        what = f"grad_reduce = {resolved.grad_reduce}"
    elif resolved.units is not None:
        what = "units of one's own"
    elif resolved.amp is not None and resolved.amp.custom_fp32:
        what = "amp_configs.custom_fp32"
    elif resolved.partition == "parameter" and chunks > 1:
        what = "how the whole parameters of several chunks are spread over ranks"
    return f"not compared with the planner, which does not know {what}" if what else ""


def with_comparison(found: RankDryRun, figures: tuple[Difference, ...], notes: tuple[str, ...]) -> RankDryRun:
    """The same, with it."""
    return replace(found, comparison=figures, notes=(*found.notes, *notes))
