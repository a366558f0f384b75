"""Carries out one rank's list of actions.

    F  input from the chunk before (or the batch) ─► forward ─► output on to the next chunk (or the loss)
    B  output's gradient from the next chunk (or the loss itself) ─► backward ─► input's gradient back
       (who waits for that gets it before the products are computed that only weights need: `later_products`)
    I  as B, but what the gradients of weights need is kept
    W  the gradients of weights, from what I has kept (`weight_gradients`)

Between F and B of a micro-batch a rank keeps the graph and the input; of the output only the edges at which its
gradients enter, so that its memory goes as soon as the next rank has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from hybrid.collectives import ops
from hybrid.collectives.ranges import RangeKind, named_range
from hybrid.contracts.schedule import Action, ActionKind
from hybrid.later_products import LaterProducts
from hybrid.pipeline.boundary import put_together, take_apart
from hybrid.pipeline.transport import Transport
from hybrid.weight_gradients import WeightGradients, splitting

__all__ = ["PipelineRunner"]

_Edge = torch.autograd.graph.GradientEdge


@dataclass(slots=True, kw_only=True)
class _InFlight:
    """A micro-batch between its forward and its backward in one chunk."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    """Received tensors; those that want a gradient are leaves, without memory but for their gradient."""
    edges: list[_Edge | None] = field(default_factory=list)
    """Where the gradient of each tensor that was sent enters; None for one without."""
    loss: torch.Tensor | None = None


class PipelineRunner:
    """Runs the actions of one rank.

    Args:
        transport: to the neighbours.
        num_chunks: of the whole model.
        forward: (chunk, micro-batch, value) -> the chunk's output.
    """

    def __init__(self, transport: Transport, *, num_chunks: int, forward: Callable[[int, int, Any], Any]) -> None:
        self._transport = transport
        self._last_chunk = num_chunks - 1
        self._forward = forward
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._left: dict[tuple[int, int], WeightGradients] = {}  # between I and W
        self._sends_early: Callable[[Action], bool] = lambda action: False
        self.peak_in_flight = 0

    def begin(self) -> None:
        """A step begins, on all ranks alike; to be called where all have just met."""
        self._transport.begin()

    def run(
        self,
        actions: Sequence[Action],
        *,
        inputs: Callable[[int], Any],
        loss: Callable[[int, Any], torch.Tensor | None],
        before: Callable[[Action], None],
        before_backward: Callable[[Action], None],
        after_backward: Callable[[Action], None],
        sends_early: Callable[[Action], bool] = lambda action: False,
    ) -> None:
        """One step.

        Args:
            actions: this rank's, in order.
            inputs: micro-batch -> the value that the first chunk gets.
            loss: (micro-batch, output of the last chunk) -> what backward starts from.
            before: called before each action.
            before_backward, after_backward: called around each backward, and each half of one.
            sends_early: whether a whole backward may send its input's gradient before its work is done.
        """
        self._clear()
        self._sends_early = sends_early
        split = {(action.chunk, action.micro_batch) for action in actions if action.kind is ActionKind.I}
        try:
            for action in actions:
                before(action)
                if action.kind is ActionKind.F:
                    is_split = (action.chunk, action.micro_batch) in split
                    with named_range("forward", action, RangeKind.FORWARD), splitting() if is_split else nullcontext():
                        self._run_forward(action, inputs, loss)
                else:
                    with named_range("backward", action, RangeKind.BACKWARD):
                        before_backward(action)
                        self._run_part_of_backward(action)
                        after_backward(action)
            self._transport.finish()
        finally:
            self._clear()

    def _clear(self) -> None:
        self._in_flight.clear()
        self._left.clear()

    def _run_part_of_backward(self, action: Action) -> None:
        place = action.chunk, action.micro_batch
        if action.kind is ActionKind.W:
            self._left.pop(place).accumulate()
        elif action.kind is ActionKind.I:
            self._left[place] = WeightGradients()
            with self._left[place].collecting():
                self._run_backward(action)
        elif action.chunk > 0 and self._sends_early(action):
            later = LaterProducts()
            with later.collecting():
                self._run_backward(action)
            later.run()
        else:
            self._run_backward(action)

    def evaluate(
        self,
        actions: Sequence[Action],
        *,
        inputs: Callable[[int], Any],
        loss: Callable[[int, Any], torch.Tensor | None],
    ) -> None:
        """The forwards of a list alone."""
        for action in actions:
            if action.kind is ActionKind.F:
                self._run_forward(action, inputs, loss)
                self._in_flight.clear()
        self._transport.finish()

    def _run_forward(
        self, action: Action, inputs: Callable[[int], Any], loss: Callable[[int, Any], torch.Tensor | None]
    ) -> None:
        chunk, micro_batch = action.chunk, action.micro_batch
        state = _InFlight()
        if chunk == 0:
            value = inputs(micro_batch)
        else:
            crossing, tensors = self._transport.receive_activation(chunk, micro_batch)
            if torch.is_grad_enabled():
                state.inputs = tensors
                tensors = [
                    _entered(tensor) if wants_gradient else tensor
                    for tensor, wants_gradient in zip(tensors, crossing.wants_gradient, strict=True)
                ]
            value = put_together(crossing, tensors)
        output = self._forward(chunk, micro_batch, value)
        if chunk == self._last_chunk:
            state.loss = loss(micro_batch, output)
        else:
            crossing, tensors = take_apart(output)
            state.edges = [
                torch.autograd.graph.get_gradient_edge(tensor) if wants_gradient else None
                for tensor, wants_gradient in zip(tensors, crossing.wants_gradient, strict=True)
            ]
            self._transport.send_activation(chunk, micro_batch, crossing, tensors)
        self._in_flight[chunk, micro_batch] = state
        self.peak_in_flight = max(self.peak_in_flight, len(self._in_flight) + len(self._left))

    def _run_backward(self, action: Action) -> None:
        chunk, micro_batch = action.chunk, action.micro_batch
        state = self._in_flight.pop((chunk, micro_batch))
        if chunk == self._last_chunk:
            if state.loss is not None and state.loss.requires_grad:
                state.loss.backward()
        else:
            gradients = self._transport.receive_gradients(chunk, micro_batch)
            entries = [
                (edge, gradient)
                for edge, gradient in zip(state.edges, gradients, strict=True)
                if edge is not None and gradient is not None
            ]
            if entries:
                edges, given = zip(*entries, strict=True)
                torch.autograd.backward(list(edges), list(given))
        state.loss = None
        state.edges.clear()
        if chunk > 0:
            self._transport.send_gradients(chunk, micro_batch, [tensor.grad for tensor in state.inputs])


def _entered(leaf: torch.Tensor) -> torch.Tensor:
    """What the chunk gets of a received tensor: no leaf, since its first layer may write in place."""
    copy = leaf.requires_grad_().clone()
    ops.release(leaf)
    leaf.untyped_storage().resize_(0)
    return copy
