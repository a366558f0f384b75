"""Links of the groups of a layout's axes on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from hybrid.contracts.cluster import Cluster, GroupLinks
from hybrid.contracts.layout import AXES, Axis, Layout
from hybrid.planner.job import Candidate
from hybrid.planner.kept import Kept

__all__ = ["AxisLinks", "axis_links"]

# Up to this many ranks every group is looked at; beyond, those that have a rank in the first domain of a stage: on a
# cluster of equal nodes the others are like them.
_ALL_RANKS = 256


class AxisLinks:
    """Asks the cluster once for each family of groups."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[tuple[object, ...], GroupLinks | None] = {}
        self._same: dict[GroupLinks, GroupLinks] = {}

    def of(self, candidate: Candidate, axes: tuple[str, ...]) -> GroupLinks | None:
        """Of the groups over these axes; None where they have one rank each."""
        c = candidate
        key = (c.pp, c.dp_replicate, c.dp_shard, c.cp, c.tp, axes)
        if key not in self._known:
            degrees = {name: getattr(candidate, name) for name in AXES}
            self._known[key] = (
                self._ask(_groups(degrees, axes, self._cluster.domain_size))
                if prod(degrees[axis] for axis in axes) > 1
                else None
            )
        return self._known[key]

    def of_experts(self, candidate: Candidate, *, is_data_parallel: bool) -> GroupLinks | None:
        """Of the ranks that share out the experts, or of those that hold the same ones.

        The data-parallel and context-parallel ranks of a stage are cut into `ep` neighbours each.
        """
        total = candidate.dp * candidate.cp
        size = total // candidate.ep if is_data_parallel else candidate.ep
        if size <= 1:
            return None
        key = (candidate.pp, candidate.tp, total, candidate.ep, is_data_parallel)
        if key not in self._known:
            degrees = {"pp": candidate.pp, "dp_replicate": size, "dp_shard": candidate.ep, "tp": candidate.tp}
            if not is_data_parallel:
                degrees |= {"dp_replicate": total // candidate.ep}
            axes = ("dp_replicate",) if is_data_parallel else ("dp_shard",)
            degrees = {name: degrees.get(name, 1) for name in AXES}
            self._known[key] = self._ask(_groups(degrees, axes, self._cluster.domain_size))
        return self._known[key]

    def of_stages(self, candidate: Candidate, one: int, other: int) -> GroupLinks:
        """Of the pairs of ranks with the same place in two stages, all of which communicate together."""
        stage_size = candidate.world_size // candidate.pp
        here, there = one * stage_size, other * stage_size
        key = ("boundary", stage_size, here, there)
        if key not in self._known:
            count = min(stage_size, self._cluster.domain_size)
            self._known[key] = self._ask(tuple((here + i, there + i) for i in range(count)))
        known = self._known[key]
        assert known is not None
        return known

    def _ask(self, groups: Sequence[tuple[int, ...]]) -> GroupLinks:
        """Equal links are one object, so that what is known for it serves every layout that has them."""
        found = self._cluster.links(groups)
        return self._same.setdefault(found, found)


_KNOWN: Kept[AxisLinks] = Kept(32)


def axis_links(cluster: Cluster) -> AxisLinks:
    """The one of this very cluster: jobs on it share what it has answered."""
    return _KNOWN.get(cluster, make=lambda: AxisLinks(cluster))


def _groups(degrees: dict[str, int], axes: tuple[str, ...], domain_size: int) -> tuple[tuple[int, ...], ...]:
    layout = Layout(tuple(Axis(name=name, size=degrees[name]) for name in AXES))
    # A layout is a row-major grid, so that one step on an axis is the same distance everywhere.
    strides = {name: layout.rank_of(**{name: 1}) if degrees[name] > 1 else 0 for name in AXES}
    offsets = [
        sum(place) for place in product(*([i * strides[a] for i in range(degrees[a])] for a in AXES if a in axes))
    ]
    others = [a for a in AXES if a not in axes]
    heads = [sum(place) for place in product(*([i * strides[a] for i in range(degrees[a])] for a in others))]
    if layout.world_size > _ALL_RANKS:
        heads = [head for head in heads if head < domain_size]
    return tuple(tuple(head + offset for offset in offsets) for head in heads)
