"""One rank of a job of any size, put together without a launch and without anybody else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hybrid.collectives import ops
from hybrid.collectives.call import Call
from hybrid.collectives.dry import BACKEND
from hybrid.collectives.group import Group
from hybrid.collectives.handle import Pending, forget_calls
from hybrid.collectives.ops import get_interposer, set_interposer, start_directly
from hybrid.compose.context import Scope, entered
from hybrid.compose.train_step import NUM_TOTALS
from hybrid.contracts.layout import Layout, axis_name
from hybrid.mesh import Mesh
from hybrid.strategy import DistributedStrategy, ResolvedStrategy

__all__ = ["DryMesh", "alone"]


class DryMesh(Mesh):
    """The place of a rank in a layout, with groups that nobody else is in: no process group is made.

    Only this rank's own groups are made, so a world of 16,384 ranks takes no longer than one of 4.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.timeout_seconds = 1.0
        self.rank = rank
        self.world_size = layout.world_size
        self.backend = BACKEND
        self.device = torch.device("cpu")
        self._coordinate = layout.coordinate(rank)
        self._groups: dict[frozenset[str], Group] = {}
        self._host_world: Group | None = None
        self._sizes: dict[str, int] = {}
        self.world = self._alone(tuple(range(layout.world_size)), "world")

    def prepare(self, axis_sets: Iterable[Sequence[str]]) -> None:
        order = {name: place for place, name in enumerate(self.layout.axis_names)}
        for axes in axis_sets:
            key = frozenset(axes)
            if key not in self._groups:
                label = "+".join(sorted(key, key=lambda axis: order.get(axis_name(axis), -1)))
                self._groups[key] = self._alone(self.group_ranks(*axes), label)

    def another_group(self, *axes: str, label: str, on_host: bool = False, of_model: object | None = None) -> Group:
        return self._alone(self.group_ranks(*axes), label)

    def end_unused_groups(self) -> None:
        """A dry run makes none."""

    def group_sizes(self) -> dict[str, int]:
        """Label of each group of this rank, as in traces -> its ranks."""
        return dict(self._sizes)

    def _alone(self, ranks: tuple[int, ...], axis: str) -> Group:
        self._sizes[axis] = len(ranks)
        return Group(
            process_group=None,
            ranks=ranks,
            rank=ranks.index(self.rank),
            axis=axis,
            backend=BACKEND,
            timeout_seconds=self.timeout_seconds,
        )


class _OtherStages:
    """What only another stage of a pipeline knows.

    The last stage alone sees a loss, and tells the others how many samples and tokens are behind it. Without them a
    stage would take the batch for an empty one, and skip its update.
    """

    def start(self, call: Call) -> Pending:
        pending = start_directly(call)
        if call.control and call.num_elements == NUM_TOTALS and "pp" in call.group.axis.split("+"):
            return _Totals(call, pending)
        return pending

    def send(self, call: Call, start: object) -> ops.Sending:
        raise AssertionError("nothing is sent in a dry run")

    def before_waiting(self) -> None:
        """Nobody is waited for."""

    def release(self, buffer: torch.Tensor) -> None:
        """Buffers have no values to hide."""


class _Totals:
    def __init__(self, call: Call, pending: Pending) -> None:
        self._call, self._pending = call, pending

    def finish(self) -> None:
        self._pending.finish()
        assert self._call.buffer is not None
        if self._call.buffer[1].item() == 0:
            self._call.buffer[1:4] = 1.0


@contextmanager
def alone(
    strategy: DistributedStrategy, resolved: ResolvedStrategy, rank: int, *, layout: Layout | None = None
) -> Iterator[DryMesh]:
    """Inside, this process is that rank of the job.

    Args:
        strategy, resolved: of the job.
        rank: of the layout.
        layout: another one than the strategy's.
    """
    mesh = DryMesh(layout or resolved.layout, rank)
    before = get_interposer()
    set_interposer(_OtherStages())
    try:
        with entered(Scope(strategy=strategy, resolved=resolved, mesh=mesh, started_group=False)):
            yield mesh
    finally:
        set_interposer(before)
        forget_calls()
