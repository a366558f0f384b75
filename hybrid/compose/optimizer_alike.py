"""That the ranks which train the same parameters give them to optimizers that are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hybrid.collectives import ops
from hybrid.errors import OptimizerError
from hybrid.sharding.engine import ShardingEngine

__all__ = ["check_same_groups", "comparable_options", "shown_rates"]

_COMPARED = (bool, int, float, str, tuple, type(None))


def comparable_options(group: dict[str, Any]) -> dict[str, Any]:
    """What of a group's options can be compared; a rate may be a tensor."""
    values = {
        key: value.tolist() if isinstance(value, torch.Tensor) and not value.is_meta else value
        for key, value in group.items()
    }
    return {key: value for key, value in values.items() if isinstance(value, _COMPARED)}


def shown_rates(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The learning rate of each group, where it is on the host, in digits that another machine's rounding keeps."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    on_host = (rate.item() if isinstance(rate, torch.Tensor) and not rate.is_cuda else rate for rate in rates)
    return tuple(f"{rate:.6g}" if isinstance(rate, int | float) else "" for rate in on_host)


def check_same_groups(
    name: str,
    groups: Sequence[dict[str, Any]],
    engine: ShardingEngine,
    group_of_ranks: ops.Group,
    *,
    state: dict[Any, Any] | None = None,
) -> None:
    """Compare class, groups, options and what state there is. *Collective* over the ranks with the same parameters.

    Args:
        name: of the optimizer's class.
        state: of an optimizer that has trained already; values are not compared, but counts of steps are.

    Raises:
        OptimizerError: a rank has another one; the same on all of them.
    """
    mine = _facts(name, groups, engine, state or {})
    everyone = ops.all_gather_object(mine, group=group_of_ranks)
    first = group_of_ranks.ranks[0]
    for rank, theirs in zip(group_of_ranks.ranks, everyone, strict=True):
        if theirs is everyone[0]:  # of itself, and of all in a dry run, which may be of a million ranks
            continue
        unlike = [what for what in {**everyone[0], **theirs} if everyone[0].get(what) != theirs.get(what)]
        if unlike:
            what = unlike[0]
            raise OptimizerError(
                f"the optimizer is not the same on all ranks: {what} is {everyone[0].get(what, 'not there')} on rank "
                f"{first} and {theirs.get(what, 'not there')} on rank {rank}, and each rank would update its part of "
                "the model by its own: build it alike on every rank, and load a saved state on all of them"
            )


def _facts(
    name: str, groups: Sequence[dict[str, Any]], engine: ShardingEngine, state: dict[Any, Any]
) -> dict[str, str]:
    """What is compared -> what it is here."""
    facts = {"its class": name, "the number of param groups": str(len(groups))}
    for index, group in enumerate(groups):
        facts |= {f"{key!r} of group {index}": repr(v) for key, v in comparable_options(group).items()}
        names = [str(engine.fqn_of.get(id(parameter))) for parameter in group["params"]]
        facts[f"the number of parameters of group {index}"] = str(len(names))
        facts |= {f"parameter {place} of group {index}": repr(fqn) for place, fqn in enumerate(names)}
    for parameter, values in state.items():
        fqn = engine.fqn_of.get(id(parameter)) if isinstance(parameter, torch.Tensor) else None
        if fqn is not None:
            shown = (f"{key} {_shown(value, parameter.shape)}" for key, value in values.items())
            facts[f"the state of {fqn!r}"] = ", ".join(shown)
    return facts


def _shown(value: Any, shape: torch.Size) -> str:
    """`shape`: of the parameter, of which tensor-parallel ranks may hold unequal parts."""
    if isinstance(value, torch.Tensor):
        if value.dim() > 0 and value.shape == shape:
            return "of its parameter's shape"
        return f"of shape {tuple(value.shape)}" if value.dim() > 0 or value.is_meta else f"{value.item():g}"
    return repr(value) if isinstance(value, _COMPARED) else type(value).__name__
