"""Activations go on to the next chunk's rank, gradients back to the one before.

Each direction has a communicator of its own, so that one never waits behind the other.

    forward    key (chunk, micro-batch)   the value's tree, which tensors want a gradient, the tensors
    backward   key (chunk, micro-batch)   which gradients there are, the gradients
"""

from __future__ import annotations

from typing import Any

import torch

from hybrid.collectives.group import Group
from hybrid.collectives.point_to_point import Stream
from hybrid.pipeline.boundary import Crossing

__all__ = ["Transport"]

# Gradients that a rank may have sent and the one before not yet taken, each a boundary value in memory. With one chunk
# per rank no schedule can stop at that; with more, ranks that wait for their sends may wait for each other
# (`Transport.BLOCKING` of contracts/schedule_check.py), so there a rank never waits.
_WINDOW = 2
_NO_WINDOW = 1 << 30


class Transport:
    """The messages of one rank of a pipeline.

    Args:
        forward, backward: the pipeline's ranks, with a process group each.
        headers: gloo groups of the same ranks, for the two directions.
        num_chunks: of the whole model; chunk c is on the rank with index c modulo the group's size.
        device: of this rank.
    """

    def __init__(
        self,
        forward: Group,
        backward: Group,
        *,
        headers: tuple[Group, Group],
        num_chunks: int,
        device: torch.device,
    ) -> None:
        self._size, self._rank = forward.size, forward.rank
        self._window = _WINDOW if num_chunks == forward.size else _NO_WINDOW
        before, after = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        self._activations_in = Stream(forward, headers=headers[0], peer=before, device=device)
        self._activations_out = Stream(forward, headers=headers[0], peer=after, device=device)
        self._gradients_in = Stream(backward, headers=headers[1], peer=after, device=device)
        self._gradients_out = Stream(backward, headers=headers[1], peer=before, device=device)
        self._step = 0

    def begin(self) -> None:
        """A step begins, on all ranks alike: whatever is left of those before it, left by an exception, is dropped."""
        self._step += 1
        for stream in (self._activations_in, self._activations_out, self._gradients_in, self._gradients_out):
            stream.begin(self._step)

    def send_activation(self, chunk: int, micro_batch: int, crossing: Crossing, tensors: list[torch.Tensor]) -> None:
        """From `chunk` to the next one."""
        self._activations_out.send((chunk + 1, micro_batch), crossing, tensors, window=_NO_WINDOW)

    def receive_activation(self, chunk: int, micro_batch: int) -> tuple[Crossing, list[torch.Tensor]]:
        """What comes into `chunk` from the one before."""
        crossing, tensors = self._activations_in.receive((chunk, micro_batch))
        return crossing, tensors

    def send_gradients(self, chunk: int, micro_batch: int, gradients: list[torch.Tensor | None]) -> None:
        """Of what came into `chunk`, back to the one before."""
        there = tuple(gradient is not None for gradient in gradients)
        sent = [_dense(gradient) for gradient in gradients if gradient is not None]
        self._gradients_out.send((chunk, micro_batch), there, sent, window=self._window)

    def receive_gradients(self, chunk: int, micro_batch: int) -> list[torch.Tensor | None]:
        """Of what went out of `chunk`; None where a tensor was not used."""
        key: Any = (chunk + 1, micro_batch)
        there, tensors = self._gradients_in.receive(key)
        self._activations_out.confirm(key)
        rest = iter(tensors)
        return [next(rest) if is_there else None for is_there in there]

    def finish(self) -> None:
        """The end of a step: everything has been taken."""
        self._activations_out.flush()
        self._gradients_out.flush()


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()
