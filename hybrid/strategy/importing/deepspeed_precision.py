"""DeepSpeed's precision: fp16, bf16, apex and autocast become `amp`; the types of gradients and buffers."""

from __future__ import annotations

from typing import Any

from hybrid.strategy.importing.draft import Draft
from hybrid.strategy.importing.notes import KeyKind

__all__ = ["convert", "low_precision"]

_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_WINDOW = 1000
"""DeepSpeed's default number of steps after which the loss scale grows; ours is another."""


def convert(values: dict[str, Any], draft: Draft) -> None:
    """At most one of the four kinds of mixed precision may be on."""
    on = [path for path in _SWITCHES if values.get(path) is True]
    if len(on) > 1:
        draft.problems.append(f"{' and '.join(f'{path} = true' for path in on)}: one precision can be on; keep one")
        for path in [
            path for path in values if path.split(".")[0] in _KINDS | {"data_types", "communication_data_type"}
        ]:
            del values[path]
        return
    for path, (dtype, level) in _SWITCHES.items():
        if path not in values:
            continue
        value = values.pop(path)
        if not value:
            draft.note(path, value, "equal", sentence="off")
            continue
        dtype = _dtype_of(values.get("torch_autocast.dtype", dtype)) if path.startswith("torch_autocast") else dtype
        if path == "amp.enabled":
            level = values.get("amp.opt_level", level)
        draft.use(path, value, "amp", True, sentence=f"in {dtype} at level {level}")
        if level in {"O1", "O2"}:
            draft.give("amp_configs.dtype", dtype, path=path)
            draft.give("amp_configs.level", level, path=path)
        if dtype == "float16":
            _loss_scale(values, draft, own=path.startswith("fp16"))
    _rest(values, draft)
    _types(values, draft)


_SWITCHES = {
    "fp16.enabled": ("float16", "O2"),
    "bf16.enabled": ("bfloat16", "O2"),
    "amp.enabled": ("float16", "O1"),
    "torch_autocast.enabled": ("bfloat16", "O1"),
}
_KINDS = {path.split(".")[0] for path in _SWITCHES}


def low_precision(draft: Draft) -> bool:
    """Whether parameters are of two bytes."""
    return bool(draft.lookup("amp_configs.level") == "O2")


def _dtype_of(word: str) -> str:
    name = word.removeprefix("torch.")
    return _NAMES.get(name, name)


def _loss_scale(values: dict[str, Any], draft: Draft, *, own: bool) -> None:
    if not own:
        return
    if "fp16.initial_scale_power" in values:
        power = values.pop("fp16.initial_scale_power")
        if power > 126:
            draft.problems.append(f"fp16.initial_scale_power = {power}: a loss scale is below 2**127; use 16")
        else:
            draft.use("fp16.initial_scale_power", power, "amp_configs.init_loss_scaling", float(2**power))
    if "fp16.loss_scale_window" in values:
        window = values.pop("fp16.loss_scale_window")
        draft.use("fp16.loss_scale_window", window, "amp_configs.growth_interval", window)
    else:
        draft.give("amp_configs.growth_interval", _WINDOW, path="fp16 (its default loss_scale_window)")
        draft.changes.append(
            f"loss scale: it grows after {_WINDOW} steps without overflow, DeepSpeed's default, written out as "
            "growth_interval (the default here is 2000)"
        )
    if draft.said("fp16.hysteresis") != 1:
        draft.changes.append(
            "loss scale: it halves at every overflow (hysteresis 1), where DeepSpeed's default hysteresis of 2 lets "
            "the first one pass: which steps are skipped may differ"
        )
    if draft.said("fp16.min_loss_scale") != 0:
        draft.changes.append(
            "loss scale: it has no lower bound, where DeepSpeed stops the run at min_loss_scale (1 by default)"
        )


def _rest(values: dict[str, Any], draft: Draft) -> None:
    """Details of what is off were noted by the walk; what is left belongs to what is on."""
    level = values.pop("amp.opt_level", None)
    if level in {"O1", "O2"}:
        draft.note("amp.opt_level", level, "mapped", target=f"amp_configs.level = {level}")
    elif level is not None:
        instead = "O0 is amp.enabled = false" if level == "O0" else "O2 keeps float32 masters"
        draft.problems.append(f"amp.opt_level = {level!r}: levels are O1 and O2; {instead}")
    dtype = values.pop("torch_autocast.dtype", None)
    if dtype is not None:
        draft.note("torch_autocast.dtype", dtype, "mapped", target=f"amp_configs.dtype = {_dtype_of(dtype)}")
    if draft.lookup("amp_configs.level") == "O2":
        draft.changes.append(
            "precision: give distributed_model the float32 model; it makes the low-precision parameters and the "
            "float32 masters. torch's normalisation layers keep float32 parameters"
        )
    checked = draft.said("bf16.check_grad_overflow") is not False
    if draft.lookup("amp_configs.dtype") == "bfloat16" and low_precision(draft) and checked:
        draft.changes.append(
            "overflow: no step is skipped in bfloat16, where DeepSpeed's bf16.check_grad_overflow skips one with "
            "infinite gradients"
        )


def _types(values: dict[str, Any], draft: Draft) -> None:
    dtype, on = draft.lookup("amp_configs.dtype"), bool(draft.lookup("amp"))
    asked = values.pop("data_types.grad_accum_dtype", None)
    if asked is not None:
        ours = _dtype_of(asked)
        if dtype == "float16" and ours == "float16" and low_precision(draft):
            draft.refuse(
                "data_types.grad_accum_dtype",
                asked,
                "gradients kept in float16 cannot be unscaled without losing their small values; use fp32",
            )
        elif dtype == "bfloat16" and ours == "float16":
            draft.refuse(
                "data_types.grad_accum_dtype",
                asked,
                "gradients of bfloat16 leave the range of float16; use fp32 or bf16",
            )
        elif not low_precision(draft) and ours != "float32":
            draft.refuse(
                "data_types.grad_accum_dtype",
                asked,
                "it acts on low-precision parameters, and these are float32; use fp32, or fp16 or bf16",
            )
        else:
            draft.use("data_types.grad_accum_dtype", asked, "sharding_configs.grad_dtype", ours)
    elif low_precision(draft):
        keep = "; sharding_configs.grad_dtype = 'param' does so too, and saves memory" if dtype == "bfloat16" else ""
        draft.changes.append(f"gradients: accumulated and sent in float32, where DeepSpeed's default is {dtype}{keep}")
    asked = values.pop("communication_data_type", None)
    if asked is not None:
        draft.use("communication_data_type", asked, "sharding_configs.reduce_dtype", _dtype_of(asked))
    asked = values.pop("data_types.param_dtype", None)
    if asked is not None:
        have = (dtype if low_precision(draft) else "float32") or "float32"
        if _dtype_of(asked) == have:
            kind: KeyKind = "mapped" if low_precision(draft) else "equal"
            draft.note("data_types.param_dtype", asked, kind, sentence=f"parameters are {have}, as amp_configs says")
        else:
            draft.refuse("data_types.param_dtype", asked, f"parameters are {have}: fp16 or bf16 switches their type")
    asked = values.pop("data_types.buffer_dtype", None)
    if asked is None:
        return
    if on:
        draft.use("data_types.buffer_dtype", asked, "amp_configs.buffer_dtype", _dtype_of(asked))
    elif _dtype_of(asked) == "float32":
        draft.note("data_types.buffer_dtype", asked, "equal", sentence="buffers stay as the model has them")
    else:
        draft.refuse("data_types.buffer_dtype", asked, "buffers are cast under mixed precision only: fp16 or bf16")
