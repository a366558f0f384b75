"""Where replicated activations go into column-parallel layers."""

from __future__ import annotations

from typing import Any

import torch

from hybrid import shims
from hybrid.collectives.autograd import copy_to, gather_from
from hybrid.collectives.group import Group

__all__ = ["Entry", "autocast_dtype"]

_VERSION = getattr(torch.Tensor, "_version").__get__  # noqa: B009 (without a public name)

_Key = tuple[int, bool, bool, torch.dtype | None]


class Entry:
    """The input of column-parallel layers: each rank computes a part of what comes of it, so gradients are summed.

                        forward                                backward
        plain           the input                              all-reduce over tp
        sequence_dim    all-gather over tp along that dim      reduce-scatter over tp

    Layers that are called with the same tensor (q, k and v; gate and up) share an entry, and so one collective each
    way: the result is kept until each of them has had it. Under autocast the input is cast here, once for all.
    """

    def __init__(self, group: Group, *, sequence_dim: int | None = None, passes: bool = False) -> None:
        """
        Args:
            group: the tp ranks.
            sequence_dim: dim along which the input is cut (sequence parallel); None: it is whole.
            passes: the input is whole and its gradients are summed already, by the module around the layers.
        """
        self.group = group
        self.sequence_dim = sequence_dim
        self.passes = passes
        self.num_consumers = 0
        """Layers that call it (each counts itself); 0: not known, so results are kept until `clear`."""
        self._kept: list[tuple[torch.Tensor, _Key, torch.Tensor]] = []
        self._num_calls = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.num_consumers == 1 or self.group.size == 1 or torch.compiler.is_compiling() or tensor.is_inference():
            # Neither the tensors of a compiled program nor those of inference tell whether they were written to.
            return self._pass(tensor)
        key = (_VERSION(tensor), torch.is_grad_enabled(), tensor.requires_grad, autocast_dtype(tensor))
        result = next((kept for seen, known, kept in self._kept if seen is tensor and known == key), None)
        self._num_calls += 1
        if result is None:
            result = self._pass(tensor)
            if shims.in_backward() and not self._kept:
                # Recompute may start below the module whose hook clears, and may stop before the last consumer.
                shims.call_at_end_of_backward(self.clear)
            self._kept.append((tensor, key, result))
        if self._num_calls == self.num_consumers:
            self.clear()
        return result

    def clear(self) -> None:
        """Let go of the activations that are kept for consumers to come."""
        self._kept.clear()
        self._num_calls = 0

    def _pass(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = autocast_dtype(tensor)
        if dtype is not None:
            tensor = tensor.to(dtype)
        if self.passes:
            return tensor
        if self.sequence_dim is None:
            return copy_to(tensor, group=self.group)
        return gather_from(tensor, group=self.group, dim=self.sequence_dim, partial=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        copy = Entry(self.group, sequence_dim=self.sequence_dim, passes=self.passes)
        copy.num_consumers = self.num_consumers
        memo[id(self)] = copy
        return copy


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts this input of a matrix product; None: it does not."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)
