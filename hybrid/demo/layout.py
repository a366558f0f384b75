"""Where the demo's model is cut, and what each axis has to carry: before the first step, from the strategy alone."""

from __future__ import annotations

from typing import Any

import torch

from hybrid.contracts.cluster import parse_cluster
from hybrid.demo.gpt import GPT
from hybrid.demo.progress import Layout
from hybrid.planner.axis_bytes import axis_bytes
from hybrid.planner.describe_model import spec_of
from hybrid.planner.job import Candidate, Job
from hybrid.planner.model_spec import ModelSpec
from hybrid.planner.request_reading import PRECISIONS
from hybrid.strategy import DistributedStrategy, ResolvedStrategy
from hybrid.strategy.explain import explanation
from hybrid.strategy.stage_table import StageTable

__all__ = ["layout_of"]


def layout_of(strategy: DistributedStrategy, *, world_size: int, batch: int, length: int, heads: int) -> Layout:
    """Of a strategy with a pipeline.

    Args:
        batch: sequences per step of each data-parallel rank.
        length: bytes of a sequence.
        heads: of the model's attention.
    """
    resolved = strategy.resolve(world_size)
    with torch.device("meta"):
        model = GPT(max_length=length, num_heads=heads)
    sample = torch.zeros(max(1, batch // resolved.accumulate_steps), length, dtype=torch.long)
    told = explanation(strategy, world_size, model=model, sample=sample)
    assert told.model is not None and told.model.stages is not None, "it has a pipeline"
    stages = told.model.stages
    return Layout(
        title=stages.title,
        header=list(stages.header),
        stages=[list(line) for line in stages.lines()],
        remarks=list(stages.remarks()),
        predicted_bytes=_predicted_bytes(model, sample, resolved, stages, batch=batch),
    )


def _predicted_bytes(
    model: GPT, sample: torch.Tensor, resolved: ResolvedStrategy, stages: StageTable, *, batch: int
) -> dict[str, float]:
    """Axis -> bytes that all ranks send in a step, as the planner has it; empty where it has no answer."""
    precision = PRECISIONS["fp32"]
    if resolved.amp is not None:
        precision = PRECISIONS["bf16" if resolved.amp.dtype == "bfloat16" else "fp16"]
    tensor, pipeline = resolved.tensor_parallel, resolved.pipeline
    settings: dict[str, Any] = {} if tensor is None else {"plan": tensor.plan}
    spec = spec_of(model, sample=sample[:1], activation_bytes=precision.activation, **settings)
    split = _split(spec, stages)
    is_even = batch % resolved.accumulate_steps == 0
    if pipeline is None or not split or not is_even or isinstance(resolved.grad_reduce, int):
        return {}
    job = Job(
        model=spec,
        cluster=parse_cluster(f"1x{resolved.world_size}xcpu"),
        global_batch_size=batch * resolved.data_parallel_size,
        seq=sample.shape[1],
        precision=precision,
        bucket_bytes=resolved.bucket_bytes,
        prefetch=resolved.prefetch,
    )
    candidate = Candidate(
        tp=1 if tensor is None else tensor.degree,
        pp=pipeline.degree,
        dp_replicate=resolved.data_parallel_size // resolved.shard_size,
        dp_shard=resolved.shard_size,
        sequence_parallel=tensor is not None and tensor.sequence_parallel,
        zero_stage=resolved.zero_stage,
        schedule=pipeline.schedule,
        virtual_stages=pipeline.virtual_stages,
        micro_batch_size=batch // resolved.accumulate_steps,
        num_micro_batches=resolved.accumulate_steps,
        split=split,
        grad_reduce=resolved.grad_reduce,
        reshard_after=resolved.reshard_after,
    )
    ranks = resolved.world_size // pipeline.degree  # of each stage
    stages_sent = axis_bytes(job, candidate)
    total = {axis: ranks * sum(sent[axis] for sent in stages_sent) for axis in stages_sent[0]}
    if resolved.recompute is not None and resolved.recompute.policy == "full":
        del total["tp"]  # how many sums are computed again, before all that backward needs is there, is not known
    return {axis: num_bytes for axis, num_bytes in total.items() if num_bytes}


def _split(spec: ModelSpec, stages: StageTable) -> tuple[int, ...]:
    """The planner's units of each chunk: blocks, what lies before them and behind them; empty where that is not so."""
    blocks = {unit.name for unit in spec.blocks}
    counts = [sum(layer in blocks for layer in row.layers) for row in stages.chunks]
    counts[0] += 1
    counts[-1] += 1
    return tuple(counts) if sum(counts) == len(spec.units) else ()
