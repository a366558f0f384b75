"""What a block is called with, made the same on all tp ranks: whole sequences, and a few samples of them."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hybrid.collectives import ops
from hybrid.collectives.group import Group
from hybrid.precision.tree import map_leaves, map_tensors
from hybrid.tensor.even_noise import even_noise
from hybrid.tensor.self_check import MOST_SAMPLES, NotComparable
from hybrid.tensor.sequence import first_activation

__all__ = ["BlockInputs", "activation_of"]

# Longer sequences are shortened: attention without a kernel of its own needs the square of them.
_LONG, _SHORT = 512, 256
# Numbers that are the same on all ranks may have been rounded in different ways.
_ROUNDING = 1e-2
# Of what is added to an activation, in its deviations: a batch may repeat one token.
_NOISE = 0.5


def activation_of(args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor that goes from block to block."""
    found = first_activation(args, kwargs)
    floats = [tensor for tensor in _tensors((args, dict(kwargs))) if tensor.is_floating_point()]
    return found if found is not None or not floats else floats[0]


class BlockInputs:
    """One call of a block on this rank. *Collective* over tp.

    Args:
        args, kwargs: as its first own hook gets them.
        activation: that of them which goes from block to block.
        group: the tp ranks.
        part_dim: dim along which the activation is cut; None: it is whole.
        is_sequence_first: the samples do not lie in dim 0.

    Raises:
        NotComparable: these cannot be taken apart, here or on another rank.
    """

    def __init__(
        self,
        args: Any,
        kwargs: Mapping[str, Any],
        activation: torch.Tensor,
        *,
        group: Group,
        part_dim: int | None,
        is_sequence_first: bool,
    ) -> None:
        self._batch = (args, dict(kwargs))
        self._group = group
        self._part_dim = part_dim
        self._activation = activation
        shape = activation.shape
        self._samples = None if is_sequence_first or len(shape) < 2 or shape[0] <= MOST_SAMPLES else shape[0]
        if len(shape) == 2 and part_dim is not None:
            self._samples = None  # tokens, of which this rank has some
        self._length = self._long_length(shape) if len(shape) > 2 and not is_sequence_first else None
        self._tensors: list[torch.Tensor] = []
        failure: Exception | None = None
        pointed = (False, False)
        try:
            self._tensors = _tensors(self._batch)
            map_tensors(self._batch, lambda tensor: tensor)
            pointed = self._pointed_at()
        except Exception as error:
            failure = error
        everyone = ops.all_gather_object((failure is None, *pointed), group=group)
        if not all(is_fine for is_fine, *_ in everyone):
            if isinstance(failure, NotComparable):
                raise failure
            what = "an error on another rank" if failure is None else f"{type(failure).__name__}: {failure}"
            raise NotComparable(f"is called with what cannot be copied ({what})")
        if any(samples for _, samples, _ in everyone):
            self._samples = None
        if any(length for _, _, length in everyone):
            self._length = None

    def _pointed_at(self) -> tuple[bool, bool]:
        """Whether integers among the arguments (offsets, indices) point to samples or positions that would be cut off.

        Out of bounds, an index is an error on a CPU; on a GPU it may end the process.
        """
        numbers = [
            tensor.long()  # some unsigned types have no maximum
            for tensor in self._tensors
            if tensor.numel()
            and tensor.dtype is not torch.bool
            and not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta)
        ]
        shape = self._activation.shape
        wholes = 1 if self._part_dim is None else self._group.size
        positions = shape[-2] * wholes if len(shape) > 2 else 0
        samples, length, short = self._samples, self._length, self._short
        rows = fewer = math.prod(shape[:-1]) * wholes  # of all samples, one after the other
        if samples is not None:
            fewer = fewer // samples * MOST_SAMPLES
        if length is not None:
            fewer = fewer // length * short
        samples_pointed = length_pointed = False
        for tensor in numbers:
            if length is not None:
                largest = int(self._piece(tensor, small=True).max())
                length_pointed |= short <= largest <= length or fewer <= largest <= rows
            if samples is not None:
                largest = int((tensor[:MOST_SAMPLES] if tensor.dim() and tensor.shape[0] == samples else tensor).max())
                # A number per position, and none too large for one: it counts positions, and no samples.
                is_position = tensor.dim() > 0 and tensor.shape[-1] == positions and largest < positions
                is_pointer = MOST_SAMPLES <= largest <= samples or fewer <= largest <= rows
                samples_pointed |= is_pointer and not is_position
        return samples_pointed, length_pointed

    @property
    def _short(self) -> int:
        return max(1, _SHORT // self._group.size) * self._group.size

    def _long_length(self, shape: torch.Size) -> int | None:
        """Of whole sequences, if they can be shortened: no other size may be the same number."""
        length = shape[-2] * (1 if self._part_dim is None else self._group.size)
        is_told_apart = length not in (*shape[:-2], shape[-1]) and shape[-2] not in (*shape[:-2], shape[-1])
        return length if length > _LONG and is_told_apart else None

    @property
    def can_shrink(self) -> bool:
        return self._samples is not None or self._length is not None

    def whole(self, *, small: bool) -> tuple[Any, dict[str, Any], frozenset[int]]:
        """The same on all ranks, and the places of floating point tensors that want a gradient. *Collective* over tp.

        Raises:
            NotComparable: ranks are called with different things; on every rank.
        """
        # Copies: memory that somebody else has seen cannot be freed, as that of a gathered parameter must be.
        own = [self._piece(tensor.detach(), small).to("cpu", copy=True) for tensor in self._tensors]
        everyone = ops.all_gather_object(own, group=self._group)
        if any(len(theirs) != len(own) for theirs in everyone):
            raise NotComparable("is called with other arguments on other ranks")
        merged = {
            id(tensor): self._merged(tensor, list(pieces))
            for tensor, *pieces in zip(self._tensors, *everyone, strict=True)
        }
        floats = [tensor for tensor in self._tensors if tensor.is_floating_point()]
        wanting = frozenset(place for place, tensor in enumerate(floats) if tensor.requires_grad)
        args, kwargs = map_tensors(self._batch, lambda tensor: merged[id(tensor)])
        return args, kwargs, wanting

    def _piece(self, tensor: torch.Tensor, small: bool) -> torch.Tensor:
        if not small:
            return tensor
        if self._samples is not None and tensor.dim() > 0 and tensor.shape[0] == self._samples:
            tensor = tensor[:MOST_SAMPLES]
        if self._length is not None:
            degree = self._group.size
            short = self._short
            for dim, size in enumerate(tensor.shape):
                if size == self._length:
                    tensor = tensor.narrow(dim, 0, short)
                elif self._part_dim is not None and size == self._length // degree:
                    tensor = tensor.narrow(dim, 0, short // degree)
        return tensor

    def _merged(self, tensor: torch.Tensor, pieces: list[torch.Tensor]) -> torch.Tensor:
        first = pieces[0]
        if any(piece.shape != first.shape or piece.dtype != first.dtype for piece in pieces):
            raise NotComparable("is called with tensors of other shapes on other ranks")
        is_alike = all(_is_alike(first, piece) for piece in pieces[1:])
        if self._part_dim is not None and (
            tensor is self._activation or (tensor.shape == self._activation.shape and not is_alike)
        ):
            first = torch.cat(pieces, dim=self._part_dim)
        elif not is_alike:
            raise NotComparable(
                f"is called with a tensor of shape {tuple(tensor.shape)} that differs between the ranks"
            )
        if tensor is self._activation and first.is_floating_point():
            first = _disturbed(first)
        return first.to(tensor.device)


def _disturbed(activation: torch.Tensor) -> torch.Tensor:
    noise = even_noise(activation.shape, name="activation", device=activation.device)
    values = activation.double()
    deviation = float(values.std()) if values.numel() > 1 else 0.0
    if not 0.0 < deviation < float("inf"):
        return noise.to(activation.dtype)
    return (values + _NOISE * deviation * noise).to(activation.dtype)


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    mine, theirs = one.double(), other.double()
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    largest = torch.where(torch.isfinite(mine), mine.abs(), 0.0).max() if mine.numel() else torch.zeros(())
    return bool((same | ((mine - theirs).abs() <= _ROUNDING * largest)).all())


def _tensors(batch: Any) -> list[torch.Tensor]:
    """Each once.

    Raises:
        NotComparable: modules among them, or methods of some: their values may be elsewhere at the moment.
    """
    found: dict[int, torch.Tensor] = {}

    def refuse(value: Any) -> Any:
        if isinstance(getattr(value, "__self__", value), nn.Module):
            raise NotComparable("is called with a module")
        return value

    map_leaves(batch, nn.Module, refuse)
    map_leaves(batch, types.MethodType, refuse)
    map_tensors(batch, lambda tensor: found.setdefault(id(tensor), tensor))
    return list(found.values())
