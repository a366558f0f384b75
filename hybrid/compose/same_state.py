"""Whether all ranks would save the same schedule, loss scale, place in the data and `extra`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64, xxh3_128

from hybrid.collectives import ops
from hybrid.compose.runtime import Runtime
from hybrid.errors import CheckpointError

__all__ = ["check_agreement", "state_digests"]

_REMEDIES = {
    "lr_scheduler": "step it alike on all ranks (ReduceLROnPlateau with a loss that all of them have)",
    "scaler": "call scaler.update() on all ranks alike",
    "sampler": "all ranks must have read the same number of batches",
    "extra": "give the same on all ranks: one rank's value broadcast, or all ranks' values gathered in a list",
}


def state_digests(trees: Mapping[str, Any]) -> dict[str, str]:
    """Name -> digest of each tree that `collect` returned; equal for equal trees."""
    return {name: xxh3_128(repr(list(_leaves(tree, name))).encode()).hexdigest() for name, tree in trees.items()}


def check_agreement(runtime: Runtime, trees: Mapping[str, Any], everyone: Sequence[Mapping[str, str]]) -> None:
    """Compare what `collect` returned over all ranks. *Collective* over the world; sends nothing if all agree.

    Args:
        everyone: all ranks' `state_digests`.

    Raises:
        CheckpointError: the ranks were given different things; on all of them, with the first difference of each.
    """
    if all(theirs == everyone[0] for theirs in everyone):
        return
    world = runtime.mesh.world
    problems = []
    for name, remedy in _REMEDIES.items():
        found = [theirs.get(name) for theirs in everyone]
        with_it = [rank for rank, digest in enumerate(found) if digest is not None]
        if 0 < len(with_it) < len(found):
            without = [rank for rank in range(len(found)) if rank not in with_it]
            problems.append(f"{name} was given on ranks {with_it} and not on ranks {without}; give it on all")
        elif len(set(found)) > 1:
            all_leaves = ops.all_gather_object(list(_leaves(trees[name], name)), group=world)
            rank = next(rank for rank, digest in enumerate(found) if digest != found[0])
            problems.append(f"{_first_difference(all_leaves[0], all_leaves[rank], rank)}; {remedy}")
    raise CheckpointError("the ranks do not save the same: " + "; ".join(problems))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """(place, what is there) of all of a tree that `encode` takes, in an order that values decide."""
    if isinstance(value, list | tuple):
        yield path, f"a {type(value).__name__} of {len(value)}"
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, dict | argparse.Namespace):
        items = value if isinstance(value, dict) else vars(value)
        yield path, f"a {type(value).__name__} of {len(items)}"
        for key, item in sorted(items.items(), key=lambda pair: repr(pair[0])):
            yield from _leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, set | frozenset):
        yield path, f"a {type(value).__name__} of {sorted(map(repr, value))}"
    elif isinstance(value, torch.Tensor | np.ndarray):
        tensor = torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value.detach()
        plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() > 0 else b""  # no view of nothing
        checksum = xxh3_64(raw).hexdigest()
        yield path, f"a {type(value).__name__} of {plain.dtype}, shape {tuple(plain.shape)}, checksum {checksum}"
    else:
        yield path, repr(value)


def _first_difference(first: list[tuple[str, str]], other: list[tuple[str, str]], rank: int) -> str:
    for (path, text), (other_path, other_text) in zip_longest(first, other, fillvalue=("", "")):
        if path != other_path:
            return f"rank 0 has {path or 'nothing more'} where rank {rank} has {other_path or 'nothing more'}"
        if text != other_text:
            return f"{path} is {text} on rank 0 and {other_text} on rank {rank}"
    raise AssertionError("two trees with different digests and equal leaves")
