"""What every tensor-parallel rank holds whole must have the same gradient on each of them.

Where a parameter acts on what only this rank has (a scale on its own heads, a gate inside an attention, a block left
out on some way) its gradient is a part of the sum, and nothing in a shape tells. The ranks would train different models
under one name. So the gradients that are taken for equal are compared, from time to time: two numbers per parameter.
"""

from __future__ import annotations

import torch

from hybrid.collectives import ops
from hybrid.errors import ModelError
from hybrid.sharding.bucket import Bucket
from hybrid.sharding.engine import ShardingEngine

__all__ = ["check_equal_gradients"]

# Kernels may add in another order on each rank; a part of a sum differs by as much as it is large.
_RELATIVE = 1e-3
_OF_ALL = 1e-6
_MOST_NAMES = 4


def check_equal_gradients(engine: ShardingEngine, *, tp: ops.Group, world: ops.Group) -> None:
    """Compare settled gradients of whole parameters over the tp ranks. *Collective* over the world.

    Raises:
        ModelError: some differ; on every rank, with their names.
    """
    copies = [bucket for bucket in engine.buckets if "tp" in bucket.key.copy_axes and "tp" not in bucket.key.sync_axes]
    mine = {fqn: numbers for bucket in copies for fqn, numbers in _numbers(bucket).items()}
    everyone = ops.all_gather_object(mine, group=tp)
    largest = max((norm for numbers in everyone for norm, _ in numbers.values()), default=0.0)
    here = [
        fqn
        for fqn, (norm, along) in mine.items()
        for other in everyone
        if abs(other[fqn][1] - along) > _RELATIVE * max(norm, other[fqn][0]) + _OF_ALL * largest
    ]
    found = sorted({fqn for names in ops.all_gather_object(here, group=world) for fqn in names})
    if found:
        more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
        raise ModelError(
            f"every tensor-parallel rank holds {', '.join(found[:_MOST_NAMES])}{more} whole, and their gradients "
            "differ: one of these, or something that works on what they give out, acts on what only that rank has "
            "(its heads, its columns, its part of the sequence), or the ranks drew different random numbers. Find it "
            "with tensor_parallel_configs['verify'] = True; say 'partial' in the plan for a parameter that acts on "
            "cut heads, and leave the layers around any other one whole ('replicated')"
        )


def _numbers(bucket: Bucket) -> dict[str, tuple[float, float]]:
    """fqn -> (norm of the own slice's gradient, its length along a fixed random direction)."""
    if bucket.settled is None:
        return {part.fqn: (0.0, 0.0) for part in bucket.slices}
    found = {}
    for part in bucket.slices:
        begin = part.offset_elements - bucket.low
        gradient = bucket.settled[begin : begin + part.num_elements].double()
        places = torch.ones_like(gradient).cumsum_(0)  # 1, 2, 3 ..., where the gradient is
        found[part.fqn] = (gradient.norm().item(), (gradient @ places.mul_(12.9898).sin_()).item())
    return found
