"""Settings that would do nothing under the other settings: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hybrid.strategy.choice import Choice

if TYPE_CHECKING:
    from hybrid.strategy.strategy import DistributedStrategy

__all__ = ["LOSS_SCALING", "check_clipping", "check_effects"]


def check_effects(choices: Mapping[str, Choice]) -> list[str]:
    problems: list[str] = []
    stage = choices["zero_stage"]
    at_stage = f"at stage {stage.value}" if stage.where != "sharding" else "while sharding is off"

    for name in ("units", "prefetch", "reshard_after"):
        choice = choices[name]
        if choice.given and stage.value < 3:
            problems.append(
                f"{choice.said} does nothing {at_stage}: parameters are gathered by unit at stage 3 only; choose "
                f"stage 3, or leave it out{_ELSE[name]}"
            )
    offload = choices["offload"]
    if offload.value == "parameters" and stage.value < 3:
        problems.append(
            f"{offload.said} {at_stage}: what can lie in host memory are cut parameters, which only stage 3 has; "
            "choose stage 3, or 'optimizer', which works at every stage"
        )
    for name in ("sequence_parallel", "tensor_plan", "tensor_verify"):
        choice = choices[name]
        if choice.given and choice.value and choices["tp"].value == 1:
            problems.append(
                f"{choice.where} does nothing with a tensor-parallel degree of 1: nothing is cut; choose a degree of 2 "
                "or more, or leave it out"
            )
    verify, units = choices["tensor_verify"], choices["units"]
    if choices["pp"].value not in {None, 1}:
        if verify.given and verify.value:
            problems.append(
                f"{verify.said} compares whole models, and no rank of a pipeline holds one: check the plan once with a "
                "pipeline degree of 1, and leave verify out here"
            )
        if units.given:
            problems.append(
                f"{units.where} does nothing with a pipeline, where each of its layers is a unit; leave it out"
            )
    for name in ("schedule", "virtual_stages", "split", "memory_limit_bytes"):
        choice = choices[name]
        if choice.given and choices["pp"].value == 1 and not (name == "virtual_stages" and choice.value == 1):
            problems.append(
                f"{choice.said} does nothing with a pipeline degree of 1: there is one stage; choose a degree of 2 or "
                "more, or leave it out"
            )
    limit, split = choices["memory_limit_bytes"], choices["split"]
    if limit.value is not None and split.value not in {None, "auto"}:
        problems.append(
            f"{limit.said} is kept where stages are balanced, and {split.said} says which layers each has: choose "
            "'auto', or leave the limit out"
        )
    gather = choices["overlap_param_gather"]
    if gather.given and gather.value and stage.value == 3:
        problems.append(
            f"{gather.said} does nothing at stage 3: no parameters are gathered after the update, each unit gathers "
            f"its own when it computes; set prefetch to gather ahead, and leave this out"
        )
    if gather.given and gather.value and stage.value == 0:
        problems.append(
            f"{gather.said} does nothing {at_stage}: every rank updates all parameters, so none are "
            f"gathered; choose stage 1 or 2, or leave it out"
        )
    partition = choices["partition"]
    if partition.given and partition.value != "auto" and stage.value == 0:
        problems.append(
            f"{partition.said} does nothing {at_stage}: no state is cut; choose stage 1, 2 or 3, or leave it out"
        )
    reduce = choices["grad_reduce"]
    if reduce.given and stage.value <= 1 and reduce.value != "last_micro_batch":
        problems.append(
            f"{reduce.said} does nothing {at_stage}: whole gradients are kept and reduced once "
            f"per step; choose stage 2 or 3, or 'last_micro_batch'"
        )
    mode, backend = choices["compile_mode"], choices["compile_backend"]
    if choices["compile"].value and mode.value is not None and backend.value != "inductor":
        problems.append(
            f"{mode.said} does nothing with {backend.said}: modes are of inductor alone; leave it out, or use "
            "'inductor'"
        )
    problems.extend(_check_every_k(reduce, choices["accumulate_steps"]))
    if choices["amp"].value:
        problems.extend(_check_amp(choices))
    return problems


_ELSE = {
    "units": " (bucket_bytes sizes the buckets; recompute_configs has units of its own)",
    "prefetch": "",
    "reshard_after": "",
}
LOSS_SCALING = ("amp_init_loss_scaling", "amp_growth_interval", "amp_growth_factor", "amp_backoff_factor")


def _check_amp(choices: Mapping[str, Choice]) -> list[str]:
    """Of mixed precision; with the flag off its section is refused as a whole."""
    dtype, level, grad_dtype = (choices[name] for name in ("amp_dtype", "amp_level", "grad_dtype"))
    if dtype.value == "float16":
        if grad_dtype.value not in {"param", "float16"} or level.value != "O2":
            return []
        return [
            f"{grad_dtype.said} with {dtype.said} and level 'O2': gradients kept in float16 cannot be unscaled "
            "without losing their small values; use 'float32'"
        ]
    source = dtype.said + ("" if dtype.given else " (the default)")
    problems = [
        f"{choices[name].said} does nothing with {source}, whose range needs no loss scaling; leave it out, or set "
        f"dtype to 'float16'"
        for name in LOSS_SCALING
        if choices[name].given
    ]
    if grad_dtype.value == "float16" and level.value == "O2":
        problems.append(
            f"{grad_dtype.said} with {source} and level 'O2': gradients of bfloat16 leave the range of float16, and "
            f"no loss scale keeps them in it; use 'float32', 'bfloat16' or 'param'"
        )
    return problems


def _check_every_k(reduce: Choice, steps: Choice) -> list[str]:
    if not isinstance(reduce.value, int) or steps.value is None or reduce.value <= steps.value:
        return []
    source = {"default": " (the default)", "derived": " (derived)", "user": ""}[steps.origin]
    usable = (
        f"use a number from 1 to {steps.value}, or 'last_micro_batch'"
        if steps.value > 1
        else f"with one micro-batch there is one reduction: leave it out, or give more {steps.where}"
    )
    return [
        f"{reduce.said} is more than {steps.where} {steps.value}{source}, so it would never come to "
        f"a reduction within a step; {usable}"
    ]


def check_clipping(strategy: DistributedStrategy) -> list[str]:
    clip = strategy.gradient_clipping
    if clip is None:
        return []
    if clip.max_norm is None and clip.clip_value is None:
        return ["gradient_clipping: neither max_norm nor clip_value is given; give one, or None to switch it off"]
    if clip.max_norm is not None and clip.clip_value is not None:
        return [
            f"gradient_clipping: max_norm = {clip.max_norm:g} and clip_value = {clip.clip_value:g} are two ways to "
            f"clip; keep one"
        ]
    if clip.clip_value is not None and clip.is_set("norm_type"):
        return [
            f"gradient_clipping.norm_type = {clip.norm_type:g} does nothing with clip_value; leave it out, or clip by "
            f"max_norm"
        ]
    return []
