"""Bytes that the ranks of a layout send in a step, by axis: what a run counts with `hybrid.trace()`.

tp      sums inside layers, forward and backward of each micro-batch
pp      what crosses the cuts between stages, and its gradients, by the messages of the schedule
tied    gradients of a weight that two stages hold, summed over them once per step
dp      gradients and parameters, by the stage of ZeRO
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hybrid.contracts.partition import shard_elements
from hybrid.contracts.schedule_choice import choose_schedule
from hybrid.contracts.schedule_transfers import transfers
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
    states = StateTable(job).of_ranks(stage_ranges(job, candidate), candidate, None)
    crossing = candidate.micro_batch_size * job.seq * job.model.hidden * job.precision.activation
    if candidate.sequence_parallel:
        crossing //= candidate.tp
    tied = tuple(_tied_elements(chunks, candidate))
    found = []
    for rank, state in enumerate(states):
        sent = dict.fromkeys(("tp", "pp", "tied", "dp"), 0.0)
        for chunk, units in enumerate(chunks):
            if schedule.rank_of(chunk) == rank:
                sent["tp"] += candidate.num_micro_batches * sum(_tensor_bytes(unit, job, candidate) for unit in units)
        sent["pp"] = crossing * sum(one.send is not None for one in transfers(schedule)[rank])
        shards = num_shards(candidate)[0]
        first, last = schedule.rank_of(0), schedule.rank_of(len(chunks) - 1)
        sent["dp"] = _state_bytes(state, job, candidate, shards=shards)
        if candidate.reshard_after != "run":
            sent["dp"] += candidate.num_micro_batches * state.gathered_again * (shards - 1) / shards
        if tied and first != last and rank in {first, last}:
            # The two stages sum their shards, at stages 1 to 3 together with the replicas.
            own = sum(_own_elements(elements, job, shards) for elements in tied) * job.precision.reduce
            replicas = candidate.dp_replicate if candidate.zero_stage else 1
            sent["tied"] = 2 * own * (2 * replicas - 1) / (2 * replicas)
            sent["dp"] -= 2 * own * (replicas - 1) / replicas
        found.append(sent)
    return tuple(found)


def _state_bytes(state: StateBytes, job: Job, candidate: Candidate, *, shards: int) -> float:
    """Gradients and parameters, those that tp ranks sum and those of another type by themselves."""
    precision = job.precision
    norms = replace(
        precision,
        parameter=precision.norm,
        reduce=precision.norm if precision.reduce == precision.gradient else precision.reduce,
    )
    apart = sum(elements for _, elements in state.apart)
    sent = sum(state_bytes((state.own_elements - apart) * shards, precision, candidate).values())
    for (tp_ranks, is_norm), elements in state.apart:
        of_its_type = norms if is_norm else precision
        sent += sum(state_bytes(elements * shards, of_its_type, candidate, tp_ranks=tp_ranks).values())
    return sent


def _tensor_bytes(unit: UnitSpec, job: Job, candidate: Candidate) -> float:
    """A forward and a backward of one micro-batch; full recompute runs the forward of a block again."""
    if candidate.tp == 1:
        return 0.0
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
    return sum(message.sent_bytes(candidate.tp) for message in (*forward, *backward, *again))


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
