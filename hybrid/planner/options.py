"""The values of each axis that a search tries, in a fixed order.

    shapes          tp, pp, cp, ep, dp that multiply to the devices
    bases           + sequence parallel, micro-batch, schedule, virtual stages, recompute: what decides compute time
    state_options   + zero_stage, shard_size, grad_reduce, reshard_after: what decides memory and data-parallel traffic

`gpipe` is tried too: it keeps more micro-batches than `1f1b`, but where messages between stages take long it can be
faster, since no forward waits for a backward to come back. The search leaves out those that are not. `zb-h1` and `zbv`
split each backward, for a smaller bubble at the price of what is kept between its halves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from math import gcd
from typing import Any

from hybrid.contracts.schedule import usual_virtual_stages
from hybrid.planner.constraints import divisors, state_problems
from hybrid.planner.job import Candidate, Offload
from hybrid.planner.model_spec import Recompute
from hybrid.planner.request import Request
from hybrid.planner.stages import num_layers

__all__ = ["SCHEDULES", "bases", "least_memory", "shapes", "state_options"]

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv")
_VIRTUAL_STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_MOST_SHARD_SIZES = 6
_NAMES = tuple(item.name for item in fields(Candidate))
_ONCE, _BY_UNIT = ("last_micro_batch",), ("unit",)


def shapes(request: Request) -> Iterator[Candidate]:
    """One candidate per (tp, pp, cp, ep), with all other axes at their plainest."""
    job, fixed = request.job, request.fixed
    world = job.cluster.num_devices
    layers = num_layers(job.model)
    for tp in _values(fixed, "tp", divisors(world)):
        if world % tp:
            continue
        for cp in _values(fixed, "cp", _up_to(divisors(world // tp), 64) if request.is_all else (1,)):
            if (world // tp) % cp:
                continue
            for pp in _values(fixed, "pp", _up_to(divisors(world // tp // cp), layers)):
                if (world // tp // cp) % pp:
                    continue
                dp = world // tp // cp // pp
                if fixed.get("dp", dp) != dp:
                    continue
                experts = (
                    divisors(gcd(job.model.num_experts, dp * cp)) if request.is_all and job.model.num_experts else (1,)
                )
                for ep in _values(fixed, "ep", experts):
                    yield Candidate(tp=tp, pp=pp, cp=cp, ep=ep, dp_replicate=dp)


def bases(request: Request, shape: Candidate) -> Iterator[list[Candidate]]:
    """For each way to run a micro-batch: the candidates of ascending micro-batch.

    Within one list only the micro-batch grows.
    """
    fixed, batch = request.fixed, request.job.global_batch_size
    if batch % shape.dp:
        return
    per_rank = batch // shape.dp
    policies: tuple[Recompute, ...] = ("full", "selective", "none")
    if request.is_all:
        policies = ("full", "selective", "core_attention", "none")
    sizes = [size for size in divisors(per_rank) if fixed.get("micro_batch_size", size) == size]
    if "num_micro_batches" in fixed:
        sizes = [size for size in sizes if per_rank // size == fixed["num_micro_batches"]]
    plain = _fields(shape)
    for sequence_parallel in _values(fixed, "sequence_parallel", (True, False) if shape.tp > 1 else (False,)):
        for schedule, virtual_stages in _orders(request, shape):
            for recompute in _values(fixed, "recompute", policies):
                values = {
                    **plain,
                    "sequence_parallel": sequence_parallel,
                    "schedule": schedule,
                    "virtual_stages": virtual_stages,
                    "recompute": recompute,
                }
                made = [
                    Candidate(**{**values, "micro_batch_size": size, "num_micro_batches": per_rank // size})
                    for size in sizes
                ]
                if made:
                    yield made


def _orders(request: Request, shape: Candidate) -> Iterator[tuple[str, int]]:
    fixed = request.fixed
    if shape.pp == 1:
        yield fixed.get("schedule", "1f1b"), fixed.get("virtual_stages", 1)
        return
    for schedule in _values(fixed, "schedule", SCHEDULES):
        chunks = _VIRTUAL_STAGES[1:] if schedule == "interleaved" else (usual_virtual_stages(schedule),)
        for virtual_stages in _values(fixed, "virtual_stages", chunks):
            if shape.pp * virtual_stages <= num_layers(request.job.model):
                yield schedule, virtual_stages


def state_options(request: Request, base: Candidate) -> Iterator[Candidate]:
    """Every way to cut the state of one base, that which keeps least first."""
    fixed = request.fixed
    sizes = _shard_sizes(request, base)
    plain = _fields(base)
    for zero_stage in _values(fixed, "zero_stage", (3, 2, 1, 0)):
        offloads = _offloads(request, zero_stage)
        # Parameters that come from the host are cut even where one rank has all of them.
        alone = sizes or ((1,) if zero_stage == 3 and "parameters" in offloads else ())
        for dp_shard in _values(fixed, "dp_shard", (1,) if zero_stage == 0 else alone):
            if base.dp % dp_shard:
                continue
            replicate = base.dp // dp_shard
            if fixed.get("dp_replicate", replicate) != replicate:
                continue
            is_many = base.num_micro_batches > 1
            reduces = ("every_micro_batch", "last_micro_batch") if zero_stage >= 2 and is_many else _ONCE
            keeps = ("unit", "run") if zero_stage == 3 else _BY_UNIT
            for grad_reduce in _values(fixed, "grad_reduce", reduces):
                for reshard_after in _values(fixed, "reshard_after", keeps):
                    for offload in offloads:
                        option = Candidate(
                            **{
                                **plain,
                                "zero_stage": zero_stage,
                                "dp_replicate": replicate,
                                "dp_shard": dp_shard,
                                "grad_reduce": grad_reduce,
                                "reshard_after": reshard_after,
                                "offload": offload,
                            }
                        )
                        if not any(state_problems(request.job, option)):
                            yield option


def _offloads(request: Request, zero_stage: int) -> tuple[Offload, ...]:
    """Where state may lie, what leaves least on the device first."""
    if "offload" in request.fixed:
        return (request.fixed["offload"],)
    if not request.is_all:
        return ("none",)
    return ("parameters", "optimizer", "none") if zero_stage == 3 else ("optimizer", "none")


def _fields(candidate: Candidate) -> dict[str, Any]:
    """To make others from it: `dataclasses.replace` takes several times as long."""
    return {name: getattr(candidate, name) for name in _NAMES}


def least_memory(request: Request, base: Candidate) -> Candidate | None:
    """The state option of a base that keeps the least; None where what is fixed leaves none."""
    return next(state_options(request, base), None)


def _shard_sizes(request: Request, base: Candidate) -> tuple[int, ...]:
    """All ranks, those that share a fast link, and some between: divisors of dp, at most six of them, largest first."""
    return _shard_sizes_of(base.dp, base.cp, max(1, request.job.cluster.domain_size // (base.tp * base.cp)))


@lru_cache(maxsize=1024)
def _shard_sizes_of(dp: int, cp: int, local: int) -> tuple[int, ...]:
    """`local`: how many ranks share a fast link."""
    sizes = [size for size in divisors(dp) if size > 1 or cp > 1]
    if len(sizes) <= _MOST_SHARD_SIZES:
        return tuple(reversed(sizes))
    inside = [size for size in sizes if size <= local]
    kept = {sizes[0], sizes[-1], *(inside[-1:])}
    step = (len(sizes) - 1) / (_MOST_SHARD_SIZES - 1)
    for place in range(_MOST_SHARD_SIZES):
        if len(kept) < _MOST_SHARD_SIZES:
            kept.add(sizes[round(place * step)])
    return tuple(sorted(kept, reverse=True))


def _values(fixed: Any, name: str, otherwise: tuple[Any, ...]) -> tuple[Any, ...]:
    return (fixed[name],) if name in fixed else otherwise


def _up_to(values: tuple[int, ...], limit: int) -> tuple[int, ...]:
    return tuple(value for value in values if value <= limit)
