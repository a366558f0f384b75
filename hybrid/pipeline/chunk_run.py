"""One forward of one chunk while it runs: what came in, what its calls returned, and what goes on to the next chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import nn

from hybrid.errors import ModelError
from hybrid.pipeline.absent import Absent
from hybrid.pipeline.boundary import check_tensors, with_own_memory
from hybrid.pipeline.flow import Place
from hybrid.pipeline.outline import Outline, Returned, leaf_of, map_with_paths, outline_of, tensors_by_path
from hybrid.pipeline.ways import Way

__all__ = ["ChunkRun"]

_WAY = "Write the model as a hybrid.PipelineLayer, or set pipeline_configs.degree = 1"


class _Outlines:
    """What the calls before a cut returned, without tensors; nothing walks into it on its way."""

    __slots__ = ("held",)

    def __init__(self, held: tuple[Outline, ...]) -> None:
        self.held = held


@dataclass(slots=True, kw_only=True)
class ChunkRun:
    """See above.

    Args:
        way: that the forward goes.
        chunk, micro_batch: which.
        device: of this rank.
        batch: memories of what the model is called with.
        known: outlines of single tensors, see `outline_of`.
    """

    way: Way
    chunk: int
    micro_batch: int
    device: torch.device
    batch: set[int]
    known: dict[Returned, Returned]
    next_call: int = 0
    is_inside: bool = False
    """Whether a unit runs."""
    _received: dict[Place, torch.Tensor] = field(default_factory=dict)
    _made: dict[Place, torch.Tensor] = field(default_factory=dict)
    _outlines: list[Outline] = field(default_factory=list)

    @property
    def calls(self) -> range:
        return self.way.chunks[self.chunk]

    @property
    def is_last(self) -> bool:
        return self.chunk == len(self.way.chunks) - 1

    def receive(self, value: Mapping[str, Any]) -> None:
        """Take what the chunk before has sent.

        Raises:
            ModelError: the two do not see the same way.
        """
        self._received, self._outlines = dict(value["values"]), list(value["outlines"].held)
        wanted = set(self.way.crossing[self.chunk - 1])
        if set(self._received) != wanted:
            calls = self.way.flow.calls
            strange = {calls[index].unit for index, _ in set(self._received) ^ wanted if index < len(calls)}
            raise ModelError(
                f"the stages of the pipeline do not agree on what crosses into chunk {self.chunk} "
                f"({', '.join(sorted(strange))}): their models or their batches are not the same"
            )

    def begin_call(self, unit: str) -> int:
        """The number of the call that begins.

        Raises:
            ModelError: another unit was to be called.
        """
        index, calls = self.next_call, self.way.flow.calls
        if index >= len(calls) or calls[index].unit != unit:
            self.refuse(f"calls {unit!r}")
        self.next_call += 1
        return index

    def returned_elsewhere(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call of an earlier chunk returned: values that crossed, and for others tensors without values."""
        given = tensors_by_path(args, kwargs) if self.way.passes[index] else {}
        return self._outlines[index].filled(lambda leaf: self._tensor(index, leaf), given.__getitem__)

    def as_received(self, index: int) -> ChunkRun:
        """What a call of an earlier chunk returned, and nothing else that would keep memory."""
        received = {place: tensor for place, tensor in self._received.items() if place[0] == index}
        return replace(self, batch=set(), _received=received, _made={}, _outlines=self._outlines[: index + 1])

    def has_received(self) -> bool:
        """Whether values have crossed to it."""
        return bool(self._received)

    def _tensor(self, index: int, leaf: Returned) -> torch.Tensor:
        place = (index, leaf.path)
        is_written = place in self.way.flow.written
        received = self._received.get(place)
        if received is not None:  # what goes on from here is what came
            return received.clone() if is_written else received
        has_nan = leaf.dtype.is_floating_point or leaf.dtype.is_complex
        value = float("nan") if has_nan else 0
        if is_written:
            empty = torch.full(leaf.shape, value, dtype=leaf.dtype, device=self.device)
        else:
            empty = torch.full((), value, dtype=leaf.dtype, device=self.device).expand(leaf.shape)
        return empty if has_nan else Absent.of(empty, self.way.flow.calls[index].unit)

    def note_output(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Keep of what a unit returned what later chunks need; returns what the code outside gets of it.

        Raises:
            ModelError: it returned other tensors than it did when this way was looked at.
        """
        unit, passes = self.way.flow.calls[index].unit, self.way.passes[index]
        if type(output) is torch.Tensor and not passes and "" in self.way.paths[index]:  # what most units return
            self._outlines.append(Outline(leaf_of("", output, self.known)))
            self._made[index, ""] = output
            return output.clone() if (index, "") in self.way.flow.written else output
        if passes:
            given, returned = tensors_by_path(args, kwargs), tensors_by_path((output,), {})
            for path, came_as in passes.items():
                full = f"0.{path}" if path else "0"
                if full in returned and returned[full] is not given.get(came_as):
                    _refuse_output(unit, f"a new tensor {path!r}, where it returned its argument {came_as!r}")
        outline, made = outline_of(output, passes, self.known)
        strange = made.keys() - self.way.paths[index]
        if strange:
            _refuse_output(unit, f"a tensor {min(strange)!r}, which it did not")
        self._outlines.append(outline)
        self._made |= {(index, path): tensor for path, tensor in made.items()}
        copied = {path: tensor.clone() for path, tensor in made.items() if (index, path) in self.way.flow.written}
        # What crosses is what the unit returned, not what is made of it afterwards.
        return map_with_paths(output, copied.get) if copied else output

    def outgoing(self, model: nn.Module) -> dict[str, Any]:
        """What crosses the cut behind the chunk. `model`: whose memory others may write to.

        Raises:
            ModelError: a value that a unit did not return, or that cannot cross.
        """
        values: dict[Place, torch.Tensor] = {}
        for place in self.way.crossing[self.chunk]:
            unit = self.way.flow.calls[place[0]].unit
            tensor = self._received.get(place, self._made.get(place))
            if tensor is None:
                _refuse_output(unit, f"no tensor {place[1]!r}, which it did")
            check_tensors(tensor, layer=unit)
            values[place] = tensor
        own = {place: tensor for place, tensor in values.items() if place in self._made}
        # Received ones are nobody else's.
        values |= with_own_memory(own, given=self.batch, is_batch=True, model=model)
        return {"values": values, "outlines": _Outlines(tuple(self._outlines))}

    def refuse(self, what: str) -> NoReturn:
        """Raises ModelError: the forward does this, where something else was to come."""
        calls, index = self.way.flow.calls, min(self.next_call, len(self.way.flow.calls))
        wanted = f"calls {calls[index].unit!r}" if index < len(calls) else "ends"
        after = repr(calls[index - 1].unit) if index else "its beginning"
        raise ModelError(
            f"the forward of the model {what} after {after}, and with the same kind of inputs it {wanted} in the run "
            "on tensors without values: it decides by values, sizes or random numbers which of its modules it calls, "
            f"and the stages of a pipeline could not agree. {_WAY}"
        )


def _refuse_output(unit: str, what: str) -> NoReturn:
    raise ModelError(
        f"{unit!r} returns {what} in the run on tensors without values: it decides by values, sizes or random numbers "
        f"what it returns, and the other stages of a pipeline could not know. {_WAY}"
    )
