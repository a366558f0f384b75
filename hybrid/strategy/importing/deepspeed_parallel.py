"""DeepSpeed's tensor parallel, pipeline and compiler."""

from __future__ import annotations

import re
from typing import Any

from hybrid.strategy.importing.draft import Draft

__all__ = ["convert"]


def convert(values: dict[str, Any], draft: Draft) -> None:
    _tensor_parallel(values, draft)
    _pipeline(values, draft)
    deep = values.pop("compile.deepcompile", None)
    if deep is not None and not deep:
        draft.note("compile.deepcompile", deep, "equal", sentence="off")
    elif deep:
        draft.use("compile.deepcompile", deep, "compile", True, sentence="each repeated block by torch.compile")
    _profile(values, draft)


def _tensor_parallel(values: dict[str, Any], draft: Draft) -> None:
    for path in ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"):
        degree = values.pop(path, None)
        if degree is None:
            continue
        if degree <= 1:
            draft.note(path, degree, "equal", sentence="off")
            continue
        draft.use(path, degree, "tensor_parallel_configs.degree", degree, sentence="ranks over which layers are cut")
        draft.give("tensor_parallel", True, path=path)
    if draft.lookup("tensor_parallel"):
        draft.changes.append(
            "tensor parallel: embeddings, heads and losses over the vocabulary are cut too; tp ranks are neighbours "
            "and must get the same samples (hybrid.DistributedBatchSampler sees to it)"
        )


def _pipeline(values: dict[str, Any], draft: Draft) -> None:
    stages = values.pop("pipeline.stages", None)
    partition = values.pop("pipeline.partition", None)
    if stages is not None and stages > 1:
        draft.use("pipeline.stages", stages, "pipeline_configs.degree", stages, sentence="stages, schedule 1f1b")
        draft.give("pipeline", True, path="pipeline.stages")
        draft.changes.append(
            "pipeline: a PipelineModule becomes a hybrid.PipelineLayer of LayerDesc, or an nn.Sequential; stages 2 and "
            "3 of ZeRO work with it"
        )
    elif stages is not None:
        draft.note("pipeline.stages", stages, "equal", sentence="one stage: no pipeline")
    if partition is not None:
        _split(partition, draft)
    interval = values.pop("pipeline.activation_checkpoint_interval", None)
    path = "pipeline.activation_checkpoint_interval"
    if interval == 0:
        draft.note(path, interval, "equal", sentence="off")
    elif interval == 1:
        draft.use(path, interval, "recompute", True, sentence="every layer is computed again in backward")
    elif interval is not None:
        draft.refuse(path, interval, "recompute is by layer: use 1, or name layers in recompute_configs.units")


def _split(partition: str, draft: Draft) -> None:
    path, word = "pipeline.partition", partition.strip()
    kind, _, pattern = word.partition(":")
    if not draft.lookup("pipeline"):
        draft.note(path, partition, "harmless", sentence="acts with pipeline.stages above 1 only")
    elif word.lower() in {"best", "parameters"}:
        draft.use(path, partition, "pipeline_configs.split", "auto", sentence="balanced by measured cost")
    elif word.lower() == "uniform":
        draft.use(path, partition, "pipeline_configs.split", "uniform", sentence="evenly many layers")
    elif kind.lower() == "type" and re.fullmatch(r"\w+", pattern):
        draft.use(path, partition, "pipeline_configs.split", f"layer:{pattern}", sentence="evenly many of that class")
    else:
        draft.refuse(
            path, partition, "known are 'best', 'parameters', 'uniform' and 'type:ClassName'; or list counts in split"
        )


def _profile(values: dict[str, Any], draft: Draft) -> None:
    enabled = values.pop("flops_profiler.enabled", None)
    step = values.pop("flops_profiler.profile_step", None)
    if enabled:
        draft.use("flops_profiler.enabled", True, "profile", True, sentence="steps of train_batch are traced")
        draft.give("profile_configs.steps", 1, path="flops_profiler.enabled")
        warmup = 1 if step is None else step
        if step is None:
            draft.give("profile_configs.warmup", warmup, path="flops_profiler (its default profile_step)")
        else:
            draft.use(
                "flops_profiler.profile_step",
                step,
                "profile_configs.warmup",
                warmup,
                sentence="steps before the traced",
            )
    elif enabled is not None:
        draft.note("flops_profiler.enabled", enabled, "equal", sentence="off")
