"""The same job on a cluster that is a little faster or slower: for the sensitivity of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from hybrid.contracts.cluster import Cluster, GroupLinks
from hybrid.planner.job import Job

__all__ = ["scaled_job"]


@dataclass(frozen=True, kw_only=True)
class _ScaledCluster(Cluster):
    """Every link inside a domain, and every way out of one, so many times as fast."""

    inside: float = 1.0
    across: float = 1.0

    def links(self, groups: Sequence[Sequence[int]]) -> GroupLinks:
        return self._scaled(Cluster.links(self, groups))

    def axis_links(self, *, size: int, stride: int) -> GroupLinks:
        return self._scaled(Cluster.axis_links(self, size=size, stride=stride))

    def _scaled(self, found: GroupLinks) -> GroupLinks:
        return replace(
            found,
            inside_bytes_per_second=found.inside_bytes_per_second * self.inside,
            across_bytes_per_second=found.across_bytes_per_second * self.across,
            nic_bytes_per_second=found.nic_bytes_per_second * self.across,
        )

    def pair(self, a: int, b: int) -> tuple[float, float]:
        bytes_per_second, latency_seconds = Cluster.pair(self, a, b)
        is_inside = self.domain_of[a] == self.domain_of[b]
        return bytes_per_second * (self.inside if is_inside else self.across), latency_seconds


def scaled_job(job: Job, *, flops: float = 1.0, memory: float = 1.0, inside: float = 1.0, across: float = 1.0) -> Job:
    """Devices with so many times the flops and the memory bandwidth, links with so many times the bandwidth."""
    cluster, device = job.cluster, job.cluster.device
    changed = replace(
        device,
        flops={dtype: rate * flops for dtype, rate in device.flops.items()},
        memory_bytes_per_second=device.memory_bytes_per_second * memory,
    )
    values = {item.name: getattr(cluster, item.name) for item in fields(Cluster)}
    return replace(job, cluster=_ScaledCluster(**{**values, "device": changed}, inside=inside, across=across))
