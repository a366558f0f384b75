"""Activations go on to the next chunk's rank, gradients back to the one before.

Each direction has a communicator of its own, so that one never waits behind the other.

    forward    key (chunk, micro-batch)   the value's tree, which tensors want a gradient, the tensors
    backward   key (chunk, micro-batch)   which gradients there are, the gradients

Between two chunks of one rank nothing is sent. What is handed over there is what would have arrived: a copy, so that
neither chunk sees what the other writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from hybrid.collectives.group import Group
from hybrid.collectives.point_to_point import AnyStream, as_sent, open_stream
from hybrid.pipeline.boundary import Crossing

__all__ = ["Lane", "Transport"]

# Gradients that a rank may have sent and the one before not yet taken, each a boundary value in memory. With one chunk
# per rank no schedule can stop at that; with more, ranks that wait for their sends may wait for each other
# (`Transport.BLOCKING` of contracts/schedule_check.py), so there a rank never waits.
_WINDOW = 2
_NO_WINDOW = 1 << 30

_Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The process groups that messages go over, both of the pipeline's ranks.

    Args:
        data: for the tensors.
        headers: a gloo group, for what comes before them.
    """

    data: Group
    headers: Group


class Transport:
    """The messages of one rank of a pipeline.

    Args:
        forward, backward: lanes of activations and of gradients, each (to higher ranks, to lower ranks).
        ranks: of each chunk of the model, the rank in the pipeline.
        device: of this rank.
    """

    def __init__(
        self, forward: tuple[Lane, Lane], backward: tuple[Lane, Lane], *, ranks: Sequence[int], device: torch.device
    ) -> None:
        self._ranks, self._rank = tuple(ranks), forward[0].data.rank
        self._window = _WINDOW if len(ranks) == forward[0].data.size else _NO_WINDOW
        # By the rank at the other end.
        self._activations_in: dict[int, AnyStream] = {}
        self._activations_out: dict[int, AnyStream] = {}
        self._gradients_in: dict[int, AnyStream] = {}
        self._gradients_out: dict[int, AnyStream] = {}

        def stream(lanes: tuple[Lane, Lane], source: int, target: int) -> AnyStream:
            lane, peer = lanes[target < source], source if target == self._rank else target
            return open_stream(lane.data, headers=lane.headers, peer=peer, device=device)

        for before, after in sorted({(a, b) for a, b in pairwise(ranks) if a != b and self._rank in (a, b)}):
            if before == self._rank:
                self._activations_out[after] = stream(forward, before, after)
                self._gradients_in[after] = stream(backward, after, before)
            else:
                self._activations_in[before] = stream(forward, before, after)
                self._gradients_out[before] = stream(backward, after, before)
        self._out = (*self._activations_out.values(), *self._gradients_out.values())
        self._in = (*self._activations_in.values(), *self._gradients_in.values())
        self._handed_on: dict[_Key, tuple[Crossing, list[torch.Tensor]]] = {}
        self._handed_back: dict[_Key, list[torch.Tensor | None]] = {}
        self._step = 0

    def begin(self) -> None:
        """A step begins, on all ranks alike: whatever is left of those before it, left by an exception, is dropped."""
        self._step += 1
        self._handed_on.clear()
        self._handed_back.clear()
        for stream in (*self._out, *self._in):
            stream.begin(self._step)

    def send_activation(self, chunk: int, micro_batch: int, crossing: Crossing, tensors: list[torch.Tensor]) -> None:
        """From `chunk` to the next one."""
        key, peer = (chunk + 1, micro_batch), self._ranks[chunk + 1]
        if peer == self._rank:
            crossing = as_sent(crossing, to="another chunk of the pipeline")
            self._handed_on[key] = (crossing, [tensor.detach().clone() for tensor in tensors])
        else:
            self._activations_out[peer].send(key, crossing, tensors, window=_NO_WINDOW)

    def receive_activation(self, chunk: int, micro_batch: int) -> tuple[Crossing, list[torch.Tensor]]:
        """What comes into `chunk` from the one before."""
        peer = self._ranks[chunk - 1]
        if peer == self._rank:
            return self._handed_on.pop((chunk, micro_batch))
        crossing, tensors = self._activations_in[peer].receive((chunk, micro_batch))
        return crossing, tensors

    def send_gradients(self, chunk: int, micro_batch: int, gradients: list[torch.Tensor | None]) -> None:
        """Of what came into `chunk`, back to the one before."""
        dense = [None if gradient is None else _dense(gradient) for gradient in gradients]
        peer = self._ranks[chunk - 1]
        if peer == self._rank:
            self._handed_back[chunk, micro_batch] = dense
            return
        there = tuple(gradient is not None for gradient in dense)
        sent = [gradient for gradient in dense if gradient is not None]
        self._gradients_out[peer].send((chunk, micro_batch), there, sent, window=self._window)

    def receive_gradients(self, chunk: int, micro_batch: int) -> list[torch.Tensor | None]:
        """Of what went out of `chunk`; None where a tensor was not used."""
        key, peer = (chunk + 1, micro_batch), self._ranks[chunk + 1]
        if peer == self._rank:
            return self._handed_back.pop(key)
        there, tensors = self._gradients_in[peer].receive(key)
        self._activations_out[peer].confirm(key)
        rest = iter(tensors)
        return [next(rest) if is_there else None for is_there in there]

    def finish(self) -> None:
        """The end of a step: everything has been taken."""
        for stream in self._out:
            stream.flush()


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()
