"""Param groups from a checkpoint: options by group, whatever the order in which the groups were made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.compose.optimizer import DistributedOptimizer

__all__ = ["apply", "fitting"]


def fitting(
    optimizer: DistributedOptimizer, groups: list[dict[str, Any]], saved: Mapping[str, Any], *, problems: list[str]
) -> list[dict[str, Any]]:
    """The saved options for each of the optimizer's `groups`, found by the parameters that are in it.

    Adds to `problems` what does not fit: another optimizer, other parameters in a group.
    """
    here = type(optimizer).__name__.removeprefix("Distributed")
    if saved["class"] != here:
        problems.append(f"it was saved with the optimizer {saved['class']}, this one is {here}")
    left = [dict(group) for group in saved["groups"]]
    chosen: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        own = set(group["params"])
        match = next((one for one in left if set(one["params"]) == own), None)
        if match is None and index < len(saved["groups"]):
            there = set(saved["groups"][index]["params"])
            problems.append(
                f"param group {index} has other parameters: only in the checkpoint {sorted(there - own)}, only here "
                f"{sorted(own - there)}"
            )
            continue
        if match is None:
            problems.append(f"param group {index} ({', '.join(sorted(own)) or 'empty'}) is not in the checkpoint")
            continue
        left.remove(match)
        chosen.append({key: value for key, value in match.items() if key != "params"})
    if len(saved["groups"]) > len(groups):
        problems.append(f"the checkpoint has {len(saved['groups'])} param groups, this optimizer {len(groups)}")
    return chosen


def apply(optimizer: DistributedOptimizer, groups: list[dict[str, Any]]) -> None:
    """Give each group its options."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved)
