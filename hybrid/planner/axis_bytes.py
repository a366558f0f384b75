"""Bytes that the ranks of a layout send in a step, by axis: what a run counts with `hybrid.trace()`.

tp      sums inside layers, forward and backward of each micro-batch
pp      what crosses the cuts between stages, and its gradients, by the messages of the schedule
tied    gradients of a weight that two stages hold, summed over them once per step
dp      gradients and parameters, by the stage of ZeRO
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hybrid.contracts.partition import shard_elements
from hybrid.contracts.schedule import Schedule
from hybrid.contracts.schedule_choice import choose_schedule
from hybrid.contracts.schedule_transfers import transfers
from hybrid.planner.action_numbers import runs_of_chunks
from hybrid.planner.job import Candidate, Job
from hybrid.planner.memory_state import StateBytes, StateTable, num_shards
from hybrid.planner.model_spec import UnitSpec
from hybrid.planner.stages import stage_ranges, stage_units
from hybrid.planner.tensor_traffic import TensorMessage, tensor_messages
from hybrid.planner.traffic import state_bytes

__all__ = ["axis_bytes"]


def axis_bytes(job: Job, candidate: Candidate) -> tuple[Mapping[str, float], ...]:
    """Per pipeline rank: `tp`, `pp`, `tied`, `dp` -> bytes that one of its ranks sends in a step.

    Of dense models without context parallel. An operation counts by its own formula (a ring's all-reduce sends
    2 (n-1)/n of the value), whatever the algorithm does.

    Raises:
        StrategyError: a schedule that cannot be, or a `split` that does not add up.
    """
    schedule = choose_schedule(
        candidate.schedule,
        num_stages=candidate.pp,
        num_micro_batches=candidate.num_micro_batches,
        virtual_stages=candidate.virtual_stages,
    )
    chunks = stage_units(job, candidate)
    table, ranges = StateTable(job), stage_ranges(job, candidate)
    states = table.of_ranks(ranges, candidate, None)
    runs = _gathered_by_runs(table.of_chunks(ranges, candidate), candidate, schedule)
    first_block = next((unit.name for unit in job.model.units if unit.kind == "block"), "")
    before = [None, *(units[-1] for units in chunks[:-1])]
    crossing = [
        _crossing_bytes(units[0], job, candidate, first_block, before=last)
        for units, last in zip(chunks, before, strict=True)
    ]
    within = _tensor_bytes_of_chunks(chunks, job, candidate)
    tied = tuple(_tied_elements(chunks, candidate))
    found = []
    for rank, state in enumerate(states):
        sent = dict.fromkeys(("tp", "pp", "tied", "dp"), 0.0)
        here = (num_bytes for chunk, num_bytes in enumerate(within) if schedule.rank_of(chunk) == rank)
        sent["tp"] = candidate.num_micro_batches * sum(here)
        messages = (one.send for one in transfers(schedule)[rank])
        # A value and its gradient are as wide: that which goes into the later of the two chunks.
        sent["pp"] = sum(crossing[max(one.source_chunk, one.target_chunk)] for one in messages if one is not None)
        shards = num_shards(candidate)[0]
        first, last = schedule.rank_of(0), schedule.rank_of(len(chunks) - 1)
        sent["dp"] = _state_bytes(state, job, candidate, shards=shards)
        if candidate.zero_stage == 3 and candidate.reshard_after == "run":
            sent["dp"] += runs[rank] * (shards - 1)
        else:  # in time: `data_parallel.state_seconds`
            sent["dp"] += candidate.num_micro_batches * state.gathered_again * (shards - 1) / shards
        if tied and first != last and rank in {first, last}:
            # The two stages sum their shards, at stages 1 to 3 together with the replicas.
            own = sum(_own_elements(elements, job, shards) for elements in tied) * job.precision.reduce
            replicas = candidate.dp_replicate if candidate.zero_stage else 1
            sent["tied"] = 2 * own * (2 * replicas - 1) / (2 * replicas)
            sent["dp"] -= 2 * own * (replicas - 1) / replicas
        found.append(sent)
    return tuple(found)


def _crossing_bytes(
    first: UnitSpec, job: Job, candidate: Candidate, first_block: str, *, before: UnitSpec | None
) -> int:
    """Of one micro-batch, into the chunk that begins with this unit: between two blocks the sequence is cut.

    Rows of tokens and of positions that are not added yet come as their tables gave them, or the projection behind one.
    """
    if before is not None and before.adds_positions:
        rows = job.seq * (candidate.micro_batch_size if before.adds_positions == "batch" else 1)
        width = job.precision.activation if before.matmuls else job.precision.parameter
        tokens = candidate.micro_batch_size * job.seq
        return job.model.hidden * (tokens * width + rows * job.precision.parameter)
    width = job.precision.activation if first.sent is None else first.sent.between
    is_between = first.kind == "block" and first.name != first_block
    parts = candidate.tp if candidate.sequence_parallel and is_between else 1
    return candidate.micro_batch_size * job.seq * job.model.hidden * width // parts


def _gathered_by_runs(of_chunks: Sequence[StateBytes], candidate: Candidate, schedule: Schedule) -> list[int]:
    """Bytes of own shards of each rank, as often as runs of micro-batches have them gathered: once for each run."""
    counts = runs_of_chunks(schedule.name, candidate.pp, candidate.num_micro_batches, len(of_chunks) // candidate.pp)
    shards = num_shards(candidate)[0]
    return [
        sum(
            sum(runs) * (of_chunks[chunk].parameters + of_chunks[chunk].borrowed // shards)
            for chunk, runs in zip(schedule.chunks_of(rank), own, strict=True)
        )
        for rank, own in enumerate(counts)
    ]


def _state_bytes(state: StateBytes, job: Job, candidate: Candidate, *, shards: int) -> float:
    """Gradients and parameters, those that tp ranks sum and those of another type by themselves."""
    precision = job.precision
    norms = replace(
        precision,
        parameter=precision.norm,
        reduce=precision.norm if precision.reduce == precision.gradient else precision.reduce,
    )
    apart = sum(elements for _, elements in state.apart)
    sent = _without_runs(state_bytes((state.own_elements - apart) * shards, precision, candidate), candidate)
    for (tp_ranks, is_norm), elements in state.apart:
        of_its_type = norms if is_norm else precision
        sent += _without_runs(state_bytes(elements * shards, of_its_type, candidate, tp_ranks=tp_ranks), candidate)
    return sent


def _without_runs(sent: Mapping[str, float], candidate: Candidate) -> float:
    """What runs of micro-batches gather is counted chunk by chunk."""
    is_run = candidate.zero_stage == 3 and candidate.reshard_after == "run"
    return sum(size for name, size in sent.items() if not (is_run and name == "gather"))


def _tensor_bytes_of_chunks(chunks: Sequence[Sequence[UnitSpec]], job: Job, candidate: Candidate) -> list[float]:
    """Of each chunk: a forward and a backward of one micro-batch.

    What joins the sequence for the head, or its gradient for the embedding, is sent by the block beside it.
    """
    found = [0.0] * len(chunks)
    if candidate.tp == 1:
        return found
    joining = [chunk for chunk, units in enumerate(chunks) if any(unit.kind == "block" for unit in units)]
    for chunk, units in enumerate(chunks):
        for unit in units:
            own, joined = _tensor_bytes(unit, job, candidate)
            found[chunk] += own
            if joined:
                found[joining[0 if unit.kind == "embedding" else -1]] += joined
    return found


def _tensor_bytes(unit: UnitSpec, job: Job, candidate: Candidate) -> tuple[float, float]:
    """(by a unit, by the block beside it); full recompute runs the forward of a block again."""
    forward, backward = (
        list(
            tensor_messages(
                unit,
                tokens=candidate.micro_batch_size * job.seq,
                hidden=job.model.hidden,
                element_bytes=job.precision.activation,
                sequence_parallel=candidate.sequence_parallel,
                is_backward=is_backward,
                has_cut_ends=False,
            )
        )
        for is_backward in (False, True)
    )
    again: list[TensorMessage] = []
    if candidate.recompute == "full" and unit.kind == "block":
        sums = {"all_reduce", "reduce_scatter"}
        left = int(unit.leaves_last_sum)
        again = [replace(one, count=one.count - left) if one.kind in sums else one for one in forward]
    own, joined = 0.0, 0.0
    for message in (*forward, *backward, *again):
        if message.kind == "all_gather" and unit.kind in {"embedding", "head"}:
            joined += message.sent_bytes(candidate.tp)
        else:
            own += message.sent_bytes(candidate.tp)
    return own, joined


def _tied_elements(chunks: tuple[tuple[UnitSpec, ...], ...], candidate: Candidate) -> Iterator[int]:
    """On one rank, of each of the last chunk's weights that are another chunk's."""
    own = {f"{unit.name}.{parameter.name}" for unit in chunks[-1] for parameter in unit.parameters}
    for unit in chunks[-1]:
        for parameter in unit.parameters:
            if parameter.tied_to is not None and parameter.tied_to not in own and parameter.trainable:
                yield parameter.local_elements(candidate.tp)


def _own_elements(elements: int, job: Job, shards: int) -> int:
    """Of a weight that has a bucket of its own."""
    width = min(job.precision.parameter, job.precision.gradient)
    return shard_elements([elements], num_shards=shards, element_bytes=width)
