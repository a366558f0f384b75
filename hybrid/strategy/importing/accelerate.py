"""A file of `accelerate config` as a strategy: FSDP, DDP, DeepSpeed or Megatron-LM underneath."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hybrid.errors import StrategyError
from hybrid.strategy.importing import accelerate_fsdp, deepspeed
from hybrid.strategy.importing.draft import Draft
from hybrid.strategy.importing.given import merged
from hybrid.strategy.importing.key_table import key_table
from hybrid.strategy.importing.walk import is_auto, open_auto, read_keys, read_value
from hybrid.strategy.text_form import read_text

__all__ = ["convert", "own_given"]

_DEEPSPEED = "deepspeed_config"
# Keys of Accelerate -> those of a DeepSpeed configuration.
_TO_DEEPSPEED = {
    f"{_DEEPSPEED}.zero_stage": "zero_optimization.stage",
    f"{_DEEPSPEED}.gradient_accumulation_steps": "gradient_accumulation_steps",
    f"{_DEEPSPEED}.gradient_clipping": "gradient_clipping",
    f"{_DEEPSPEED}.offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    f"{_DEEPSPEED}.offload_param_device": "zero_optimization.offload_param.device",
}
# A section acts under its own distributed_type only.
_SECTIONS = {"fsdp_config": "FSDP", _DEEPSPEED: "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
_TPU = frozenset({"XLA", "TPU"})


def own_given(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Given values for Accelerate's own keys, and those for the DeepSpeed configuration underneath."""
    table = key_table("accelerate")
    own = {
        name: value
        for name, value in given.items()
        if table.row(name) is not None or table.is_section(name) or table.homes(name)
    }
    return own, {name: value for name, value in given.items() if name not in own}


def convert(config: Mapping[str, Any], draft: Draft, *, folder: Path | None, given: Mapping[str, Any]) -> None:
    """All keys of a file.

    Args:
        config: what the file says.
        draft: takes settings, notes, problems.
        folder: of the file, for the path of a DeepSpeed configuration in it.
        given: values for that configuration.
    """
    kind = _kind(config)
    gates: dict[str, tuple[str, Callable[[Any], bool]]] = {
        section: (f"distributed_type {needed}", lambda _, needed=needed: kind == needed)  # type: ignore[misc]
        for section, needed in _SECTIONS.items()
    }
    values = read_keys(key_table("accelerate"), config, draft, gates=gates)
    for path in [path for path, value in values.items() if is_auto(value) and path not in _TO_DEEPSPEED]:
        open_auto(draft, path)
        del values[path]
    is_said = values.pop("distributed_type", None) is not None
    if kind in _TPU:
        draft.refuse("distributed_type", kind, "TPUs are not supported")
    elif is_said:
        draft.note("distributed_type", kind, "mapped", sentence=_KINDS.get(kind, "plain data parallel"))
    _launch(values, draft)
    precision = _precision(values, draft)
    if kind == "DEEPSPEED":
        _deepspeed(values, draft, folder=folder, given=given, precision=precision)
    else:
        for name, value in given.items():
            draft.problems.append(f"{name} = {value!r} (given): {key_table('accelerate').unknown(name)}")
        accelerate_fsdp.convert(values, draft, kind=kind, precision=precision)
        draft.changes.append(
            "loss, accumulation, clipping: Accelerate has them in the script (accelerator.backward, accumulate, "
            "clip_grad_norm_): set accumulate_steps and gradient_clipping, call train_batch, do not divide the loss"
        )
    if "num_machines" in values:  # not needed for the size of a shard group
        draft.note("num_machines", values.pop("num_machines"), "script", sentence="of the launch: torchrun --nnodes")
    _parallel(values, draft)
    _megatron(values, draft)
    _dynamo(values, draft)
    assert not values, f"keys without a converter: {sorted(values)}"


def _kind(config: Mapping[str, Any]) -> str:
    """Which section counts; a word that is none of the known ones is reported with the other values."""
    word = config.get("distributed_type")
    if word is None:
        return "FSDP" if config.get("fsdp_config") else "NO"
    row = key_table("accelerate").row("distributed_type")
    assert row is not None
    try:
        return str(read_value(row.type, word))
    except ValueError:
        return str(word)


_KINDS = {
    "FSDP": "sharding, as fsdp_config says",
    "DEEPSPEED": "sharding, as deepspeed_config says",
    "MEGATRON_LM": "tensor parallel and pipeline, as megatron_lm_config says",
    "NO": "one process, unless num_processes says otherwise",
}
_OF_THE_LAUNCH = ("machine_rank", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend")


def _launch(values: dict[str, Any], draft: Draft) -> None:
    """The number of processes, which is the world size; where they run is said at the launch."""
    machines = values.get("num_machines", 1)
    number = values.pop("num_processes", None)
    if number is not None and number < 1:
        draft.note("num_processes", number, "equal", sentence="not given: the launcher says it")
    elif number is not None:
        if draft.world_size not in {None, number}:
            draft.problems.append(
                f"num_processes = {number} in {draft.source or 'the settings'}, but world size {draft.world_size} is "
                "given: change the one or leave out the other"
            )
        draft.world_size = number
        draft.note("num_processes", number, "mapped", sentence="the world size")
    for path in [*_OF_THE_LAUNCH, *(path for path in values if path.startswith(f"{_DEEPSPEED}.deepspeed_"))]:
        if path in values and path != f"{_DEEPSPEED}.deepspeed_config_file":
            row = key_table("accelerate").row(path)
            assert row is not None
            draft.note(path, values.pop(path), "script", sentence=row.sentence)
    if draft.world_size is not None:
        each = draft.world_size // machines if machines and draft.world_size % machines == 0 else None
        command = f"torchrun --nnodes {machines} --nproc-per-node {each}" if machines > 1 and each else ""
        draft.script.append(
            f"# start it: {command or f'hybrid run --nproc {draft.world_size} --strategy strategy.yaml'} train.py"
        )


def _precision(values: dict[str, Any], draft: Draft) -> str | None:
    """`fp16`, `bf16` or None."""
    word = values.pop("mixed_precision", None)
    older, asked = values.pop("fp16", None), word
    if older is not None:
        if word is not None and (word == "fp16") != older:
            asked = None
            draft.problems.append(f"fp16 = {older} and mixed_precision = {word!r}: keep mixed_precision alone")
        draft.note("fp16", older, "mapped" if older else "equal", sentence="mixed_precision: fp16" if older else "off")
        word = "fp16" if older else word
    if word == "fp8":
        draft.refuse("mixed_precision", word, "8-bit floating point is not available; use bf16")
        return None
    if word in {None, "no"}:
        if word is not None:
            draft.note("mixed_precision", word, "equal", sentence="off: float32")
        return None
    if asked is not None:
        draft.note("mixed_precision", asked, "mapped", target="amp")
    return str(word)


def _deepspeed(
    values: dict[str, Any], draft: Draft, *, folder: Path | None, given: Mapping[str, Any], precision: str | None
) -> None:
    """Accelerate's few keys in DeepSpeed's words, or the file it names with them beside it."""
    path = f"{_DEEPSPEED}.deepspeed_config_file"
    name = values.pop(path, None)
    inside: Mapping[str, Any] = {}
    if name is not None:
        file = Path(name) if folder is None else folder / name
        try:
            inside = read_text(file)
        except StrategyError as error:
            draft.problems.extend(f"{path} = {name!r}: {problem}" for problem in error.problems)
            inside = {}
        if not isinstance(inside, Mapping):
            draft.problems.append(f"{path} = {name!r}: expected a dict of settings, got {type(inside).__name__}")
            inside = {}
        draft.note(path, name, "mapped", sentence="read; its keys follow")
    said: dict[str, Any] = {} if precision is None else {f"{precision}.enabled": True}
    for key, target in _TO_DEEPSPEED.items():
        value = values.pop(key, None)
        if value is None or value == "none":
            if value is not None:
                draft.note(key, value, "equal", sentence="off")
            continue
        said[target] = value
        draft.note(key, value, "mapped", target=target)
    whole: dict[str, Any] = dict(inside)
    for values_beside, source in ((said, name or draft.source), (given, draft.source)):
        whole, problems, added = merged(
            whole,
            values_beside,
            table=key_table("deepspeed"),
            arguments=deepspeed.TRAINER_ARGUMENTS,
            source=source,
        )
        draft.problems.extend(problems)
    draft.added.extend(added)
    deepspeed.convert(whole, draft)


def _parallel(values: dict[str, Any], draft: Draft) -> None:
    section = "parallelism_config.parallelism_config"
    for path in ("tp_config.tp_size", f"{section}_tp_size"):
        _degree(values, draft, path, "tensor_parallel")
    replicas = values.pop(f"{section}_dp_replicate_size", None)
    if replicas is not None:
        path = f"{section}_dp_replicate_size"
        if replicas == 1:
            draft.note(path, replicas, "equal", sentence="one copy of the state")
        else:
            draft.use(path, replicas, "hybrid_configs.dp_degree", replicas, sentence="replicas of the cut state")
    shard = values.pop(f"{section}_dp_shard_size", None)
    if shard is None:
        return
    path = f"{section}_dp_shard_size"
    if shard == 1:
        draft.note(path, shard, "equal", sentence="nothing is cut: plain data parallel")
        return
    draft.use(path, shard, "sharding_configs.shard_size", shard, sentence="ranks that together hold one copy")
    draft.give("sharding", True, path=path)
    if draft.lookup("sharding_configs.stage") is None:
        draft.give("sharding_configs.stage", 3, path=f"{path} (FSDP's own stage)")


def _degree(values: dict[str, Any], draft: Draft, path: str, flag: str) -> None:
    degree = values.pop(path, None)
    if degree is None:
        return
    if degree == 1:
        draft.note(path, degree, "equal", sentence="off")
        return
    draft.use(path, degree, f"{flag}_configs.degree", degree)
    draft.give(flag, True, path=path)


def _megatron(values: dict[str, Any], draft: Draft) -> None:
    start = "megatron_lm_config.megatron_lm_"
    _degree(values, draft, f"{start}tp_degree", "tensor_parallel")
    _degree(values, draft, f"{start}pp_degree", "pipeline")
    for name, setting in (("num_micro_batches", "accumulate_steps"), ("gradient_clipping", "gradient_clipping")):
        value = values.pop(f"{start}{name}", None)
        if value is not None and value > 0:
            draft.use(f"{start}{name}", value, setting, value)
        elif value is not None:
            draft.note(f"{start}{name}", value, "equal", sentence="off")
    sequence = values.pop(f"{start}sequence_parallelism", None)
    if sequence and not draft.lookup("tensor_parallel"):
        draft.note(f"{start}sequence_parallelism", sequence, "harmless", sentence="acts with a tp_degree above 1 only")
    elif sequence is not None:
        setting = "tensor_parallel_configs.sequence_parallel"
        if sequence:
            draft.use(f"{start}sequence_parallelism", sequence, setting, True)
        else:
            draft.note(f"{start}sequence_parallelism", sequence, "equal", sentence="off")
    recompute = values.pop(f"{start}recompute_activations", None)
    if recompute:
        draft.use(f"{start}recompute_activations", recompute, "recompute", True, sentence="policy selective")
        draft.give("recompute_configs.policy", "selective", path=f"{start}recompute_activations")
    elif recompute is not None:
        draft.note(f"{start}recompute_activations", recompute, "equal", sentence="off")
    distributed = values.pop(f"{start}use_distributed_optimizer", None)
    if distributed:
        draft.use(f"{start}use_distributed_optimizer", distributed, "sharding_configs.stage", 1)
        draft.give("sharding", True, path=f"{start}use_distributed_optimizer")
    elif distributed is not None:
        draft.note(f"{start}use_distributed_optimizer", distributed, "equal", sentence="off")


def _dynamo(values: dict[str, Any], draft: Draft) -> None:
    start = "dynamo_config.dynamo_"
    asked = {path: values.pop(path) for path in ("dynamo_backend", f"{start}backend") if path in values}
    backends = {value.strip().lower() for value in asked.values()}
    on = bool(backends - {"no"})
    for path, value in asked.items():
        if value.strip().lower() == "no":
            draft.note(path, value, "equal", sentence="off")
            continue
        draft.use(path, value, "compile", True, sentence="each repeated block by itself")
        if value.strip().lower() != "inductor":
            draft.give("compile_configs.backend", value.strip().lower(), path=path)
    for name, setting in (("mode", "mode"), ("use_dynamic", "dynamic"), ("use_fullgraph", "fullgraph")):
        path = f"{start}{name}"
        value = values.pop(path, None)
        if value is None:
            continue
        if not on:
            draft.note(path, value, "harmless", sentence=f"acts with {start}backend only, which is off")
        elif value in {"default", False}:
            draft.note(path, value, "equal", sentence="the default")
        elif value in {"reduce-overhead", "max-autotune"}:
            draft.refuse(path, value, "its CUDA graphs are not available; use 'default' or max-autotune-no-cudagraphs")
        else:
            draft.use(path, value, f"compile_configs.{setting}", value)
