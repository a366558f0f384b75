"""The plan of a strategy in one line, defaults included; never fails, whatever is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybrid.strategy.resolve import amp_settings, compile_settings, recompute_settings, work_out
from hybrid.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hybrid.strategy.strategy import DistributedStrategy

__all__ = ["summary"]


def summary(strategy: DistributedStrategy) -> str:
    result = work_out(strategy, None)
    value = {name: choice.value for name, choice in result.choices.items()}
    degrees = {
        "pp": value["pp"] or 1,
        "dp_replicate": _open(value["dp_replicate"]),
        "dp_shard": 1 if value["zero_stage"] == 0 else _open(value["shard_size"]),
        "cp": value["cp"] or 1,
        "tp": value["tp"] or 1,
    }
    parts = [
        " × ".join(f"{axis} {degree}" for axis, degree in degrees.items()),
        f"zero_stage {value['zero_stage']}",
        f"bucket {format_bytes(value['bucket_bytes'])}",
        f"overlap_comm {'on' if value['overlap_comm'] else 'off'}",
        f"overlap_param_gather {'on' if value['overlap_param_gather'] else 'off'}",
        f"grad_reduce {value['grad_reduce']}",
        f"grad_dtype {value['grad_dtype']}",
        f"reduce_dtype {value['reduce_dtype']}",
        f"partition {value['partition']}",
        *_stage_3(value),
        f"amp {amp_settings(value) or 'off'}",
        f"recompute {recompute_settings(value) or 'off'}",
        *([f"compile {compiled}"] if (compiled := compile_settings(value)) is not None else []),
        f"micro_batch_size {_open(value['micro_batch_size'])}",
        f"accumulate_steps {_open(value['accumulate_steps'])}",
        f"global_batch_size {_open(value['global_batch_size'])}",
        f"gradient_clipping {strategy.gradient_clipping or 'off'}",
        f"loss_reduction {value['loss_reduction']}",
        f"seed {_open(value['seed'])}",
        f"timeout {format_seconds(value['timeout_seconds'])}",
    ]
    if result.problems:
        parts.append(f"{len(result.problems)} problem{'s' * (len(result.problems) > 1)} (see explain())")
    return "; ".join(parts)


def _stage_3(value: Mapping[str, Any]) -> list[str]:
    if value["zero_stage"] < 3:
        return []
    units = ", ".join(value["units"] or ("repeated blocks",))
    return [f"units {units}", f"prefetch {value['prefetch']}", f"reshard_after {value['reshard_after']}"]


def _open(value: object) -> object:
    return "open" if value is None or value == -1 else value
