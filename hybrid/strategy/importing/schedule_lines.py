"""The lines of torch that make the schedule of learning rates which a `scheduler` section describes.

`rate(step)` is what the optimizer's rate is multiplied by at its update number `step`, counted from 0. DeepSpeed's
schedules take their first step after the first update, so an update sees the value of the one before: hence `step - 1`.
"""

from __future__ import annotations

from typing import Any

from hybrid.strategy.importing.draft import Draft
from hybrid.strategy.importing.walk import read_value
from hybrid.strategy.values import closest

__all__ = ["peak_rate", "schedule_lines"]

_DEFAULTS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {
        "total_num_steps": None,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupCosineLR": {
        "total_num_steps": None,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
}
_NOT_TORCH = {
    "OneCycle": "its momentum and decay phases are its own; torch.optim.lr_scheduler.CyclicLR is nearest",
    "LRRangeTest": "write it as torch.optim.lr_scheduler.LambdaLR: the rate grows by a constant each step",
}


def peak_rate(section: dict[str, Any]) -> Any:
    """The learning rate that a schedule gives after its warm-up; None where it leaves the optimizer's own."""
    kind = section.get("type")
    default = _DEFAULTS[kind].get("warmup_max_lr") if kind in _DEFAULTS else None
    return section.get("params.warmup_max_lr", default)


def schedule_lines(section: dict[str, Any], draft: Draft, *, rate: Any) -> None:
    """Notes for the keys of `scheduler`, and the lines.

    Args:
        section: type and params.
        draft: takes them.
        rate: the optimizer's own learning rate, None if nobody says it.
    """
    kind = section.pop("type", None)
    given = {key.removeprefix("params."): value for key, value in section.items()}
    if kind is None:
        draft.problems.append(f"scheduler.params is given, but not scheduler.type; known are {', '.join(_DEFAULTS)}")
        return
    if kind in _NOT_TORCH:
        draft.refuse("scheduler.type", kind, _NOT_TORCH[kind])
        for key, value in given.items():
            draft.note(f"scheduler.params.{key}", value, "script", sentence="an argument of the schedule you write")
        return
    if kind not in _DEFAULTS:
        guess = closest(kind, [*_DEFAULTS, *_NOT_TORCH])
        hint = f"; did you mean {guess!r}?" if guess else f"; known are {', '.join(_DEFAULTS)}"
        draft.problems.append(f"scheduler.type = {kind!r}: no such schedule{hint}")
        return
    values = _read(kind, given, draft)
    if values is None:
        return
    if values.get("warmup_min_lr") and values["warmup_max_lr"] is None:
        if rate is None:
            draft.problems.append(
                "scheduler.params.warmup_max_lr is missing, and so is optimizer.params.lr: how far does the rate rise "
                "from warmup_min_lr? Give one of them"
            )
            return
        values["warmup_max_lr"] = rate
    draft.note("scheduler.type", kind, "script", target="torch.optim.lr_scheduler.LambdaLR")
    for key, value in given.items():
        draft.note(f"scheduler.params.{key}", value, "script", target=f"{key} = {values[key]!r}")
    draft.script += [
        "import math",
        "",
        "def rate(step):  # times the optimizer's lr; step counts updates from 0",
        *(f"    {line}" for line in _body(kind, values)),
        "",
        "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)  # for train_batch(lr_scheduler=scheduler)",
    ]


def _read(kind: str, given: dict[str, Any], draft: Draft) -> dict[str, Any] | None:
    """All values, defaults included; None with a problem."""
    values = dict(_DEFAULTS[kind])
    before = len(draft.problems)
    for key, value in given.items():
        path = f"scheduler.params.{key}"
        if key not in values:
            guess = closest(key, values)
            hint = f"did you mean {guess!r}?" if guess else f"known are {', '.join(values)}"
            draft.problems.append(f"{path}: {kind} has no such argument; {hint}")
            continue
        of = "log|linear" if key == "warmup_type" else "count" if key.endswith("_steps") else "number"
        try:
            values[key] = None if value is None else read_value(of, value)
        except ValueError as error:
            draft.problems.append(f"{path} = {value!r}: {error}")
    is_open = any(problem.startswith("scheduler.params.total_num_steps =") for problem in draft.problems)
    if values.get("total_num_steps", 1) is None and not is_open:
        draft.problems.append(f"scheduler.params.total_num_steps is missing: {kind} needs it")
    return values if len(draft.problems) == before and values.get("total_num_steps", 1) is not None else None


def _body(kind: str, values: dict[str, Any]) -> list[str]:
    warmup = max(2, values["warmup_num_steps"])
    rise = f"math.log(step) / math.log({warmup})" if values["warmup_type"] == "log" else f"(step - 1) / {warmup}"
    total: int = values.get("total_num_steps") or 0
    if kind == "WarmupCosineLR":
        low, end = values["warmup_min_ratio"], values["cos_min_ratio"]
        return [
            "if step == 0:",
            "    return 0.0",
            f"if step <= {warmup}:",
            f"    return {low!r} + {1.0 - low!r} * ({rise})",
            f"done = min(1.0, (step - {warmup}) / {max(1, total - warmup)})",
            f"return {end!r} + {1.0 - end!r} * (1 + math.cos(math.pi * done)) / 2",
        ]
    high, low = values["warmup_max_lr"], values["warmup_min_lr"]
    fall = "1.0" if kind == "WarmupLR" else f"max(0.0, ({total + 1} - step) / {max(1, total - warmup)})"
    lines = [
        f"grown = 0.0 if step == 0 else {rise} if step <= {warmup} else {fall}",
    ]
    if low == 0:
        return [*lines, "return grown"]
    share = low / high
    return [*lines, f"return {share!r} + {1 - share!r} * grown"]
