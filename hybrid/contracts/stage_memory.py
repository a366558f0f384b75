"""Bytes that each stage of a pipeline needs, for any split of its layers.

    always      parameters, masters and optimizer state of its layers, each parameter once
    gradients   as the ZeRO stage keeps them while backward runs
    kept        what one forward saves for backward, times the micro-batches that the schedule has in flight; of a split
                backward also what its second half needs
    working     what a backward adds for the time of one layer: gradients of activations, activations computed again,
                parameters gathered

A stage's figure is the fullest moment of a step: that of a backward, or of the optimizer's step. Counted are tensors;
what an allocator keeps beside them, and the process itself, is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import mul

from hybrid.contracts.schedule import ActionKind, Schedule

__all__ = ["ChunkBytes", "HeldParameter", "LayerBytes", "MemoryModel", "StageBytes", "StateRule", "moments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """One parameter on one rank of its tp group.

    Args:
        elements: of it there.
        parameter_bytes: of an element of what computes.
        gradient_bytes, master_bytes, state_bytes: of an element of its gradient, fp32 master and optimizer state; 0
            where there is none.
    """

    elements: int
    parameter_bytes: int
    gradient_bytes: int = 0
    master_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """What one layer, or one call of a unit, asks for.

    Args:
        parameters: by first name; a tied one stands in every layer that holds it.
        buffers: bytes by first name; one that several layers hold stands in each of them.
        kept: for backward, of one micro-batch: which memory -> its bytes. Layers of one chunk share what is the same.
        put_off: of it, and of gradients, what the second half of a split backward needs.
        recomputed: what backward computes again for the time of this layer.
        working: gradients of activations and of a weight, at the fullest moment of its backward.
    """

    parameters: Mapping[str, HeldParameter] = field(default_factory=dict)
    buffers: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[int, int] = field(default_factory=dict)
    put_off: Mapping[int, int] = field(default_factory=dict)
    recomputed: int = 0
    working: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRule:
    """How ZeRO keeps the state of parameters on one rank.

    Args:
        zero_stage: 0 to 3.
        num_shards: ranks that share the state.
        bucket_bytes: of gradients that are reduced together; two of them are there at a time.
        reduces_each: whether each micro-batch's gradients are reduced at once (stages 2 and 3).
        state_on_host, parameters_on_host: what is offloaded.
        keeps_gathered: stage 3: gathered layers stay whole for a run of micro-batches.
        step_bytes: temporaries of the optimizer's step, per element that is updated here.
    """

    zero_stage: int = 0
    num_shards: int = 1
    bucket_bytes: int = 25 * 2**20
    reduces_each: bool = False
    state_on_host: bool = False
    parameters_on_host: bool = False
    keeps_gathered: bool = False
    step_bytes: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBytes:
    """Of a run of layers: bytes of one micro-batch, and its parameters.

    Args:
        state: of the parameters that no other layer of the model holds.
        tied: the others.
        buffers: as for parameters, bytes of those that no other layer holds.
        tied_buffers: the others.
        kept, put_off, working: as `LayerBytes` has them.
        largest_layers: parameters of the two neighbouring layers that have most, as they compute.
    """

    state: _State
    tied: Mapping[str, HeldParameter]
    buffers: int
    tied_buffers: Mapping[str, int]
    kept: int
    put_off: int
    working: int
    largest_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """One stage at its fullest moment.

    Args:
        state: parameters, masters, optimizer state, buffers.
        gradients: of parameters, at that moment.
        activations: kept for backward.
        working: what is there while one layer computes, or the optimizer steps.
        is_step: whether that moment is the optimizer's step.
    """

    stage: int
    state: int
    gradients: int
    activations: int
    working: int
    is_step: bool = False

    @property
    def total(self) -> int:
        return self.state + self.gradients + self.activations + self.working


def moments(schedule: Schedule, stage: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batches that a stage keeps, at the moments that no other one exceeds in every place.

    Of each: for every chunk of the stage, in the order of the model, those that wait for backward; then as many numbers
    again, those between the halves of a split backward.
    """
    place = {chunk: index for index, chunk in enumerate(schedule.chunks_of(stage))}
    size = len(place)
    now = [0] * (2 * size)
    seen: set[tuple[int, ...]] = set()
    for action in schedule.actions[stage]:
        at = place[action.chunk]
        if action.kind is ActionKind.F:
            now[at] += 1
        elif action.kind is ActionKind.W:
            now[size + at] -= 1
            continue
        else:
            seen.add(tuple(now))
            now[at] -= 1
            if action.kind is ActionKind.I:
                now[size + at] += 1
        seen.add(tuple(now))
    most: list[tuple[int, ...]] = []
    for one in sorted(seen, key=lambda counts: (-sum(counts), counts)):
        if not any(all(a >= b for a, b in zip(other, one, strict=True)) for other in most):
            most.append(one)
    return tuple(most)


class MemoryModel:
    """Answers for one model, strategy and schedule.

    Args:
        layers: in the order of the model.
        rule: how state is kept.
        schedule: the list of actions that runs.
    """

    def __init__(self, layers: Sequence[LayerBytes], rule: StateRule, schedule: Schedule) -> None:
        self.layers = tuple(layers)
        self.rule = rule
        self.schedule = schedule
        self._moments = [moments(schedule, stage) for stage in range(schedule.num_stages)]
        self._growing: dict[int, _Growing] = {}

    def of_stages(self, chunks: Sequence[range]) -> tuple[StageBytes, ...]:
        """Of each stage under a split."""
        return tuple(
            self.of_stage(stage, [chunks[chunk] for chunk in self.schedule.chunks_of(stage)])
            for stage in range(self.schedule.num_stages)
        )

    def of_stage(self, stage: int, held: Sequence[range]) -> StageBytes:
        """Of a stage with these of its chunks, the first so many of them."""
        chunks = [self.chunk(layers.start, layers.stop) for layers in held]
        missing = [0] * (len(self.schedule.chunks_of(stage)) - len(chunks))
        sizes = [*(chunk.kept for chunk in chunks), *missing, *(chunk.put_off for chunk in chunks)]
        activations = max(sum(map(mul, sizes, counts)) for counts in self._moments[stage])
        tied = {name: one for chunk in chunks for name, one in chunk.tied.items()}
        state = sum(
            (chunk.state for chunk in chunks), start=_State.of(tied.values(), self._shards) if tied else _State()
        )
        rule, gathered = self.rule, 0
        if rule.zero_stage == 3 and rule.num_shards > 1:
            gathered = state.whole if rule.keeps_gathered else max(chunk.largest_layers for chunk in chunks)
        always = state.own if rule.zero_stage == 3 else state.whole
        always = (0 if rule.parameters_on_host else always) + (0 if rule.state_on_host else state.masters)
        always += sum(chunk.buffers for chunk in chunks)
        always += sum({name: size for chunk in chunks for name, size in chunk.tied_buffers.items()}.values())
        backward = StageBytes(
            stage=stage,
            state=always,
            gradients=self._gradients(state),
            activations=activations,
            working=max(chunk.working for chunk in chunks) + gathered,
        )
        if rule.state_on_host:
            return backward
        step = StageBytes(
            stage=stage,
            state=always,
            gradients=state.own_gradients if rule.zero_stage else state.gradients,
            activations=0,
            working=state.updated * rule.step_bytes,
            is_step=True,
        )
        return max(backward, step, key=lambda one: one.total)

    def _gradients(self, state: _State) -> int:
        """While backward runs."""
        rule = self.rule
        if rule.zero_stage < 2 or not rule.reduces_each:
            return state.gradients
        whole = min(state.gradients, 2 * max(rule.bucket_bytes, state.largest))
        return whole + state.own_gradients * (self._shards > 1)

    def chunk(self, start: int, stop: int) -> ChunkBytes:
        """Of the layers from `start` up to `stop`."""
        if stop not in self._growing:
            self._growing[stop] = _Growing(self, stop)
        return self._growing[stop].from_layer(start)

    @property
    def _shards(self) -> int:
        return self.rule.num_shards if self.rule.zero_stage else 1

    @cached_property
    def own_bytes(self) -> tuple[int, ...]:
        """Of each layer its parameters, as they compute."""
        return tuple(
            sum(one.elements * one.parameter_bytes for one in layer.parameters.values()) for layer in self.layers
        )

    @cached_property
    def states(self) -> tuple[_State, ...]:
        """Of each layer the state of the parameters that no other one holds."""
        return tuple(
            _State.of((one for name, one in layer.parameters.items() if name not in self.tied), self._shards)
            for layer in self.layers
        )

    @cached_property
    def tied(self) -> frozenset[str]:
        """Parameters of several layers."""
        return _several(layer.parameters for layer in self.layers)

    @cached_property
    def tied_buffers(self) -> frozenset[str]:
        """Buffers of several layers."""
        return _several(layer.buffers for layer in self.layers)


def _several(held: Iterable[Iterable[str]]) -> frozenset[str]:
    """Names that stand in several of these."""
    holders = Counter(name for names in held for name in names)
    return frozenset(name for name, number in holders.items() if number > 1)


class _Growing:
    """Chunks that end at one layer, each with a layer more at its front."""

    def __init__(self, model: MemoryModel, stop: int) -> None:
        self._model, self._stop = model, stop
        self._found: list[ChunkBytes] = []
        self._kept: set[int] = set()
        self._put_off: set[int] = set()
        self._freed = 0  # while a layer's backward runs, what only the layers behind it have kept is gone

    def from_layer(self, start: int) -> ChunkBytes:
        while self._stop - len(self._found) > start:
            self._grow(self._stop - len(self._found) - 1)
        return self._found[self._stop - start - 1]

    def _grow(self, index: int) -> None:
        model, layer = self._model, self._model.layers[index]
        last = self._found[-1] if self._found else None
        kept = sum(size for memory, size in layer.kept.items() if memory not in self._kept)
        put_off = sum(size for memory, size in layer.put_off.items() if memory not in self._put_off)
        own = model.own_bytes[index : index + (1 if last is None else 2)]
        tied = {name: one for name, one in layer.parameters.items() if name in model.tied}
        tied_buffers = {name: size for name, size in layer.buffers.items() if name in model.tied_buffers}
        buffers = sum(layer.buffers.values()) - sum(tied_buffers.values())
        working = layer.recomputed + layer.working - self._freed
        self._found.append(
            ChunkBytes(
                state=model.states[index] if last is None else last.state + model.states[index],
                tied=tied if last is None else {**last.tied, **tied} if tied else last.tied,
                buffers=buffers + (0 if last is None else last.buffers),
                tied_buffers=tied_buffers if last is None else {**last.tied_buffers, **tied_buffers},
                kept=kept + (0 if last is None else last.kept),
                put_off=put_off + (0 if last is None else last.put_off),
                working=max(working, 0 if last is None else last.working),
                largest_layers=max(sum(own), 0 if last is None else last.largest_layers),
            )
        )
        self._kept |= layer.kept.keys()
        self._put_off |= layer.put_off.keys()
        self._freed += kept


@dataclass(frozen=True, slots=True)
class _State:
    """Of parameters: bytes whole and of the own shard; `largest`: of the gradients the largest one."""

    whole: int = 0
    own: int = 0
    gradients: int = 0
    own_gradients: int = 0
    masters: int = 0
    updated: int = 0
    largest: int = 0

    @classmethod
    def of(cls, parameters: Iterable[HeldParameter], shards: int) -> _State:
        return sum((cls._of_one(one, -(-one.elements // shards)) for one in parameters), start=cls())

    @classmethod
    def _of_one(cls, one: HeldParameter, part: int) -> _State:
        return cls(
            whole=one.elements * one.parameter_bytes,
            own=part * one.parameter_bytes,
            gradients=one.elements * one.gradient_bytes,
            own_gradients=part * one.gradient_bytes,
            masters=part * (one.master_bytes + one.state_bytes),
            updated=part * (one.gradient_bytes > 0),
            largest=one.elements * one.gradient_bytes,
        )

    def __add__(self, other: _State) -> _State:
        return _State(
            self.whole + other.whole,
            self.own + other.own,
            self.gradients + other.gradients,
            self.own_gradients + other.own_gradients,
            self.masters + other.masters,
            self.updated + other.updated,
            max(self.largest, other.largest),
        )
