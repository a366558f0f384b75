"""What the stages of a pipeline may need: what the strategy says, else what the device or the host has."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from hybrid.compose import context
from hybrid.errors import HybridError
from hybrid.launch.environment import read_environment
from hybrid.strategy import ResolvedStrategy
from hybrid.units import format_bytes

__all__ = ["HostLimit", "Limits", "limits_of"]

_DRY = "dry"
# What the allocator, the communicators and the process itself take of a GPU beside tensors.
_FOR_TENSORS = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimit:
    """Memory that the ranks of a host share."""

    num_bytes: int
    num_ranks: int

    def ranks_of_stages(self, resolved: ResolvedStrategy) -> tuple[tuple[int, ...], ...]:
        """Of each host, how many of its ranks work on each stage."""
        assert resolved.pipeline is not None
        layout = resolved.layout
        hosts: dict[int, Counter[int]] = {}
        for rank in range(layout.world_size):
            hosts.setdefault(rank // self.num_ranks, Counter())[layout.coordinate(rank)["pp"]] += 1
        return tuple(tuple(ranks[stage] for stage in range(resolved.pipeline.degree)) for ranks in hosts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the stages may need.

    Args:
        stage_bytes: of a rank; None where nothing says it.
        host: of the ranks of a host together, where they compute on its CPUs.
        source: of `stage_bytes`, in words.
        has_host_beside: whether the host has memory that is not the ranks' own, as beside GPUs; so it is taken to be
            where no device is known.
    """

    stage_bytes: int | None = None
    host: HostLimit | None = None
    source: str = ""
    has_host_beside: bool = True

    @property
    def num_bytes(self) -> int | None:
        """Of a memory, whoever shares it."""
        return self.stage_bytes if self.host is None else self.host.num_bytes


def limits_of(resolved: ResolvedStrategy, *, is_here: bool) -> Limits:
    """The strategy's own limit, else, for a job that will run here, what this machine has: all should have the same."""
    assert resolved.pipeline is not None
    own = resolved.pipeline.memory_limit_bytes
    is_dry = context.is_initialized() and context.get_mesh().backend == _DRY
    if own is not None:
        return Limits(
            stage_bytes=own,
            source=f"pipeline_configs.memory_limit_bytes = {own} ({format_bytes(own)})",
            has_host_beside=not is_here or is_dry or torch.cuda.is_available(),
        )
    if not is_here or is_dry:
        return Limits()  # nothing will run here
    try:
        environment = read_environment()
    except HybridError:
        return Limits()  # said where the job starts
    if torch.cuda.is_available():
        device = environment.local_rank % max(1, torch.cuda.device_count())
        has = torch.cuda.get_device_properties(device).total_memory
        source = f"the device has {format_bytes(has)}, of which {_FOR_TENSORS:.0%} are counted on"
        return Limits(stage_bytes=int(has * _FOR_TENSORS), source=source)
    host = _host_bytes()
    if host is None or not environment.launched:
        return Limits()
    return Limits(host=HostLimit(num_bytes=host, num_ranks=environment.local_world_size))


def _host_bytes() -> int | None:
    """Memory of this host, or of the container that this runs in."""
    try:
        found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError):
        return None
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found.append(int(Path(name).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return min(found)
