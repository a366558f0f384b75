"""What a person may have meant by a key that is not known where it stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Protocol

from hybrid.strategy.values import closest

__all__ = ["other_tool", "unknown_key"]

# Words of other frameworks -> where the setting is here. Not aliases: their rules differ, so a person decides.
_ELSEWHERE = {
    "zero_stage": "sharding_configs.stage",
    "sharding_stage": "sharding_configs.stage",
    "sharding_level": "sharding_configs.stage",
    "train_batch_size": "global_batch_size",
    "global_batch": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "accumulate_steps",
    "num_micro_batches": "accumulate_steps",
    "reduce_bucket_size": "sharding_configs.bucket_bytes (in bytes, not elements)",
    "allgather_bucket_size": "sharding_configs.bucket_bytes (in bytes, not elements)",
    "buffer_max_size": "sharding_configs.bucket_bytes (in bytes, not elements)",
    "bucket_cap_mb": "sharding_configs.bucket_bytes ('25MiB')",
    "max_grad_norm": "gradient_clipping",
    "clip_grad": "gradient_clipping",
    "max_norm": "gradient_clipping",
    "tensor_model_parallel_size": "tensor_parallel_configs.degree",
    "tp_size": "tensor_parallel_configs.degree",
    "pipeline_model_parallel_size": "pipeline_configs.degree",
    "pp_size": "pipeline_configs.degree",
    "fp16": "amp with amp_configs = {'dtype': 'float16'}",
    "bf16": "amp with amp_configs = {'dtype': 'bfloat16'}",
    "timeout": "timeout_seconds",
    "save_to_prototxt": "save",
    "load_from_prototxt": "load",
}
# Words of what is not available -> what to do instead.
_NOWHERE = {
    "zero_hpz_partition_size": "a second copy of the parameters per node is not available; leave it out (the same "
    "numbers, gathered over all ranks), or set sharding_configs.shard_size to it (then all state is kept once per so "
    "many ranks)",
}
# Tool -> what stands at the top of its files.
_FILES = {
    "DeepSpeed": {
        *("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        *("fp16", "bf16", "optimizer", "scheduler"),
    },
    "Accelerate": {
        *("compute_environment", "distributed_type", "fsdp_config", "deepspeed_config", "megatron_lm_config"),
        *("num_machines", "num_processes"),
    },
}


class Keyed(Protocol):
    """A class of settings, as far as its keys go."""

    PATH: ClassVar[str]

    @classmethod
    def path_of(cls, key: object) -> str: ...

    @classmethod
    def own_keys(cls) -> tuple[str, ...]: ...

    @classmethod
    def all_keys(cls) -> tuple[str, ...]: ...


def unknown_key(key: str, here: type[Keyed], everywhere: Iterable[type[Keyed]]) -> str:
    """One sentence: the path, and the key or the place that was probably meant."""
    path = here.path_of(key)
    others = [kind for kind in everywhere if kind is not here and kind.PATH.count(".") == 0]
    homes = [kind.path_of(key) for kind in others if key in kind.all_keys()]
    if homes:
        return f"{path}: there is no setting {key!r} here; it belongs at {' or '.join(homes)}"
    if key in _NOWHERE:
        return f"{path}: {_NOWHERE[key]}"
    if key in _ELSEWHERE:
        return f"{path}: unknown setting; here it is called {_ELSEWHERE[key]}"
    guess = closest(key, here.all_keys())
    if guess is not None:
        return f"{path}: unknown setting; did you mean {guess!r}?"
    for kind in others:
        guess = closest(key, kind.own_keys())
        if guess is not None:
            return f"{path}: unknown setting; did you mean {kind.path_of(guess)!r}?"
    return f"{path}: unknown setting; known here: {', '.join(here.own_keys() or here.all_keys())}"


def other_tool(settings: Mapping[object, object]) -> str | None:
    """The tool whose file this seems to be: it has a section of that tool, or two of its keys."""
    for tool, keys in _FILES.items():
        found = [value for key, value in settings.items() if key in keys]
        if len(found) > 1 or any(isinstance(value, Mapping) for value in found):
            return tool
    return None
