"""What to write instead, where code between cut layers counts on the width of the whole model."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from hybrid.contracts.tensor_claims import general
from hybrid.contracts.tensor_facts import parent_of
from hybrid.contracts.tensor_plan import TensorPlan
from hybrid.errors import HybridError, ModelError
from hybrid.tensor.cut_module import CutModule

__all__ = ["explain_shape_error"]

_LIBRARIES = tuple(str(Path(path).parent) for path in (torch.__file__, str(Path(__file__).parent)))
_VIEWS = ("is invalid for input of size", "shape '[", "can't be rearranged", "Shape mismatch, can't divide")
_SPLITS = ("split_with_sizes", "split_size", "values to unpack")
_NORMS = ("normalized_shape", "running_mean should contain", "num_channels", "number of channels in input")
_OTHERS = (
    "mat1 and mat2 shapes",
    "cannot be multiplied",
    "size of tensor a",
    "Sizes of tensors must match",
    "expanded size of the tensor",
    "Expected size for first two dimensions",
    "inconsistent tensor size",
    "shape mismatch",
    "must match the size",
    "does not broadcast",
)


def explain_shape_error(model: nn.Module, plan: TensorPlan, error: BaseException) -> ModelError | None:
    """The error in words that help, if it is about shapes and came from between cut layers; else None."""
    if isinstance(error, HybridError) or not isinstance(error, RuntimeError | ValueError):
        return None
    text = str(error)
    if not any(words in text for words in (*_VIEWS, *_SPLITS, *_NORMS, *_OTHERS)):
        return None
    names = {id(module): fqn for fqn, module in model.named_modules()}
    frames = list(_frames(error))
    found = [(frame, names[id(frame[1])]) for frame in frames if id(frame[1]) in names]
    # The cut layers' own code is right, and so is torch's: what they were given is not.
    written = [(frame, fqn) for frame, fqn in found if not _is_library(frame[0].f_code)]
    if not found:
        return None
    inner = found[-1][1]
    fqn = written[-1][1] if written else parent_of(inner)
    columns = _columns(plan, fqn)
    if not columns:
        return None
    called = "" if inner == fqn or not inner else f", calling {inner}"
    place, line = _place(frames)
    advice = _advice(text, model.get_submodule(fqn), line, columns)
    return ModelError(
        f"{fqn or 'the model'} ({type(model.get_submodule(fqn)).__name__}){called}: {type(error).__name__}: "
        f"{text.splitlines()[0]}{place}\n  {_cause(fqn, columns, plan)}: {advice}. "
        "(If the plain model does not take this batch either, it is the batch.)"
    )


def _frames(error: BaseException) -> Iterator[tuple[FrameType, Any, int]]:
    """Frame, the object whose method runs in it, line; outermost first."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        first = code.co_varnames[0] if code.co_argcount else "self"  # whatever a method calls it
        yield trace.tb_frame, trace.tb_frame.f_locals.get(first), trace.tb_lineno
        trace = trace.tb_next


def _is_library(code: CodeType) -> bool:
    return code.co_filename.startswith(_LIBRARIES)


def _place(frames: list[tuple[FrameType, Any, int]]) -> tuple[str, str]:
    """Where in the user's code, in words, and that line."""
    own = [(frame, number) for frame, _, number in frames if not _is_library(frame.f_code)]
    if not own:
        return "", ""
    frame, number = own[-1]
    line = linecache.getline(frame.f_code.co_filename, number).strip()
    shown = f": {line}" if line else ""
    return f"\n  at {Path(frame.f_code.co_filename).name}:{number}{shown}", line


def _columns(plan: TensorPlan, fqn: str) -> list[str]:
    """Layers whose cut output this module's code works on: its own, or those beside or around it."""
    cutting = [name for name, rule in plan.rules.items() if rule.style in {"colwise", "attention", "embedding_colwise"}]
    own = [name for name in cutting if parent_of(name) == fqn]
    if own:
        return own
    inside = [name for name in cutting if parent_of(name) and fqn.startswith(f"{parent_of(name)}.")]
    beside = [name for name in cutting if parent_of(fqn) and name.startswith(f"{parent_of(fqn)}.")]
    return inside or beside


def _cause(fqn: str, columns: list[str], plan: TensorPlan) -> str:
    rule = plan.rules[columns[0]]
    more = f" and {len(columns) - 1} more" if len(columns) > 1 else ""
    return (
        f"tensor parallel cuts {columns[0]}{more} over {plan.degree} ranks ({rule.describe()}; {rule.source}), so the "
        f"code after it sees 1/{plan.degree} of the width"
    )


def _advice(text: str, module: nn.Module, line: str, columns: list[str]) -> str:
    numbers = {name for name, value in vars(module).items() if type(value) is int and value > 1}
    named = [name for name in re.findall(r"self\.(\w+)", line) if name in numbers]
    divide = ""
    if named and not isinstance(module, CutModule):
        entry = f"{{{general(columns[0])!r}: {{'style': 'colwise', ..., 'divide': {named}}}}}"
        divide = f", or let each rank have its own number by the plan: {entry}"
    if any(words in text for words in _NORMS):
        return (
            "a norm over cut features would need the whole of them; give the layer before it 'gather_output': True "
            "(and the one after it 'rowwise_split_input'), or leave both out of the plan"
        )
    if any(words in text for words in _SPLITS):
        return f"write x.chunk(3, dim=-1) (the number of parts) instead of a split by a fixed width{divide}"
    return f"write view(B, T, -1, head_dim) instead of a fixed number of heads or a fixed width{divide}"
