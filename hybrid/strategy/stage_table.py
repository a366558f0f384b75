"""The stages of a pipeline before it starts: what each has, computes and keeps, and how long it idles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from math import fsum
from typing import Any

from hybrid.contracts.chunk_placement import chunk_rank, chunks_on
from hybrid.contracts.schedule import Schedule
from hybrid.contracts.schedule_choice import schedule_name
from hybrid.contracts.schedule_timing import Timeline, closed_form, time_schedule
from hybrid.contracts.stage_memory import StageBytes
from hybrid.errors import StrategyError
from hybrid.strategy.live_model import (
    Crossing,
    LayerFacts,
    Model,
    chain_memory,
    check_stages,
    chunks_of,
    layers_of,
    own_stages,
)
from hybrid.strategy.resolve import WorkedOut, resolved_from
from hybrid.strategy.resolved import PipelineSettings
from hybrid.units import format_bytes, format_count

__all__ = ["ChunkRow", "StageTable", "TiedParameter", "stage_table"]

_MOST_RANKS = 4
_MOST_VALUES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRow:
    """One chunk of neighbouring layers.

    Args:
        stage: its pipeline rank.
        ranks: the ranks of the world on this stage; empty without a world size.
        layers, classes: names and classes of its layers.
        num_parameters: elements, each parameter once.
        forward_flops: of the sample; None if they are not known.
        weight: what it counts when chunks are balanced and timed.
    """

    chunk: int
    stage: int
    ranks: tuple[int, ...]
    layers: tuple[str, ...]
    classes: tuple[str, ...]
    num_parameters: int
    forward_flops: int | None
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """One parameter of several layers: its names, and the stages that hold it."""

    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """A model in a pipeline.

    Args:
        settings: degree, schedule, chunks per stage, split.
        method: how the layers are split: the strategy's `split`, or the model's `seg_method`.
        chunks: in the order of the model.
        num_parameters: elements of the whole model, each parameter once.
        tied: parameters of several layers.
        timeline: the schedule with the costs of the chunks; None while the number of micro-batches is open.
        backward: forwards that a backward takes as long as.
        units: modules that ZeRO treats as one.
        notes: what else there is to say.
        crossing: of a model that is cut by its own forward, the tensors that cross the cut behind each chunk.
        memory: what a rank of each stage needs; empty if it is not known.
    """

    settings: PipelineSettings
    method: str | Sequence[int] | Sequence[str]
    chunks: tuple[ChunkRow, ...]
    num_parameters: int
    tied: tuple[TiedParameter, ...]
    timeline: Timeline | None
    backward: int
    units: tuple[str, ...]
    notes: tuple[str, ...]
    crossing: tuple[tuple[Crossing, ...], ...] = ()
    memory: tuple[StageBytes, ...] = ()

    @property
    def title(self) -> str:
        settings = self.settings
        words = [f"pipeline of {settings.degree} stages"]
        words += [f"{settings.virtual_stages} chunks each"] * (settings.virtual_stages > 1)
        words.append(f"schedule {schedule_name(settings.schedule)}")
        if self.timeline is not None:
            number = self.timeline.schedule.num_micro_batches
            words.append(f"{number} micro-batch{'es' * (number > 1)}")
        method = self.method if isinstance(self.method, str) else ", ".join(map(str, self.method))
        return f"{', '.join(words)}, layers split {method!r}"

    @property
    def header(self) -> tuple[str, ...]:
        names = ["stage", "layers", "classes", "parameters", "share"]
        if self.settings.virtual_stages > 1:
            names.insert(0, "chunk")
        if self.chunks[0].ranks:
            names.insert(names.index("stage") + 1, "ranks")
        names += ["forward flops", "share"] * (self._flops is not None)
        return (*names, *["in flight"] * (self.timeline is not None))

    def lines(self) -> list[tuple[str, ...]]:
        """Under `header`, one for each chunk."""
        return [tuple(self._cells(row)) for row in self.chunks]

    def _cells(self, row: ChunkRow) -> Iterator[str]:
        if self.settings.virtual_stages > 1:
            yield str(row.chunk)
        yield str(row.stage)
        if row.ranks:
            many = len(row.ranks) > _MOST_RANKS
            yield f"{row.ranks[0]}, {row.ranks[1]} … {row.ranks[-1]}" if many else ", ".join(map(str, row.ranks))
        yield ", ".join(row.layers) if len(row.layers) <= 2 else f"{row.layers[0]} … {row.layers[-1]}"
        yield ", ".join(name if number == 1 else f"{number} × {name}" for name, number in _runs(row.classes))
        yield f"{row.num_parameters:,}"
        yield _share(row.num_parameters, self.num_parameters)
        if self._flops is not None:
            yield format_count(row.forward_flops or 0)
            yield _share(row.forward_flops or 0, self._flops)
        if self.timeline is not None:
            yield str(self.timeline.max_in_flight_per_chunk[row.chunk])

    def remarks(self) -> Iterator[str]:
        """What is kept, the bubble, ties and notes."""
        if self.timeline is not None:
            yield from self._timing(self.timeline)
        if self.memory:
            fullest = max(self.memory, key=lambda stage: stage.total)
            each = ", ".join(format_bytes(stage.total) for stage in self.memory)
            yield (
                f"memory of a rank on each stage: {each}; on stage {fullest.stage} {format_bytes(fullest.state)} of "
                f"state, {format_bytes(fullest.gradients)} of gradients, {format_bytes(fullest.activations)} of "
                f"activations, {format_bytes(fullest.working)} while "
                f"{'the optimizer steps' if fullest.is_step else 'one layer computes'}"
            )
        for chunk, values in enumerate(self.crossing):
            total = format_bytes(sum(value.num_bytes for value in values))
            shown = "; ".join(_said(value) for value in values[:_MOST_VALUES])
            more = f"; and {len(values) - _MOST_VALUES} more" if len(values) > _MOST_VALUES else ""
            here, there = self.chunks[chunk].stage, self.chunks[chunk + 1].stage
            verb = "cross" if here != there else f"stay on stage {here}"
            yield f"behind {self.chunks[chunk].layers[-1]} {total} of the sample {verb}: {shown}{more}"
        for tied in self.tied:
            if len(tied.stages) > 1:
                where = f"on stages {_and(tied.stages)}, its gradient summed over them once per step"
            else:
                where = f"on stage {tied.stages[0]} only"
            yield f"one parameter: {' = '.join(tied.names)}, {where}"
        if any(len(tied.stages) > 1 for tied in self.tied):
            yield f"{self.num_parameters:,} parameters in all; the shares count a tied one in each stage that holds it"
        yield from self.notes

    def _timing(self, timeline: Timeline) -> Iterator[str]:
        kept = timeline.max_in_flight
        if self.settings.virtual_stages > 1:
            each = f"micro-batches of a chunk, 1/{self.settings.virtual_stages} of a stage"
            yield f"in flight at peak on each stage: {', '.join(map(str, kept))} ({each})"
        equal = closed_form(timeline.schedule)
        beside = f"; {equal.bubble_fraction:.1%} with stages of equal cost" if equal is not None else ""
        idle = ", ".join(f"{fraction:.1%}" for fraction in timeline.bubble_fractions)
        yield f"bubble {timeline.bubble_fraction:.1%} of the step (stages {idle}){beside}"
        cost = "flops and the update of parameters" if self._flops is not None else "parameters"
        yield f"timed by {cost}: a backward as {self.backward} forwards, no time for messages and the loss"

    @property
    def _flops(self) -> int | None:
        """Of all chunks."""
        counts = [row.forward_flops for row in self.chunks]
        return None if None in counts else sum(count or 0 for count in counts)

    def to_dict(self) -> dict[str, Any]:
        timeline, flops = self.timeline, self._flops
        degree, placement = self.settings.degree, self.settings.placement
        stages = [
            {
                "stage": stage,
                "ranks": list(self.chunks[stage].ranks),
                "chunks": list(chunks_on(stage, degree, len(self.chunks), placement)),
                "in_flight": None if timeline is None else timeline.max_in_flight[stage],
                "memory_bytes": _memory(self.memory[stage]) if self.memory else None,
                "bubble_fraction": None if timeline is None else timeline.bubble_fractions[stage],
            }
            for stage in range(degree)
        ]
        chunks = [
            {
                "chunk": row.chunk,
                "stage": row.stage,
                "layers": [{"name": n, "class": c} for n, c in zip(row.layers, row.classes, strict=True)],
                "parameters": row.num_parameters,
                "parameter_share": row.num_parameters / max(self.num_parameters, 1),
                "forward_flops": row.forward_flops,
                "flops_share": None if flops is None else (row.forward_flops or 0) / max(flops, 1),
                "in_flight": None if timeline is None else timeline.max_in_flight_per_chunk[row.chunk],
            }
            for row in self.chunks
        ]
        return {
            "schedule": self.settings.schedule,
            "micro_batches": None if timeline is None else timeline.schedule.num_micro_batches,
            "split": self.method if isinstance(self.method, str) else list(self.method),
            "bubble_fraction": None if timeline is None else timeline.bubble_fraction,
            "stages": stages,
            "chunks": chunks,
            "tied": [{"names": list(tied.names), "stages": list(tied.stages)} for tied in self.tied],
            "crossing": [[asdict(value) for value in values] for values in self.crossing],
            "notes": list(self.notes),
        }


def stage_table(given: Model, whole: Model, result: WorkedOut, *, sample: Any = None) -> StageTable | None:
    """How a model is cut into stages; None without a pipeline, or while the number of stages is open.

    Args:
        given: the model as `distributed_model` will get it.
        whole: the same with all of its layers.
        result: the strategy, as far as it is worked out.
        sample: an input of the first layer.

    Raises:
        StrategyError: layers that do not fit the stages, or micro-batches that do not fit the schedule.
        ModelError: a model that is no chain of layers.
    """
    value = {name: choice.value for name, choice in result.choices.items()}
    degree = value["pp"] or 1
    if degree < 2:
        return None
    wanted = PipelineSettings(
        degree=degree, schedule=value["schedule"], virtual_stages=value["virtual_stages"], split=value["split"]
    )
    problems: list[str] = []
    schedule = None
    try:
        schedule = _schedule(wanted, value["accumulate_steps"])
    except StrategyError as error:
        problems += [f"pipeline_configs: {problem}" for problem in error.problems]
    try:
        resolved = None
        if schedule is not None and result.layout is not None and not result.problems:
            resolved = resolved_from(result, clipping=None)
        own = own_stages(given, wanted, sample=sample, resolved=resolved)
        # Of a schedule that cannot be the layers may be wrong as well: split them for one that can.
        can_be = replace(wanted, schedule="1f1b" if wanted.virtual_stages == 1 else "interleaved")
        chunks = own.chunks if own is not None else chunks_of(given, can_be, sample=sample, resolved=resolved)
    except StrategyError as error:
        raise StrategyError([*problems, *error.problems]) from None
    if problems:
        raise StrategyError(problems)
    if own is not None:
        layers, note, memory = own.layers, "", own.memory
    else:
        check_stages(whole, chunks, num_stages=degree, placement=wanted.placement)
        layers, note = layers_of(whole, sample=sample)
        memory = () if resolved is None else chain_memory(whole, resolved, chunks, sample=sample)
    notes = [note] if note else []
    if schedule is None:
        notes.append("the number of micro-batches follows from the world size: give it to see what is in flight")
    is_balanced = getattr(given, "seg_method", wanted.split) in {None, "auto"}
    if is_balanced and sample is not None and not memory and not result.problems:
        unknown = "give the world size to see what each stage needs, which decides as well"
        if resolved is not None:
            unknown = "what the stages need could not be measured on the sample"
        notes.append(f"split by time alone: {unknown}")
    rows = tuple(_row(index, layers[c.start : c.stop], wanted, result) for index, c in enumerate(chunks))
    method: Any = getattr(given, "seg_method", wanted.split or "auto")
    recomputes = result.features["recompute"].value and value["recompute_policy"] == "full"
    backward = 3 if recomputes else 2
    return StageTable(
        settings=wanted,
        method=method,
        chunks=rows,
        num_parameters=sum(dict(held for layer in layers for held in layer.parameters.values()).values()),
        tied=tuple(_tied(layers, chunks, wanted)),
        timeline=None if schedule is None else _timeline(schedule, [row.weight for row in rows], backward),
        backward=backward,
        units=tuple(dict.fromkeys(_units(layers, chunks, wanted))),
        notes=tuple(notes),
        crossing=own.crossing if own is not None else (),
        memory=memory,
    )


def _memory(stage: StageBytes) -> dict[str, int]:
    return {
        "state": stage.state,
        "gradients": stage.gradients,
        "activations": stage.activations,
        "working": stage.working,
        "total": stage.total,
    }


def _stage_of(chunk: int, settings: PipelineSettings) -> int:
    return chunk_rank(chunk, settings.degree, settings.placement)


def _schedule(settings: PipelineSettings, num_micro_batches: int | None) -> Schedule | None:
    if num_micro_batches is None:
        return None
    return settings.order(num_micro_batches)


def _timeline(schedule: Schedule, weights: Sequence[float], backward: int) -> Timeline:
    costs = [float(weight) for weight in weights]
    return time_schedule(schedule, forward_seconds=costs, backward_seconds=[backward * cost for cost in costs])


def _row(chunk: int, layers: Sequence[LayerFacts], settings: PipelineSettings, result: WorkedOut) -> ChunkRow:
    stage, layout = _stage_of(chunk, settings), result.layout
    ranks = () if layout is None else range(layout.world_size)
    flops = [layer.forward_flops for layer in layers]
    return ChunkRow(
        chunk=chunk,
        stage=stage,
        ranks=tuple(rank for rank in ranks if layout is not None and layout.coordinate(rank)["pp"] == stage),
        layers=tuple(layer.name for layer in layers),
        classes=tuple(layer.class_name for layer in layers),
        num_parameters=sum(dict(held for layer in layers for held in layer.parameters.values()).values()),
        forward_flops=None if None in flops else sum(count or 0 for count in flops),
        weight=fsum(layer.weight for layer in layers),
    )


def _tied(layers: Sequence[LayerFacts], chunks: Sequence[range], settings: PipelineSettings) -> Iterator[TiedParameter]:
    stage_of = {index: _stage_of(chunk, settings) for chunk, held in enumerate(chunks) for index in held}
    names: dict[int, dict[str, None]] = {}
    stages: dict[int, set[int]] = {}
    for index, layer in enumerate(layers):
        for name, (which, _) in layer.parameters.items():
            names.setdefault(which, {})[name] = None
            stages.setdefault(which, set()).add(stage_of[index])
    for which, known in names.items():
        if len(known) > 1 or len(stages[which]) > 1:
            yield TiedParameter(names=tuple(known), stages=tuple(sorted(stages[which])))


def _units(layers: Sequence[LayerFacts], chunks: Sequence[range], settings: PipelineSettings) -> Iterator[str]:
    """Each layer is one; a parameter of several layers of a stage belongs to the first of them there."""
    taken: set[tuple[int, int]] = set()
    for chunk, held in enumerate(chunks):
        for layer in layers[held.start : held.stop]:
            own = {(_stage_of(chunk, settings), which) for which, _ in layer.parameters.values()}
            if own - taken:
                yield layer.name
            taken |= own


def _said(value: Crossing) -> str:
    turn = f" (call {value.call + 1})" if value.call else ""
    path = f", {value.path}" if value.path else ""
    return f"{value.unit}{turn}{path}, {' × '.join(map(str, value.shape)) or 'one number'} of {value.dtype}"


def _runs(names: Sequence[str]) -> Iterator[tuple[str, int]]:
    for name, group in groupby(names):
        yield name, len(list(group))


def _share(part: int, total: int) -> str:
    return f"{part / total:.1%}" if total else "0.0%"


def _and(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
