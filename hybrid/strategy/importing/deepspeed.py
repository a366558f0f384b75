"""A DeepSpeed configuration as a strategy: which keys there are, in which order they are converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.strategy.importing import (
    deepspeed_batch,
    deepspeed_parallel,
    deepspeed_precision,
    deepspeed_script,
    deepspeed_zero,
)
from hybrid.strategy.importing.draft import Draft
from hybrid.strategy.importing.key_table import key_table
from hybrid.strategy.importing.walk import AUTO, is_auto, open_auto, read_keys
from hybrid.strategy.values import read_boolean

__all__ = ["TRAINER_ARGUMENTS", "convert"]

_SWITCHED = (
    "fp16",
    "bf16",
    "amp",
    "torch_autocast",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "comms_logger",
    "flops_profiler",
)
_GATES = {section: (f"{section}.enabled", lambda on: on is not None and read_boolean(on)) for section in _SWITCHED} | {
    "compile": ("compile.deepcompile", lambda on: on is not None and read_boolean(on)),
}

#: Arguments of the Trainer that fills 'auto' in -> the keys it fills.
TRAINER_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "per_device_train_batch_size": ("train_micro_batch_size_per_gpu",),
    "max_grad_norm": ("gradient_clipping",),
    "learning_rate": ("optimizer.params.lr", "scheduler.params.warmup_max_lr"),
    "weight_decay": ("optimizer.params.weight_decay",),
    "adam_epsilon": ("optimizer.params.eps",),
    "warmup_steps": ("scheduler.params.warmup_num_steps",),
    "max_steps": ("scheduler.params.total_num_steps",),
}


def convert(config: Mapping[str, Any], draft: Draft) -> None:
    """All keys of a configuration into the draft."""
    values = read_keys(
        key_table("deepspeed"), _settled(_with_one_bf16(_with_stage3_names(config, draft), draft)), draft, gates=_GATES
    )
    values = {path: value for path, value in values.items() if not _left_open(path, value, draft)}
    for section, (switch, _) in _GATES.items():  # of a section that may be on or off nothing can be said
        if switch not in values:
            values = {path: value for path, value in values.items() if path.rpartition(".")[0] != section}
    deepspeed_parallel.convert(values, draft)
    deepspeed_precision.convert(values, draft)
    deepspeed_zero.convert(values, draft)
    deepspeed_batch.convert(values, draft)
    deepspeed_script.convert(values, draft)
    assert not values, f"keys without a converter: {sorted(values)}"


def _left_open(path: str, value: Any, draft: Draft) -> bool:
    """'auto' where no equation of ours gives the value: a problem."""
    if path in deepspeed_batch.PATHS or not is_auto(value):
        return False
    open_auto(draft, path, example=_EXAMPLES.get(path.rpartition(".")[2], "VALUE"))
    return True


_EXAMPLES = {
    "gradient_clipping": "1.0",
    "enabled": "true",
    "lr": "1e-4",
    "betas": "[0.9,0.999]",
    "eps": "1e-8",
    "weight_decay": "0.01",
    "reduce_bucket_size": "16777216 (or hidden_size=4096, from which the Trainer takes it)",
    "stage3_prefetch_bucket_size": "15099494 (or hidden_size=4096, from which the Trainer takes it)",
    "warmup_num_steps": "100",
    "total_num_steps": "1000",
    "warmup_min_lr": "0",
    "warmup_max_lr": "1e-4",
}


def _with_one_bf16(config: Mapping[str, Any], draft: Draft) -> dict[str, Any]:
    """`bfloat16` is the older name of the section `bf16`; a problem where both stand and differ."""
    older, newer = config.get("bfloat16"), config.get("bf16")
    both = newer
    if older is not None and newer is None:
        both = older
    elif isinstance(older, Mapping) and isinstance(newer, Mapping):
        both = {**older, **{key: value for key, value in newer.items() if not is_auto(value) or key not in older}}
        draft.problems += [
            f"bf16.{key} = {both[key]!r}, but bfloat16.{key} = {value!r}: two names of one section; keep bf16"
            for key, value in older.items()
            if not is_auto(value) and value != both[key]
        ]
    elif older is not None:
        draft.problems.append(f"bfloat16 = {older!r} beside bf16 = {newer!r}: two names of one section; keep bf16")
    one = {("bf16" if key == "bfloat16" else key): value for key, value in config.items()}
    return {**one, "bf16": both} if "bf16" in one else one


_STAGE3_NAMES = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"),
    *("max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold"),
    *("use_all_reduce_for_fetch_params", "allgather_sequential"),
)


def _with_stage3_names(config: Mapping[str, Any], draft: Draft) -> Mapping[str, Any]:
    """DeepSpeed reads these without `stage3_` before them, too; a problem where both stand and differ."""
    section = config.get("zero_optimization")
    if not isinstance(section, Mapping):
        return config
    one = dict(section)
    for short in _STAGE3_NAMES:
        if short not in one:
            continue
        name, value = f"stage3_{short}", one.pop(short)
        if is_auto(one.get(name, AUTO)):
            one[name] = value
        elif not is_auto(value) and one[name] != value:
            draft.problems.append(
                f"zero_optimization.{name} = {one[name]!r}, but zero_optimization.{short} = {value!r}: two names of "
                f"one setting; keep {name}"
            )
    return {**config, "zero_optimization": one}


def _settled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of two kinds of precision that are open, the one that the other excludes is off."""
    settled = dict(config)
    for this, other in (("fp16", "bf16"), ("bf16", "fp16")):
        mine, others = settled.get(this), settled.get(other)
        if isinstance(mine, Mapping) and isinstance(others, Mapping) and is_auto(mine.get("enabled", AUTO)):
            if "enabled" in mine and str(others.get("enabled")).lower() == "true":
                settled[this] = {**mine, "enabled": False}
    return settled
