"""The line of torch that makes the optimizer which an `optimizer` section describes."""

from __future__ import annotations

from typing import Any

from hybrid.strategy.importing.draft import Draft
from hybrid.strategy.importing.walk import read_value
from hybrid.strategy.values import closest

__all__ = ["optimizer_lines"]

_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
# What torch.optim has under the same name, and takes with the same arguments.
_TORCH = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adamax",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
_NOT_TORCH = {
    "lamb": "torch has no LAMB: give distributed_optimizer one from a library, partition follows from what it is",
    "lion": "torch has no Lion: give distributed_optimizer one from a library, partition follows from what it is",
    "muon": "DeepSpeed's splits parameters between Muon and Adam by a flag on them: torch.optim.Muon for the matrices "
    "and torch.optim.AdamW for the rest, as two optimizers of your own choice",
    "muadam": "give distributed_optimizer mup.MuAdam",
    "muadamw": "give distributed_optimizer mup.MuAdamW",
    "musgd": "give distributed_optimizer mup.MuSGD",
    "onebitadam": "it sends one bit of each gradient, so the numbers change; AdamW with reduce_dtype = 'bfloat16'",
    "zerooneadam": "it sends one bit of each gradient, so the numbers change; AdamW with reduce_dtype = 'bfloat16'",
    "onebitlamb": "it sends one bit of each gradient, so the numbers change; a LAMB of a library",
}
_SWITCHES = {"adam_w_mode", "torch_adam", "bias_correction"}
_PLAIN_NUMBERS = {"lr", "eps", "weight_decay", "momentum", "dampening", "alpha", "rho", "lr_decay"}


def optimizer_lines(section: dict[str, Any], draft: Draft, *, peak: Any) -> None:
    """Notes for the keys of `optimizer`, and the line.

    Args:
        section: type and params.
        draft: takes them.
        peak: the learning rate that the schedule gives after its warm-up, None if it leaves the optimizer's own.
    """
    kind = section.pop("type", None)
    params = {key.removeprefix("params."): value for key, value in section.items()}
    if kind is None:
        if params:
            draft.problems.append("optimizer.params is given, but not optimizer.type; write for example 'AdamW'")
        return
    name = kind.replace("_", "").lower()
    if name in _NOT_TORCH:
        draft.refuse("optimizer.type", kind, _NOT_TORCH[name])
        _all_dropped(params, draft)
        return
    known = {word.lower(): word for word in _TORCH}
    if name in {"adam", "adamw"}:
        torch_name, arguments = _adam(name, params, draft)
    elif name in known:
        torch_name, arguments = known[name], {key: _argument(key, value, draft) for key, value in params.items()}
    else:
        guess = closest(name, [*known, "adam", "adamw"])
        hint = f"; did you mean {guess!r}?" if guess else "; write your own optimizer in the script"
        draft.problems.append(f"optimizer.type = {kind!r}: torch.optim has no such optimizer{hint}")
        return
    if isinstance(peak, int | float) and "lr" in arguments:
        if "lr" in params and arguments["lr"] != peak:
            draft.changes.append(
                f"learning rate: the schedule's warmup_max_lr {peak:g} is the optimizer's lr; DeepSpeed's schedule "
                f"overwrites optimizer.params.lr = {params['lr']}"
            )
        arguments["lr"] = float(peak)
    shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    line = f"torch.optim.{torch_name}(model.parameters(), {shown})".replace(", )", ")")
    draft.note("optimizer.type", kind, "script", target=f"torch.optim.{torch_name}")
    for key, value in params.items():
        if key in arguments or key in {*_SWITCHES, "fp32_optimizer_states"}:
            target = f"{key}={arguments[key]!r}" if key in arguments else ""
            draft.note(f"optimizer.params.{key}", value, "script", target=target)
    draft.script.append(f"optimizer = hybrid.distributed_optimizer({line})")


def _adam(name: str, params: dict[str, Any], draft: Draft) -> tuple[str, dict[str, Any]]:
    """DeepSpeed's Adam decays weights as AdamW does unless it is told otherwise; its default decay is 0."""
    decoupled = name == "adamw" or params.get("adam_w_mode", True) is not False
    arguments: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    for key, value in params.items():
        path = f"optimizer.params.{key}"
        if key == "bias_correction" and value is not True:
            draft.refuse(path, value, "torch's Adam always corrects the bias of its moments")
        elif key in _SWITCHES or (key == "fp32_optimizer_states" and value is True):
            continue
        elif key in _ADAM:
            arguments[key] = _argument(key, value, draft)
        elif key == "max_grad_norm":
            draft.problems.append(f"{path} = {value!r}: it stands in the wrong place; write gradient_clipping")
        else:
            guess = closest(key, _ADAM)
            hint = f"; did you mean {guess!r}?" if guess else f"; known are {', '.join(_ADAM)}"
            draft.refuse(path, value, f"torch.optim.AdamW has no such argument{hint}")
    if name == "adam" and decoupled:
        draft.changes.append(
            "optimizer: DeepSpeed's 'Adam' decays weights as AdamW does (adam_w_mode), so it is torch.optim.AdamW; for "
            "Adam with its decay inside the gradient give adam_w_mode = false"
        )
    if "weight_decay" not in params:
        draft.changes.append(
            "optimizer: weight_decay is 0 there and 0.01 in torch.optim.AdamW by default; 0 is written"
        )
    return "AdamW" if decoupled else "Adam", arguments


def _argument(key: str, value: Any, draft: Draft) -> Any:
    """One argument, numbers out of text."""
    path = f"optimizer.params.{key}"
    try:
        if key == "betas":
            first, second = (read_value("number", item) for item in read_value("list", value))
            return first, second
        if key == "amsgrad":
            return read_value("bool", value)
        return float(read_value("number", value)) if key in _PLAIN_NUMBERS else value
    except ValueError as error:
        draft.problems.append(f"{path} = {value!r}: {error}")
        return None


def _all_dropped(params: dict[str, Any], draft: Draft) -> None:
    for key, value in params.items():
        draft.note(f"optimizer.params.{key}", value, "script", sentence="an argument of the optimizer that you choose")
