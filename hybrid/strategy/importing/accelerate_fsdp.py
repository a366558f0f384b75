"""Accelerate's `fsdp_config`, and what its mixed precision is under FSDP and under plain data parallel."""

from __future__ import annotations

import re
from typing import Any

from hybrid.strategy.importing.draft import Draft

__all__ = ["convert"]

_FSDP = "fsdp_config.fsdp_"
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
# Strategies that cut within a machine and replicate over machines, by name and by number.
_PER_MACHINE = frozenset({"HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "4", "5"})
_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


def convert(values: dict[str, Any], draft: Draft, *, kind: str, precision: str | None) -> None:
    """FSDP's keys, and the precision of whatever is underneath."""
    is_fsdp = kind == "FSDP"
    if is_fsdp:
        _sharding(values, draft)
    if precision is not None:
        _precision(draft, precision, is_fsdp=is_fsdp)


def _sharding(values: dict[str, Any], draft: Draft) -> None:
    draft.give("sharding", True, path="distributed_type")
    stage = _stage(values, draft)
    if stage is None:
        for path in [path for path in values if path.startswith(_FSDP)]:
            del values[path]
        return
    offload = values.pop(f"{_FSDP}offload_params", None)
    if offload:
        ours = "parameters" if stage == 3 else "optimizer"
        draft.use(f"{_FSDP}offload_params", offload, "sharding_configs.offload", ours, sentence=_OFFLOAD[ours])
    elif offload is not None:
        draft.note(f"{_FSDP}offload_params", offload, "equal", sentence="off")
    _units(values, draft, stage)
    _prefetch(values, draft, stage)
    recompute = values.pop(f"{_FSDP}activation_checkpointing", None)
    if recompute:
        draft.use(f"{_FSDP}activation_checkpointing", recompute, "recompute", True, sentence="of every unit")
    elif recompute is not None:
        draft.note(f"{_FSDP}activation_checkpointing", recompute, "equal", sentence="off")


_OFFLOAD = {
    "parameters": "parameters, optimizer state and reduced gradients in host memory; the host updates",
    "optimizer": "below stage 3 parameters are whole on every device: optimizer state and reduced gradients only",
}


def _stage(values: dict[str, Any], draft: Draft) -> int | None:
    """The ZeRO stage out of the strategy's name (version 1) or of the resharding (version 2); None with a problem."""
    version_path, name_path = f"{_FSDP}version", f"{_FSDP}sharding_strategy"
    reshard_path = f"{_FSDP}reshard_after_forward"
    version = values.pop(version_path, None)
    if version is not None:
        draft.note(version_path, version, "mapped", sentence="how fsdp_reshard_after_forward is read")
    name, reshard = values.pop(name_path, None), values.pop(reshard_path, None)
    if name is not None and name.isdigit():
        name = _STRATEGIES[int(name) - 1]
    asked: dict[str, tuple[Any, str]] = {} if name is None else {name_path: (name, name)}
    if isinstance(reshard, bool) or str(reshard).lower() in {"true", "false"}:
        asked[reshard_path] = (reshard, "FULL_SHARD" if str(reshard).lower() == "true" else "SHARD_GRAD_OP")
    elif reshard is not None and str(reshard).upper() in _STRATEGIES:
        asked[reshard_path] = (reshard, str(reshard).upper())
    elif reshard is not None:
        draft.problems.append(f"{reshard_path} = {reshard!r}: expected true, false, or one of {', '.join(_STRATEGIES)}")
        return None
    if len({word for _, word in asked.values()}) > 1:
        told = " and ".join(f"{path} = {value!r}" for path, (value, _) in asked.items())
        draft.problems.append(f"{told} say different things; keep one")
        return None
    chosen = next((word for _, word in asked.values()), "FULL_SHARD")
    stage = _STAGES[chosen]
    for path, (value, _) in asked.items():
        draft.use(path, value, "sharding_configs.stage", stage, sentence=_MEANING[chosen])
    if not asked:
        draft.give("sharding_configs.stage", stage, path="distributed_type (FSDP's default, FULL_SHARD)")
        draft.changes.append("sharding: no strategy is given: FULL_SHARD, FSDP's default, is written out as stage 3")
    if stage == 2:
        draft.changes.append(
            "stage 2 keeps parameters whole between steps; FSDP's SHARD_GRAD_OP cuts them again after each backward. "
            "Same results; more memory between steps, no gather before the forward"
        )
    if chosen in _PER_MACHINE:
        _per_machine(values, draft, chosen)
    return stage


_MEANING = {
    "FULL_SHARD": "parameters are cut and freed after use",
    "SHARD_GRAD_OP": "gradients and optimizer state are cut",
    "NO_SHARD": "plain data parallel",
    "HYBRID_SHARD": "parameters are cut within a machine, replicated over machines",
    "HYBRID_SHARD_ZERO2": "gradients and optimizer state are cut within a machine, replicated over machines",
}


def _per_machine(values: dict[str, Any], draft: Draft, chosen: str) -> None:
    machines = values.pop("num_machines", 1)
    if draft.world_size is None or draft.world_size % machines:
        draft.problems.append(
            f"{_FSDP}sharding_strategy = {chosen}: cut within a machine, but how many ranks has one? num_processes "
            f"{draft.world_size} on num_machines {machines} do not say; give num_processes, a multiple of num_machines"
        )
        return
    each = draft.world_size // machines
    path = "num_machines"
    if draft.give("sharding_configs.shard_size", each, path=f"{_FSDP}sharding_strategy"):
        draft.note(
            path,
            machines,
            "mapped",
            target=f"sharding_configs.shard_size = {each}",
            sentence=f"{draft.world_size} processes / {machines} machines; and torchrun --nnodes",
        )


def _units(values: dict[str, Any], draft: Draft, stage: int) -> None:
    policy_path, classes_path = f"{_FSDP}auto_wrap_policy", f"{_FSDP}transformer_layer_cls_to_wrap"
    policy, classes = values.pop(policy_path, None), values.pop(classes_path, None)
    names = _names(classes)
    if policy is not None:
        sentence = {
            "TRANSFORMER_BASED_WRAP": "units are the repeated blocks, or the classes that are named",
            "SIZE_BASED_WRAP": "units are the repeated blocks, whatever their size",
            "NO_WRAP": "units are the repeated blocks: less memory than one unit, same results",
        }[policy]
        draft.note(policy_path, policy, "equal", sentence=sentence)
    if classes is None:
        return
    if names is None:
        draft.problems.append(f"{classes_path} = {classes!r}: expected class names, 'A,B' or a list")
    elif not names:
        draft.note(classes_path, classes, "equal", sentence="none named: the repeated blocks")
    elif policy not in {None, "TRANSFORMER_BASED_WRAP"}:
        draft.note(classes_path, classes, "harmless", sentence="acts with TRANSFORMER_BASED_WRAP only")
    elif stage < 3:
        draft.note(classes_path, classes, "harmless", sentence="units are gathered at stage 3 only")
    else:
        draft.use(classes_path, classes, "sharding_configs.units", names, sentence="what is gathered as a whole")


def _names(classes: Any) -> list[str] | None:
    """Class names out of text or a list, without their modules; None if it is neither."""
    if isinstance(classes, str):
        classes = re.split(r"[,\s]+", classes.strip())
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        return None
    return [name.rpartition(".")[2] for name in classes if name]


def _prefetch(values: dict[str, Any], draft: Draft, stage: int) -> None:
    for path in (f"{_FSDP}backward_prefetch", f"{_FSDP}backward_prefetch_policy"):
        word = values.pop(path, None)
        if word is None:
            continue
        if stage < 3:
            draft.note(path, word, "harmless", sentence="units are gathered at stage 3 only")
        elif word == "NO_PREFETCH":
            draft.use(path, word, "sharding_configs.prefetch", 0, sentence="nothing is gathered ahead")
        else:
            draft.use(path, word, "sharding_configs.prefetch", 1, sentence="one unit is gathered ahead")


def _precision(draft: Draft, precision: str, *, is_fsdp: bool) -> None:
    dtype, path = _DTYPES[precision], "mixed_precision"
    draft.give("amp", True, path=path)
    draft.give("amp_configs.dtype", dtype, path=path)
    draft.give("amp_configs.level", "O2" if is_fsdp else "O1", path=path)
    if is_fsdp:
        draft.give("sharding_configs.reduce_dtype", dtype, path=path)
        draft.changes.append(
            f"precision: FSDP computes and sends gradients in {dtype} and updates float32 parameters: level O2 with "
            f"reduce_dtype {dtype}. torch's normalisation layers stay in float32 here; FSDP's buffers in {dtype} are "
            "amp_configs.buffer_dtype, which is not written, since a model without buffers would be refused"
        )
    else:
        draft.changes.append(f"precision: autocast in {dtype}: level O1, float32 parameters, as Accelerate has it")
