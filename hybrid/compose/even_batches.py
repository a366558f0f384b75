"""Loops over batches that end on all ranks together, though ranks have different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from hybrid.collectives import ops
from hybrid.compose import context
from hybrid.contracts.layout import Layout
from hybrid.data.collate import cut_to_zero
from hybrid.errors import BatchError
from hybrid.mesh import Mesh
from hybrid.precision.tree import map_leaves, map_tensors

__all__ = ["borrowed", "check_same_group", "even_batches", "everyones"]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A tensor on its way to another rank."""

    tensor: torch.Tensor
    on_device: bool


WhenUneven = Literal["error", "stop", "empty"]


def even_batches(loader: Iterable[Any], *, when_uneven: WhenUneven = "error") -> Iterator[Any]:
    """This rank's batches; all ranks leave the loop after the same number of them. *Collective*, at each batch.

    For loaders that do not know how many batches the others have (files of unequal length, an IterableDataset); batches
    of a `DistributedBatchSampler` are equally many by themselves. One number per rank is exchanged before each batch.

    Args:
        loader: yields batches.
        when_uneven: what happens when the first rank has no batch left and others have:
            "error"    BatchError on every rank, with the ranks and how many batches they had
            "stop"     the loop ends; what the others would still have read is left out, as every step needs all ranks
            "empty"    the loop goes on; ranks without a batch get one of zero samples, which `train_batch` and
                       `eval_batch` weigh as nothing (stages 0 to 2, without a pipeline)

    Raises:
        BatchError: see "error"; and always, where ranks that work on the same samples (tensor parallel, pipeline) have
            different numbers of batches.
        HybridError: no job yet.
    """
    if when_uneven not in get_args(WhenUneven):
        listed = ", ".join(map(repr, get_args(WhenUneven)))
        raise BatchError(f"even_batches: when_uneven is {when_uneven!r}; expected one of {listed}")
    return _evenly(loader, when_uneven, context.get_mesh())


def _evenly(loader: Iterable[Any], when_uneven: WhenUneven, mesh: Mesh) -> Iterator[Any]:
    batches, num_batches, empty = iter(loader), 0, None
    while True:
        batch = next(batches, _End)
        has_batch = [value > 0 for value in everyones(float(batch is not _End), mesh)]
        check_same_group(mesh, has_batch, num_batches + (batch is not _End))
        if not any(has_batch):
            return
        if not all(has_batch):
            if when_uneven == "stop":
                return
            if when_uneven == "error":
                _refuse(mesh, has_batch, num_batches)
        is_first = num_batches == 0 and empty is None
        num_batches += batch is not _End
        if batch is not _End:
            empty = cut_to_zero(batch)
        if is_first and not all(has_batch):  # so it is on all ranks: who has none learns what one looks like
            empty = borrowed(empty, mesh)
        yield empty if batch is _End else batch


_End = object()


def everyones(value: float, mesh: Mesh) -> list[float]:
    """A number of every rank of the world, by rank. *Collective.*"""
    values = torch.zeros(mesh.world_size, dtype=torch.float64, device=mesh.device)
    values[mesh.rank] = value
    ops.all_reduce(values, group=mesh.world, control=True).wait()
    listed: list[float] = values.tolist()
    return listed


def borrowed(own: Any, mesh: Mesh) -> Any:
    """This rank's batch or, if that is None, the one of the first rank that has any. *Collective.*"""
    sent = map_tensors(own, lambda tensor: _Sent(tensor.cpu(), tensor.device.type != "cpu"))
    everyone = ops.all_gather_object(sent, group=mesh.world)
    return own if own is not None else _on_device(next(one for one in everyone if one is not None), mesh.device)


def _on_device(batch: Any, device: torch.device) -> Any:
    """Where it was on its own rank: in the host's memory, or on a device."""
    return map_leaves(batch, _Sent, lambda sent: sent.tensor.to(device) if sent.on_device else sent.tensor)


def _refuse(mesh: Mesh, has_batch: Sequence[bool], num_batches: int) -> None:
    without = [rank for rank, has in enumerate(has_batch) if not has]
    others = [rank for rank, has in enumerate(has_batch) if has]
    raise BatchError(
        f"uneven batches: rank {_listed(without)} has {num_batches}, and rank {_listed(others)} has more; give all "
        "ranks as many (hybrid.DistributedBatchSampler does), or say what to do: even_batches(loader, "
        'when_uneven="stop") leaves out the rest, "empty" goes on with batches that count nothing'
    )


def check_same_group(mesh: Mesh, has_batch: Sequence[bool], num_batches: int) -> None:
    """Of ranks that work on the same samples, all have a batch or none. Decided on every rank from the same list.

    Raises:
        BatchError: some have; on every rank of the world.
    """
    for ranks in _same_samples(mesh.layout):
        having = [rank for rank in ranks if has_batch[rank]]
        if having and len(having) < len(ranks):
            without = [rank for rank in ranks if rank not in having]
            raise BatchError(
                f"the ranks {_listed(ranks)} work on the same samples, and rank {_listed(without)} has no batch left "
                f"where rank {_listed(having)} has one (this rank, {mesh.rank}, has had {num_batches}): give all of "
                "them the same batches, by hybrid's samplers or by the data-parallel rank"
            )


def _same_samples(layout: Layout) -> list[tuple[int, ...]]:
    return [tuple(ranks) for ranks in layout.groups(("pp", "cp", "tp"))]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
