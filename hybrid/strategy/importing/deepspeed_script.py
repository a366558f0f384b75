"""What of a DeepSpeed configuration belongs in the training script: optimizer, schedule, loggers, sampler."""

from __future__ import annotations

from typing import Any

from hybrid.strategy.importing.draft import Draft
from hybrid.strategy.importing.optimizer_lines import optimizer_lines
from hybrid.strategy.importing.schedule_lines import peak_rate, schedule_lines
from hybrid.strategy.importing.walk import read_value

__all__ = ["convert"]


def convert(values: dict[str, Any], draft: Draft) -> None:
    optimizer, schedule = _section(values, "optimizer"), _section(values, "scheduler")
    rate, peak = _number(optimizer.get("params.lr")), _number(peak_rate(schedule))
    if optimizer:
        optimizer_lines(optimizer, draft, peak=peak)
    if schedule:
        if not optimizer and peak is not None:
            draft.changes.append(f"learning rate: the schedule rises to {peak:g}: give your optimizer lr={peak:g}")
        schedule_lines(schedule, draft, rate=rate)
    drop_last = values.pop("dataloader_drop_last", None)
    if drop_last is not None:
        line = f"sampler = hybrid.DistributedBatchSampler(data, batch_size=..., drop_last={drop_last})"
        draft.note("dataloader_drop_last", drop_last, "script", target=line)
        draft.script.append(line)
    _monitors(values, draft)


def _number(value: Any) -> float | None:
    """A rate as a number; what is none is reported where it is read."""
    try:
        return None if value is None else float(read_value("number", value))
    except ValueError:
        return None


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """`optimizer.params.lr` -> `params.lr`."""
    paths = [path for path in values if path.startswith(f"{name}.")]
    return {path.removeprefix(f"{name}."): values.pop(path) for path in paths}


def _logger(name: str, own: dict[str, Any]) -> str:
    """What is called at each step."""
    if name == "tensorboard":
        return f"hybrid.TensorBoardLogger({_folder(own, name=name)!r})"
    if name == "csv_monitor":
        return f"hybrid.CsvLogger({_folder(own, name='csv') + '/steps.csv'!r})"
    log = "run.log({'loss': float(record.loss)})" if name == "wandb" else "run.log_metric('loss', float(record.loss))"
    return f"lambda record: record.rank == 0 and {log}"


def _monitors(values: dict[str, Any], draft: Draft) -> None:
    for name in ("tensorboard", "csv_monitor", "wandb", "comet"):
        own = _section(values, name)
        if not own:
            continue
        if not own.get("enabled"):
            for key, value in own.items():
                draft.note(f"{name}.{key}", value, "equal", sentence="off")
            continue
        begin = {"wandb": "wandb.init", "comet": "comet_ml.start"}.get(name)
        if begin is not None:
            shown = ", ".join(
                f"{_ARGUMENTS.get(key, key)}={value!r}" for key, value in own.items() if key in _BEGIN[name]
            )
            draft.script.append(f"run = {begin}({shown})")
        line = f"model.add_step_callback({_logger(name, own)})"
        draft.script.append(line)
        for key, value in own.items():
            if key == "api_key":  # a secret is not printed
                draft.note(f"{name}.{key}", "...", "script", sentence="give it by the variable COMET_API_KEY")
            else:
                draft.note(f"{name}.{key}", value, "script", target=line if key == "enabled" else "")
    comms = _section(values, "comms_logger")
    if comms.get("enabled"):
        line = "with hybrid.trace() as recording: ...  # then print(recording.table()): every collective, by axis"
        draft.note("comms_logger.enabled", True, "script", target=line)
        draft.script.append(line)
    elif comms:
        draft.note("comms_logger.enabled", False, "equal", sentence="off")


_ARGUMENTS = {"team": "entity"}
_BEGIN = {
    "wandb": ("group", "team", "project"),
    "comet": ("project", "workspace", "experiment_key", "online", "mode"),
}


def _folder(own: dict[str, Any], *, name: str) -> str:
    parts = [str(own.get("output_path") or name).rstrip("/"), str(own.get("job_name") or "")]
    return "/".join(part for part in parts if part)
