"""Which units of a model form which pipeline chunk of a candidate."""

from __future__ import annotations

from hybrid.contracts.stage_split import split_by_costs, split_by_counts
from hybrid.planner.job import Candidate, Job
from hybrid.planner.kept import Kept
from hybrid.planner.model_spec import ModelSpec, UnitSpec

__all__ = ["Chunks", "num_layers", "stage_ranges", "stage_units"]

# As in `contracts/stage_split.py`: what one parameter weighs beside a forward flop of one micro-batch.
_FLOPS_PER_PARAMETER = 6

Chunks = tuple[tuple[UnitSpec, ...], ...]
Ranges = tuple[range, ...]
# A search asks for the same chunks thousands of times, and adding up thousands of parameters takes longer than to price
# a layout.
_CHUNKS: Kept[tuple[Chunks, Ranges]] = Kept(4096)
# Most sizes of a micro-batch cut a model in the same places: what is known by the identity of chunks serves them all.
_SAME: Kept[tuple[Chunks, Ranges]] = Kept(4096)
_COSTS: Kept[tuple[tuple[float, int], ...]] = Kept(64)


def num_layers(model: ModelSpec) -> int:
    """What a pipeline can be cut into: every unit, or the fewer calls that the forward of a live model makes."""
    return min(len(model.units), model.num_cut_layers or len(model.units))


def stage_units(job: Job, candidate: Candidate) -> Chunks:
    """Units of each chunk, in the order of the model; chunk c is on pipeline rank c modulo pp.

    Without a `split` the chunks are balanced by forward flops and parameters, embedding and head counted, as
    `pipeline_configs.split = "auto"` does.

    Raises:
        StrategyError: fewer units than chunks, or a `split` that does not add up.
    """
    return _stages(job, candidate)[0]


def stage_ranges(job: Job, candidate: Candidate) -> Ranges:
    """As `stage_units`, by the places of the units in the model; the same object for the same chunks."""
    return _stages(job, candidate)[1]


def _stages(job: Job, candidate: Candidate) -> tuple[Chunks, Ranges]:
    model = job.model
    num_chunks = candidate.pp * candidate.virtual_stages
    tokens = 0 if num_chunks == 1 else candidate.micro_batch_size * job.seq // candidate.cp
    return _CHUNKS.get(
        model,
        *(tokens, job.seq, num_chunks, candidate.split),
        make=lambda: _cut(model, tokens, job.seq, num_chunks, candidate.split),
    )


def _cut(model: ModelSpec, tokens: int, seq: int, num_chunks: int, split: tuple[int, ...]) -> tuple[Chunks, Ranges]:
    units = model.units
    ranges: Ranges
    if num_chunks == 1:
        ranges = (range(len(units)),)
    elif split:
        ranges = split_by_counts(split, len(units), num_chunks)
    else:
        costs = _COSTS.get(model, seq, make=lambda: _unit_costs(model, seq))
        ranges = split_by_costs(
            [round(flops * tokens) + _FLOPS_PER_PARAMETER * size for flops, size in costs], num_chunks
        )
    return _SAME.get(model, ranges, make=lambda: (tuple(units[chunk.start : chunk.stop] for chunk in ranges), ranges))


def _unit_costs(model: ModelSpec, seq: int) -> tuple[tuple[float, int], ...]:
    """(forward flops per token, parameters) of each unit."""
    return tuple((unit.forward_flops_per_token(seq), unit.num_parameters()) for unit in model.units)
