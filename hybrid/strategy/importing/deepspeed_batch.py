"""DeepSpeed's three batch sizes: two give the third, three must agree."""

from __future__ import annotations

from typing import Any

from hybrid.strategy.importing.draft import Draft
from hybrid.strategy.importing.walk import is_auto, open_auto

__all__ = ["PATHS", "convert"]

_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
PATHS = (_MICRO, _STEPS, _TOTAL)
_SETTINGS = {_MICRO: "micro_batch_size", _STEPS: "accumulate_steps", _TOTAL: "global_batch_size"}
_EXAMPLES = {_MICRO: 4, _STEPS: 1, _TOTAL: 32}


def convert(values: dict[str, Any], draft: Draft) -> None:
    """Whatever of the three is given; 'auto' where the others give it."""
    asked = {path: values.pop(path) for path in PATHS if path in values}
    given = {path: value for path, value in asked.items() if not is_auto(value)}
    for path in [path for path in asked if path not in given]:
        if _follows(path, asked, given):
            draft.note(path, "auto", "mapped", sentence=f"follows from {_others(path, given)} and the ranks")
        else:
            open_auto(draft, path, example=_EXAMPLES[path])
    if _agree(given, draft):
        for path, value in given.items():
            draft.use(path, value, _SETTINGS[path], value)
    if not asked:
        draft.changes.append(
            f"no batch size is given: sizes follow the batches that you give to train_batch; --set {_MICRO}=4 fixes one"
        )
    if given.get(_STEPS, 1) > 1 or {_TOTAL, _MICRO} <= given.keys():
        draft.changes.append(
            "accumulation: train_batch takes a rank's whole batch of a step and cuts it into micro-batches; there is "
            "no engine.backward() to call once for each. In a plain loop put model.no_sync() around all but the last "
            "backward(), divide the loss by their number yourself, and leave accumulate_steps out"
        )
    draft.changes.append(
        "loss: do not divide it; train_batch gives the mean over all samples of all micro-batches and ranks, where "
        "DeepSpeed gives the mean of the micro-batches' means (the same unless they differ in size). A loss that is a "
        "sum over samples needs loss_reduction = 'sum', and one over tokens returns (sum, count)"
    )


def _follows(path: str, asked: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether this open size is decided by the others, once they are all decided themselves."""
    if len(given) >= 2:
        return True
    if path == _TOTAL:
        return _MICRO in asked  # and the number of steps is 1 where nobody says it
    return path == _MICRO and _TOTAL in given


def _others(path: str, given: dict[str, Any]) -> str:
    return ", ".join(other for other in PATHS if other != path and other in given) or "the other sizes"


def _agree(given: dict[str, Any], draft: Draft) -> bool:
    """The equation, with the file's own words; False with a problem."""
    total, micro, steps = given.get(_TOTAL), given.get(_MICRO), given.get(_STEPS)
    if total is None:
        return True
    degrees = {
        "tensor parallel": draft.lookup("tensor_parallel_configs.degree") or 1,
        "stages": draft.lookup("pipeline_configs.degree") or 1,
    }
    cut = degrees["tensor parallel"] * degrees["stages"]
    if draft.world_size is None or draft.world_size % cut:
        data, ranks = 1, "(the ranks are not known: give --world-size)"
    else:
        data = draft.world_size // cut
        words = "".join(f" / {name} {degree}" for name, degree in degrees.items() if degree > 1)
        ranks = f"× data-parallel size {data} (world size {draft.world_size}{words})"
    unit = (micro or 1) * (steps or 1) * data
    parts = [f"{path} {value}" for path, value in ((_MICRO, micro), (_STEPS, steps)) if value is not None]
    open_ranks = data == 1 and ranks.startswith("(")
    complete = len(parts) == 2 and not open_ranks
    if total % unit == 0 and not (complete and total != unit):
        if len(parts) == 2 and open_ranks:
            draft.changes.append(
                f"the three batch sizes mean a data-parallel size of {total} / ({micro} × {steps}) = {total // unit}: "
                f"any other world size is refused"
            )
        return True
    left = " × ".join(parts)
    product = f"{left} {ranks}" if left else ranks.removeprefix("× ")
    fixes = [f"{_TOTAL} = {unit if complete else max(1, round(total / unit)) * unit}"]
    if complete and micro and total % (micro * data) == 0:
        fixes.append(f"{_STEPS} = {total // (micro * data)}")
    if complete and steps and total % (steps * data) == 0:
        fixes.append(f"{_MICRO} = {total // (steps * data)}")
    relation = "but" if complete else "not a multiple of"
    draft.problems.append(f"{_TOTAL} = {total}, {relation} {product} = {unit}; works: {', or '.join(fixes)}")
    return False
