"""DeepSpeed's `zero_optimization` and clipping."""

from __future__ import annotations

from typing import Any

from hybrid.strategy.importing.deepspeed_precision import low_precision
from hybrid.strategy.importing.draft import Draft
from hybrid.units import format_bytes

__all__ = ["convert"]

_ZERO = "zero_optimization"
_CLIP = 1.0
"""The largest norm where the file says nothing, in DeepSpeed 0.19.8 (older versions: no clipping)."""


def convert(values: dict[str, Any], draft: Draft) -> None:
    mine = {path for path in values if path.startswith(f"{_ZERO}.")}
    stage = _stage(values, draft)
    _offload(values, draft, stage)
    _buckets(values, draft)
    overlap = values.pop(f"{_ZERO}.overlap_comm", None)
    if overlap is not None:
        draft.use(f"{_ZERO}.overlap_comm", overlap, "sharding_configs.overlap_comm", overlap)
    _prefetch(values, draft, stage)
    _shard_size(values, draft, stage)
    if draft.settings.get("sharding_configs") or mine:
        draft.give("sharding", True, path=_ZERO)
        draft.give("sharding_configs.stage", stage, path=f"{_ZERO} (its default stage)")
    _clipping(values, draft)


def _stage(values: dict[str, Any], draft: Draft) -> int:
    path = f"{_ZERO}.stage"
    if path not in values:
        return 0
    stage: int = values.pop(path)
    draft.use(path, stage, "sharding_configs.stage", stage, sentence=_STAGES[stage])
    if stage in {1, 2}:
        draft.changes.append(
            "stages 1 and 2: gradients are reduce-scattered in place on their buckets; parameters are gathered by "
            "bucket after the step (sharding_configs.overlap_param_gather lets that run under the next forward)"
        )
    if stage == 3:
        draft.changes.append(
            "stage 3: what is gathered and freed as a whole is a unit (a repeated block), not a module's parameters up "
            "to a number of elements; the limits stage3_max_* have nothing to act on"
        )
    return stage


_STAGES = {
    0: "plain data parallel: nothing is cut",
    1: "optimizer state is cut",
    2: "gradients are cut too",
    3: "parameters are cut too",
}


def _offload(values: dict[str, Any], draft: Draft, stage: int) -> None:
    for older, newer in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        old, new = values.get(f"{_ZERO}.{older}"), values.get(f"{_ZERO}.{newer}.device")
        if old is not None and new is not None and old != (new != "none"):
            draft.problems.append(
                f"{_ZERO}.{older} = {str(old).lower()}, but {_ZERO}.{newer}.device = {new!r}: two names of one "
                f"setting; keep {newer}"
            )
    asked = {}
    for path, ours in (
        (f"{_ZERO}.cpu_offload", "optimizer"),
        (f"{_ZERO}.cpu_offload_param", "parameters"),
        (f"{_ZERO}.offload_optimizer.device", "optimizer"),
        (f"{_ZERO}.offload_param.device", "parameters"),
    ):
        value = values.pop(path, None)
        if value in {None, False, "none"}:
            if value is not None:
                draft.note(path, value, "equal", sentence="off")
        elif value == "nvme":
            draft.refuse(path, value, "state can lie in host memory, not on disks: use cpu")
        elif ours == "parameters" and stage < 3:
            draft.refuse(
                path,
                value,
                f"what can lie in host memory are cut parameters, which stage 3 has and stage {stage} not; offload the "
                "optimizer instead",
            )
        else:
            asked[path] = (value, ours)
    strongest = "parameters" if any(ours == "parameters" for _, ours in asked.values()) else "optimizer"
    for path, (value, ours) in asked.items():
        includes = "" if ours == strongest else ", which includes the optimizer"
        draft.use(path, value, "sharding_configs.offload", strongest, sentence=f"{ours} in host memory{includes}")
    if strongest == "parameters" and not any(ours == "optimizer" for _, ours in asked.values()):
        draft.changes.append(
            "offload: parameters in host memory take optimizer state and reduced gradients along; there is no offload "
            "of parameters alone"
        )
    if asked:
        draft.changes.append(
            "offload: the host updates with your optimizer, of any kind; DeepSpeed puts its own CPU Adam in its place. "
            "Choose fused=True or foreach=True"
        )


def _buckets(values: dict[str, Any], draft: Draft) -> None:
    reduce_path, gather_path = f"{_ZERO}.reduce_bucket_size", f"{_ZERO}.allgather_bucket_size"
    itemsize = 2 if low_precision(draft) else 4
    reduce, gather = values.pop(reduce_path, None), values.pop(gather_path, None)
    for path, elements in ((reduce_path, reduce), (gather_path, gather if reduce in {None, gather} else None)):
        if elements is not None:
            size = elements * itemsize
            draft.use(
                path,
                elements,
                "sharding_configs.bucket_bytes",
                size,
                sentence=f"{elements} elements × {itemsize} bytes = {format_bytes(size)}",
            )
    if gather is not None and reduce not in {None, gather}:
        draft.note(
            gather_path,
            gather,
            "harmless",
            sentence="one bucket size serves both ways: that of reduce_bucket_size; results do not depend on it",
        )
    if reduce is None and gather is None:
        if any(name.startswith(f"{_ZERO}.") for name in draft.origins.values()):
            draft.changes.append(
                "buckets: 25 MiB, the default here; DeepSpeed's default of 5e8 elements "
                f"({format_bytes(5e8 * itemsize)}) is not copied. Results do not depend on it"
            )


def _prefetch(values: dict[str, Any], draft: Draft, stage: int) -> None:
    path = f"{_ZERO}.stage3_prefetch_bucket_size"
    elements = values.pop(path, None)
    if elements is None:
        return
    if stage < 3:
        draft.note(path, elements, "harmless", sentence="acts at stage 3 only")
    elif elements == 0:
        draft.use(path, elements, "sharding_configs.prefetch", 0, sentence="nothing is gathered ahead")
    else:
        draft.use(path, elements, "sharding_configs.prefetch", 1, sentence="counted in units: one is gathered ahead")


def _shard_size(values: dict[str, Any], draft: Draft, stage: int) -> None:
    path = f"{_ZERO}.mics_shard_size"
    size = values.pop(path, None)
    if size is None:
        return
    if size == -1:
        draft.note(path, size, "equal", sentence="off: all data-parallel ranks hold one copy")
    elif size < 1:
        draft.problems.append(f"{path} = {size}: expected a number of ranks, or -1 for off")
    elif stage == 0:
        draft.refuse(path, size, "stage 0 cuts nothing; choose a stage from 1 to 3")
    else:
        draft.use(path, size, "sharding_configs.shard_size", size, sentence="ranks that together hold one copy")


def _clipping(values: dict[str, Any], draft: Draft) -> None:
    value = values.pop("gradient_clipping", None)
    if value is None:
        draft.give("gradient_clipping", _CLIP, path="gradient_clipping (its default)")
        draft.changes.append(
            f"clipping: the file gives no gradient_clipping. DeepSpeed 0.19.8 then clips at {_CLIP:g}, older versions "
            f"did not clip; {_CLIP:g} is written out. --set gradient_clipping=0 for no clipping"
        )
    elif value == 0:
        draft.note("gradient_clipping", value, "equal", sentence="off: nothing is clipped")
    elif value < 0:
        draft.problems.append(f"gradient_clipping = {value}: expected a number above 0, or 0 for off")
    else:
        draft.use(
            "gradient_clipping", value, "gradient_clipping", value, sentence="largest global norm, over all ranks"
        )
