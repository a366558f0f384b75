"""What ranks send each other: the library's own collectives on groups of every size, near and far, and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hybrid.calibration.clock import Clock
from hybrid.collectives import ops
from hybrid.collectives.point_to_point import Stream
from hybrid.contracts.layout import Layout
from hybrid.contracts.measurements import CollectivePoint
from hybrid.mesh import Mesh

__all__ = ["Family", "GroupWork", "families"]

KINDS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Family:
    """All groups of `size` ranks that are `stride` apart: they talk at once, as those of an axis do."""

    size: int
    stride: int


def families(num_hosts: int, ranks_per_host: int) -> list[Family]:
    """Neighbours of each number that divides a host's ranks; one rank of every host; all ranks of all hosts."""
    found = [Family(size, 1) for size in range(2, ranks_per_host + 1) if ranks_per_host % size == 0]
    if num_hosts > 1:
        if ranks_per_host > 1:
            found.append(Family(num_hosts, ranks_per_host))
        found.append(Family(num_hosts * ranks_per_host, 1))
    return found


class GroupWork:
    """Measures on the groups of one family. All ranks make it alike, one after the other."""

    def __init__(self, clock: Clock, family: Family, *, world_size: int, timeout_seconds: float) -> None:
        self._clock = clock
        outer = world_size // (family.size * family.stride)
        layout = Layout.of(dp_replicate=outer, dp_shard=family.size, tp=family.stride)
        mesh = Mesh(layout, timeout_seconds=timeout_seconds)
        mesh.prepare([("dp_shard",)])
        self._group = mesh.group("dp_shard")
        self._device = mesh.device
        # Headers of messages, which the host reads: as the pipeline has them.
        self._stream: Stream | None = None
        if family.size == 2:
            headers = mesh.another_group("dp_shard", label="headers", on_host=True)
            self._stream = Stream(self._group, headers=headers, peer=1 - self._group.rank, device=self._device)
            self._stream.begin(1)
        self._num_messages = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """Messages need pairs."""
        return KINDS if self._stream is None else (*KINDS, "send")

    def points(self, kind: str, sizes: tuple[int, ...]) -> Iterator[Callable[[], CollectivePoint]]:
        """Of one kind."""
        for size in sizes:
            yield lambda size=size: self._point(kind, size)  # type: ignore[misc]

    def _point(self, kind: str, num_bytes: int) -> CollectivePoint:
        buffer = torch.zeros(max(self._group.size, num_bytes // 4), device=self._device)
        bounds = ops.even_bounds(buffer.numel(), self._group.size)
        group = self._group
        if kind == "send":
            timed, share = self._clock.together(self._round_trip(buffer)), 0.5
        else:
            works: dict[str, Callable[[], object]] = {
                "all_reduce": lambda: ops.all_reduce(buffer, group=group).wait(),
                "all_gather": lambda: ops.all_gather(buffer, bounds=bounds, group=group).wait(),
                "reduce_scatter": lambda: ops.reduce_scatter(buffer, bounds=bounds, group=group).wait(),
            }
            timed, share = self._clock.together(works[kind]), 1.0
        return CollectivePoint(num_bytes=buffer.numel() * 4, seconds=timed.seconds * share, spread=timed.spread)

    def _round_trip(self, buffer: torch.Tensor) -> Callable[[], object]:
        """There and back between the two ranks of each pair."""
        stream = self._stream
        assert stream is not None

        def send() -> None:
            stream.send(self._num_messages, None, [buffer], window=1)

        def work() -> None:
            self._num_messages += 1
            if self._group.rank == 0:
                send()
            stream.receive(self._num_messages)
            if self._group.rank == 1:
                send()
            stream.flush()

        return work
