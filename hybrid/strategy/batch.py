"""The batch equation: global_batch_size = micro_batch_size × accumulate_steps × data-parallel size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hybrid.strategy.choice import Choice
from hybrid.strategy.degrees import divisors, nearest

__all__ = ["Batch", "solve_batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The three sizes (None where nobody named a batch), or the problems."""

    choices: Mapping[str, Choice]
    problems: tuple[str, ...]


def solve_batch(choices: Mapping[str, Choice], data_parallel_size: int) -> Batch:
    """Solve for what is missing; accumulate_steps is 1 unless it follows from the other two."""
    micro, steps, total = (choices[name] for name in ("micro_batch_size", "accumulate_steps", "global_batch_size"))
    data = data_parallel_size
    solved: dict[str, Choice] = {}
    problem: str | None = None
    if total.value is None:
        if steps.value is None:
            steps = solved["accumulate_steps"] = replace(steps, value=1)
        if micro.value is not None:
            solved["global_batch_size"] = replace(
                total,
                value=micro.value * steps.value * data,
                origin="derived",
                why=f"micro_batch_size {micro.value} × accumulate_steps {steps.value} × data-parallel size {data}",
            )
    elif micro.value is not None and steps.value is not None:
        problem = _check(micro, steps, total, data)
    elif micro.value is not None:
        problem = _open(total, micro, data)
        if problem is None:
            solved["accumulate_steps"] = replace(
                steps,
                value=total.value // (micro.value * data),
                origin="derived",
                why=f"global_batch_size {total.value} / (micro_batch_size {micro.value} × data-parallel size {data})",
            )
    else:
        if steps.value is None:
            steps = solved["accumulate_steps"] = replace(steps, value=1)
        problem = _open(total, steps, data)
        if problem is None:
            solved["micro_batch_size"] = replace(
                micro,
                value=total.value // (steps.value * data),
                origin="derived",
                why=f"global_batch_size {total.value} / (accumulate_steps {steps.value} × data-parallel size {data})",
            )
    return Batch(choices=solved, problems=() if problem is None else (problem,))


def _check(micro: Choice, steps: Choice, total: Choice, data: int) -> str | None:
    product = micro.value * steps.value * data
    if product == total.value:
        return None
    fixes = []
    if total.value % (micro.value * data) == 0:
        fixes.append(f"{steps.where} = {total.value // (micro.value * data)}")
    if total.value % (steps.value * data) == 0:
        fixes.append(f"{micro.where} = {total.value // (steps.value * data)}")
    fixes.append(f"{total.where} = {product}")
    return (
        f"{total.where} = {total.value}, but {micro.where} {micro.value} × {steps.where} {steps.value} × "
        f"data-parallel size {data} = {product}; works: {'; or '.join(fixes)}"
    )


def _open(total: Choice, fixed: Choice, data: int) -> str | None:
    """Whether the global batch is a multiple of what is fixed; else the nearest values that are."""
    unit = data * fixed.value
    if total.value % unit == 0:
        return None
    multiples = sorted({max(1, total.value // unit) * unit, (total.value // unit + 1) * unit})
    fixes = [f"{total.where} = {nearest(total.value, multiples)}"]
    if fixed.given and total.value % data == 0:
        fixes.append(f"{fixed.where} = {nearest(fixed.value, divisors(total.value // data))}")
    return (
        f"{total.where} = {total.value} is not a multiple of {fixed.where} {fixed.value} × data-parallel size {data} = "
        f"{unit}; works: {'; or '.join(fixes)}"
    )
