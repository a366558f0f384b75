"""The `DistributedStrategy` that runs a candidate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid.errors import PlanError
from hybrid.planner.constraints import problems_of
from hybrid.planner.job import Candidate, Job

if TYPE_CHECKING:
    from hybrid.strategy import DistributedStrategy

__all__ = ["strategy_of"]


def strategy_of(job: Job, candidate: Candidate) -> DistributedStrategy:
    """Every setting that the plan decides; all others keep their defaults.

    Raises:
        PlanError: a layout that this version cannot run.
    """
    from hybrid.strategy import DistributedStrategy  # here: a table of plans needs none, and its schema takes 0.1 s

    wrong = [problem for problem in problems_of(job, candidate, is_tp_given=True) if problem.rule == "not built"]
    if wrong:
        raise PlanError([problem.text for problem in wrong])
    settings: dict[str, Any] = {}
    if candidate.zero_stage or candidate.is_offloaded:
        cut: dict[str, Any] = {"stage": candidate.zero_stage}
        if candidate.zero_stage:
            cut["shard_size"] = candidate.dp_shard
        if candidate.is_offloaded:
            cut["offload"] = candidate.offload
        if candidate.zero_stage >= 2:
            cut["grad_reduce"] = candidate.grad_reduce
        if candidate.zero_stage == 3:
            cut["reshard_after"] = candidate.reshard_after
            cut["prefetch"] = job.prefetch
        cut["bucket_bytes"] = job.bucket_bytes
        settings |= {"sharding": True, "sharding_configs": cut}
    if candidate.tp > 1:
        tensor: dict[str, Any] = {"degree": candidate.tp, "sequence_parallel": candidate.sequence_parallel}
        settings |= {"tensor_parallel": True, "tensor_parallel_configs": tensor}
    if candidate.pp > 1:
        pipeline: dict[str, Any] = {"degree": candidate.pp, "schedule": candidate.schedule, "split": "auto"}
        if candidate.virtual_stages > 1:
            pipeline["virtual_stages"] = candidate.virtual_stages
        settings |= {"pipeline": True, "pipeline_configs": pipeline}
    settings |= {"micro_batch_size": candidate.micro_batch_size, "accumulate_steps": candidate.num_micro_batches}
    if job.precision.compute in {"bf16", "fp16"}:
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[job.precision.compute]
        settings |= {"amp": True, "amp_configs": {"dtype": dtype, "level": "O2"}}
    if candidate.recompute != "none":
        settings |= {"recompute": True, "recompute_configs": {"policy": candidate.recompute}}
    return DistributedStrategy(settings)
