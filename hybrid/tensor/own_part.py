"""Which part of a whole activation a rank holds, told from the two shapes and from how the weights are cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from hybrid.collectives.group import Group
from hybrid.contracts.placement import Cut, even_cut
from hybrid.tensor.cut_module import local_part
from hybrid.tensor.logits import VocabParallelLogits

__all__ = ["Part", "candidates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """How this rank's part is taken from the whole.

    Args:
        cut: along one dim; None: the rank has it whole.
        outer: so many groups lie one behind the other along that dim, and each is cut (samples × heads in one dim).
    """

    cut: Cut | None = None
    outer: int = 1

    @property
    def copies(self) -> int:
        return 1 if self.cut is None else self.cut.copies

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        if self.cut is None:
            return whole
        if self.outer == 1:
            return local_part(whole, self.cut)
        dim = self.cut.dim - 1  # the groups take one dim in front of it
        grouped = whole.unflatten(dim, (self.outer, whole.shape[dim] // self.outer))
        return local_part(grouped, self.cut).flatten(dim, dim + 1)


def candidates(
    whole: torch.Tensor, local: torch.Tensor, *, tensor: torch.Tensor, cuts: Iterable[Cut], group: Group, samples: int
) -> list[Part]:
    """The parts of `whole` that could be `local`; [] if the shapes tell nothing.

    Args:
        whole, local: the plain model's tensor and this rank's.
        tensor: this rank's as it was returned: cut logits know their part.
        cuts: of this rank, of the weights around: what comes from a weight in several parts is cut in these parts.
        group: the tp ranks.
        samples: in the batch.
    """
    if isinstance(tensor, VocabParallelLogits):
        ids = tensor.vocabulary
        return [Part(cut=Cut(dim=ids.dim, global_size=ids.size, pieces=((ids.start, ids.local_size),)))]
    if whole.dim() != local.dim():
        return []
    differing = [dim for dim, (a, b) in enumerate(zip(whole.shape, local.shape, strict=True)) if a != b]
    if not differing:
        return [Part()]
    if len(differing) > 1:
        return []
    dim = differing[0]
    size, held = whole.shape[dim], local.shape[dim]
    found = list(_along(dim, size, held, cuts=cuts, group=group))
    if dim == 0 and samples > 1 and size % samples == 0 and held % samples == 0:
        # Samples and heads in one dim, as attention by batched products has it.
        inner = _along(1, size // samples, held // samples, cuts=cuts, group=group)
        found += [Part(cut=part.cut, outer=samples) for part in inner]
    return found


def _along(dim: int, size: int, held: int, *, cuts: Iterable[Cut], group: Group) -> Iterator[Part]:
    even = even_cut(dim, size, rank=group.rank, degree=group.size)
    seen = set()
    if even.local_size == held:
        seen.add(even.pieces)
        yield Part(cut=even)
    for cut in cuts:
        # The dim may count heads where the weight counts features.
        if cut.global_size % size:
            continue
        unit = cut.global_size // size
        if cut.local_size != held * unit or any(start % unit or length % unit for start, length in cut.pieces):
            continue
        pieces = tuple((start // unit, length // unit) for start, length in cut.pieces)
        if pieces not in seen:
            seen.add(pieces)
            yield Part(cut=Cut(dim=dim, global_size=size, pieces=pieces, copies=cut.copies))
