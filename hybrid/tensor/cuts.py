"""Which parameters of a model are cut over the tp ranks, and how to get from whole values to parts and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hybrid.collectives import ops
from hybrid.collectives.group import Group
from hybrid.contracts.placement import Cut
from hybrid.tensor.cut_module import local_part

__all__ = ["TensorCuts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCuts:
    """The cuts of one model.

    Args:
        group: the tp ranks.
        cuts: fqn (the first name of a tied parameter) -> its cut on each tp rank; what is not in it is whole on each.
        partial: fqns of whole parameters whose gradient is a part of the sum over tp.
    """

    group: Group
    cuts: Mapping[str, tuple[Cut, ...]]
    partial: frozenset[str] = frozenset()

    def own(self, fqn: str) -> Cut | None:
        """This rank's cut of a parameter; None: it is whole."""
        cuts = self.cuts.get(fqn)
        return None if cuts is None else cuts[self.group.rank]

    def global_shape(self, fqn: str, local_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in the user's model of a parameter that has this shape here."""
        cut = self.own(fqn)
        if cut is None:
            return tuple(local_shape)
        return (*local_shape[: cut.dim], cut.global_size, *local_shape[cut.dim + 1 :])

    def largest_parts(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """fqn -> elements of the largest part that a tp rank holds; `parameters` have their local shapes."""
        return {
            fqn: parameters[fqn].numel() // max(1, cuts[self.group.rank].local_size) * max(c.local_size for c in cuts)
            for fqn, cuts in self.cuts.items()
            if fqn in parameters
        }

    def part(self, fqn: str, whole: torch.Tensor) -> torch.Tensor:
        """What this rank holds of whole values."""
        cut = self.own(fqn)
        return whole if cut is None else local_part(whole, cut)

    def whole(self, fqn: str, local: torch.Tensor) -> torch.Tensor:
        """The whole values, from every tp rank's part. *Collective* over tp for a parameter that is cut."""
        cuts = self.cuts.get(fqn)
        if cuts is None:
            return local
        shapes = [(*local.shape[: cut.dim], cut.local_size, *local.shape[cut.dim + 1 :]) for cut in cuts]
        sizes = [math.prod(shape) for shape in shapes]
        bounds = list(itertools.accumulate(sizes, initial=0))
        flat = torch.empty(bounds[-1], dtype=local.dtype, device=local.device)
        own = self.group.rank
        flat[bounds[own] : bounds[own + 1]].copy_(local.detach().reshape(-1))
        ops.all_gather(flat, bounds=bounds, group=self.group).wait()
        result = torch.empty(self.global_shape(fqn, tuple(local.shape)), dtype=local.dtype, device=local.device)
        for cut, shape, start, end in zip(cuts, shapes, bounds, bounds[1:], strict=False):
            place = 0
            part = flat[start:end].view(shape)
            for begin, length in cut.pieces:
                result.narrow(cut.dim, begin, length).copy_(part.narrow(cut.dim, place, length))
                place += length
        return result
