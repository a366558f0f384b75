"""A mesh with one axis, for tests of what lies below the strategy."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hybrid.collectives.group import Group
from hybrid.contracts.layout import Layout
from hybrid.mesh import Mesh

__all__ = ["rank_buffer", "shard_group"]


def shard_group(timeout_seconds: float = 30.0) -> Group:
    """The group of all ranks on the axis dp_shard."""
    mesh = Mesh(Layout.of(dp_shard=dist.get_world_size()), timeout_seconds=timeout_seconds)
    mesh.prepare([("dp_shard",)])
    return mesh.group("dp_shard")


def rank_buffer(rank: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """What `rank` brings along: known to every rank, so that each can work out the right result."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_floating_point:
        return torch.randn(num_elements, generator=generator).to(dtype)
    return torch.randint(-50, 50, (num_elements,), generator=generator).to(dtype)
