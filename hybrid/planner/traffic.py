"""Bytes that data-parallel ranks send for their state: what `data_parallel.py` prices and `collectives/trace.py`
counts.

Per rank and step, for N shards of E padded elements (design: stages of ZeRO):

    stage 0      2 · E · reduce bytes · (n-1)/n over all n ranks
    stages 1, 2  E · (reduce bytes + parameter bytes) · (N-1)/N, the first part per micro-batch where gradients are
    reduced
                 for each; and 2 · E/N · reduce bytes · (R-1)/R over R replicas, once per step
    stage 3      a gather in each forward and each backward instead of the one behind the step; one per step in all
    where
                 a run of micro-batches keeps them
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.planner.collectives import Collective
from hybrid.planner.job import Candidate, Precision

__all__ = ["StateMessage", "gather_message", "reduction_message", "replica_message", "state_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMessage:
    """`num_bytes` of the whole value, over the groups of `axes`."""

    kind: Collective
    axes: tuple[str, ...]
    num_bytes: float

    def sent_bytes(self, size: int) -> float:
        """By one of `size` ranks, by the operation's own formula."""
        return self.num_bytes * (2 if self.kind == "all_reduce" else 1) * (size - 1) / size


def reduction_message(elements: float, precision: Precision, *, zero_stage: int) -> StateMessage:
    """All gradients once: to every rank at stage 0, to the owner of each shard above."""
    num_bytes = elements * precision.reduce
    if zero_stage == 0:
        return StateMessage(kind="all_reduce", axes=("dp_replicate", "dp_shard", "cp"), num_bytes=num_bytes)
    return StateMessage(kind="reduce_scatter", axes=("dp_shard", "cp"), num_bytes=num_bytes)


def replica_message(elements: float, precision: Precision, *, zero_stage: int, num_shards: int) -> StateMessage:
    """Shards summed over their replicas."""
    num_bytes = elements * precision.reduce / num_shards if zero_stage else 0.0
    return StateMessage(kind="all_reduce", axes=("dp_replicate",), num_bytes=num_bytes)


def gather_message(elements: float, precision: Precision) -> StateMessage:
    """All parameters once."""
    return StateMessage(kind="all_gather", axes=("dp_shard", "cp"), num_bytes=elements * precision.parameter)


def state_bytes(elements: float, precision: Precision, candidate: Candidate, *, tp_ranks: int = 1) -> dict[str, float]:
    """`reduce`, `replicas`, `gather` -> bytes that one rank sends in a step for this many elements of its stage.

    `tp_ranks`: of the tp group that have each a part of their gradients, and sum them as replicas do.
    """
    c = candidate
    shards, replicas = c.dp_shard * c.cp, c.dp_replicate * tp_ranks
    reduction = reduction_message(elements, precision, zero_stage=c.zero_stage)
    num_reductions = c.num_micro_batches if c.zero_stage >= 2 and c.grad_reduce == "every_micro_batch" else 1
    num_gathers = {0: 0, 1: 1, 2: 1, 3: 1 if c.reshard_after == "run" else 2 * c.num_micro_batches}[c.zero_stage]
    summed = replica_message(elements, precision, zero_stage=c.zero_stage, num_shards=shards)
    return {
        "reduce": num_reductions * reduction.sent_bytes(shards if c.zero_stage else shards * replicas),
        "replicas": summed.sent_bytes(replicas),
        "gather": num_gathers * gather_message(elements, precision).sent_bytes(shards),
    }
