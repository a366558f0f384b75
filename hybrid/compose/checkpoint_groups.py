"""Param groups from a checkpoint: options by group, whatever the order in which the groups were made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.compose.optimizer import DistributedOptimizer

__all__ = ["apply", "fitting"]


def fitting(
    optimizer: DistributedOptimizer,
    groups: list[dict[str, Any]],
    saved: Mapping[str, Any],
    *,
    strict: bool,
    problems: list[str],
) -> list[dict[str, Any]]:
    """The saved options for each of the optimizer's `groups`, found by the parameters that are in it.

    Not strict: from the group that shares most parameters with it; none, where nothing is shared.

    Adds to `problems` what does not fit: another optimizer; strict, other parameters in a group.
    """
    here = type(optimizer).__name__.removeprefix("Distributed")
    if saved["class"] != here:
        problems.append(f"it was saved with the optimizer {saved['class']}, this one is {here}")
    if not strict:
        return [_most_alike(group, saved["groups"]) for group in groups]
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
        chosen.append(_options(match))
    if len(saved["groups"]) > len(groups):
        problems.append(f"the checkpoint has {len(saved['groups'])} param groups, this optimizer {len(groups)}")
    return chosen


def _most_alike(group: Mapping[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    own = set(group["params"])
    best = max(saved, key=lambda one: len(own.intersection(one["params"])), default=None)
    return {} if best is None or not own.intersection(best["params"]) else _options(best)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def apply(optimizer: DistributedOptimizer, groups: list[dict[str, Any]]) -> None:
    """Give each group its options."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved)
