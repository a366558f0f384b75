"""What a layout must keep, whatever it costs: each rule with the value, what it must divide or fit, and what would do.

The rules are those of the runtime (`hybrid/strategy`, `hybrid/contracts/tensor_checks.py`, `schedule.py`); sources of
the complaints behind them: docs/planner.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybrid.contracts.schedule import usual_virtual_stages
from hybrid.contracts.schedule_choice import schedule_splits_backward
from hybrid.planner.job import Candidate, Job
from hybrid.planner.stages import num_layers

__all__ = ["Problem", "batch_problems", "divisors", "not_built", "problems_of", "shape_problems", "state_problems"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Args:
    rule: one word, by which rejected layouts are counted.
    text: the sentence.
    """

    rule: str
    text: str


def divisors(number: int) -> tuple[int, ...]:
    """In ascending order."""
    low = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return tuple(dict.fromkeys([*low, *(number // value for value in reversed(low))]))


def problems_of(job: Job, candidate: Candidate, *, is_all: bool = False, is_tp_given: bool = False) -> list[Problem]:
    """Everything that forbids it; empty for one that can be tried."""
    return [
        *shape_problems(job, candidate, is_tp_given=is_tp_given, is_all=is_all),
        *batch_problems(job, candidate),
        *state_problems(job, candidate),
        *([] if is_all else not_built(candidate)),
    ]


def shape_problems(
    job: Job, candidate: Candidate, *, is_tp_given: bool = False, is_all: bool = False
) -> Iterator[Problem]:
    """Of the degrees alone: the size of the world, what tp divides, layers for the chunks.

    `is_tp_given`: the user wants this tp, so that it may leave a domain of fast links (and is priced so).
    """
    world = job.cluster.num_devices
    if candidate.world_size != world:
        yield Problem(
            rule="world",
            text=f"tp {candidate.tp} × pp {candidate.pp} × cp {candidate.cp} × dp {candidate.dp} = "
            f"{candidate.world_size} ranks for {world} devices: the product must be {world}",
        )
    yield from _tensor_problems(job, candidate, is_tp_given=is_tp_given, is_all=is_all)
    chunks = candidate.pp * candidate.virtual_stages
    layers = num_layers(job.model)
    if chunks > layers:
        yield Problem(
            rule="layers",
            text=f"pp = {candidate.pp} × virtual_stages = {candidate.virtual_stages} is {chunks} chunks for {layers} "
            f"layers (embedding, blocks, head): each chunk needs one; at most {layers} chunks work",
        )
    usual = usual_virtual_stages(candidate.schedule)
    if usual > 1 and candidate.virtual_stages != usual and candidate.pp > 1:
        yield Problem(
            rule="schedule",
            text=f"schedule {candidate.schedule!r} has {usual} chunks per rank, not virtual_stages = "
            f"{candidate.virtual_stages}",
        )
    elif schedule_splits_backward(candidate.schedule) and candidate.pp == 1:
        yield Problem(
            rule="schedule",
            text=f"schedule {candidate.schedule!r} splits backwards to fill the bubble of a pipeline, and pp is 1",
        )
    elif candidate.virtual_stages > usual and candidate.schedule != "interleaved":
        yield Problem(
            rule="schedule",
            text=f"virtual_stages = {candidate.virtual_stages} needs schedule 'interleaved', not "
            f"{candidate.schedule!r}",
        )
    if candidate.schedule == "interleaved" and candidate.virtual_stages == 1:
        yield Problem(rule="schedule", text="schedule 'interleaved' needs virtual_stages of 2 or more, not 1")
    experts = job.model.num_experts
    if candidate.ep > 1 and not experts:
        yield Problem(rule="experts", text=f"ep = {candidate.ep}: {job.model.name} has no experts; use ep = 1")
    elif experts % candidate.ep:
        would = ", ".join(map(str, divisors(experts)))
        yield Problem(rule="experts", text=f"ep = {candidate.ep} does not divide {experts} experts: {would} would do")
    if candidate.ep > candidate.dp * candidate.cp or (candidate.ep > 1 and candidate.dp * candidate.cp % candidate.ep):
        yield Problem(
            rule="experts",
            text=f"ep = {candidate.ep} does not divide dp × cp = {candidate.dp * candidate.cp}, from which it is taken",
        )
    if candidate.cp > 1 and job.seq % (2 * candidate.cp):
        yield Problem(
            rule="sequence",
            text=f"seq = {job.seq} is no multiple of 2 × cp = {2 * candidate.cp}, the halves that balance causal "
            "attention",
        )


def _tensor_problems(job: Job, candidate: Candidate, *, is_tp_given: bool, is_all: bool) -> Iterator[Problem]:
    tp, model = candidate.tp, job.model
    if tp == 1:
        if candidate.sequence_parallel:
            yield Problem(rule="sequence", text="sequence_parallel does nothing with tp = 1; leave it out")
        return
    if not model.num_heads:
        yield Problem(
            rule="tensor",
            text=f"tp = {tp}: no tensor-parallel plan is known for {model.name}; use tp = 1, or give a `plan`",
        )
        return
    if model.tensor_refusal and not model.num_experts:
        yield Problem(rule="tensor", text=f"tp = {tp}: {model.name} is cut for no tp: {model.tensor_refusal}")
        return
    if model.sequence_refusal and candidate.sequence_parallel:
        yield Problem(
            rule="sequence", text=f"sequence_parallel of {model.name}: {model.sequence_refusal}; leave it out"
        )
    if model.num_experts and not is_all:
        yield Problem(
            rule="not built",
            text=f"tp = {tp}: this version of hybrid cannot cut a mixture of experts ({model.name} has "
            f"{model.num_experts}); use tp = 1; --all prices it nevertheless",
        )
    for what, size in (("attention heads", model.num_heads), ("the width of the feed-forward layer", model.ffn)):
        if size and size % tp:
            common = [value for value in divisors(size) if value <= size]
            near = sorted(common, key=lambda value: (abs(value - tp), value))[:2]
            yield Problem(
                rule="tensor",
                text=f"tp = {tp} does not divide {size} ({what}); {' or '.join(map(str, sorted(near)))} would do",
            )
    kv = model.num_kv_heads
    if kv and kv % tp and tp % kv:
        yield Problem(
            rule="tensor",
            text=f"tp = {tp} neither divides {kv} key-value heads nor is a multiple of them (copies); "
            f"{', '.join(map(str, divisors(kv)))} would do",
        )
    if tp > job.cluster.domain_size and not is_tp_given:
        yield Problem(
            rule="tp over nodes",
            text=f"tp = {tp} leaves the {job.cluster.domain_size} devices that share a fast link: its sums would cross "
            "the network in every layer; fix tp to have it priced",
        )
    if candidate.sequence_parallel and (job.seq // candidate.cp) % tp:
        yield Problem(
            rule="sequence",
            text=f"sequence_parallel cuts {job.seq // candidate.cp} tokens over tp = {tp} ranks, which does not divide "
            "them; leave it out, or change seq",
        )


def batch_problems(job: Job, candidate: Candidate) -> Iterator[Problem]:
    """Of the batch: data-parallel ranks, micro-batches, the groups of the interleaved schedule."""
    batch, dp, size = job.global_batch_size, candidate.dp, candidate.micro_batch_size
    if batch % dp:
        near = sorted(divisors(batch), key=lambda value: (abs(value - dp), value))[:2]
        batches = [size for size in (batch // dp * dp, (batch // dp + 1) * dp) if size]
        yield Problem(
            rule="batch",
            text=f"global batch {batch} is no multiple of dp = {dp}; dp of {' or '.join(map(str, sorted(near)))} would "
            f"do, or a batch of {' or '.join(map(str, batches))}",
        )
    elif batch != dp * size * candidate.num_micro_batches:
        yield Problem(
            rule="batch",
            text=f"micro-batch {size} × {candidate.num_micro_batches} micro-batches × dp {dp} = "
            f"{dp * size * candidate.num_micro_batches}, not the global batch {batch}",
        )
    if candidate.schedule == "interleaved" and candidate.num_micro_batches % candidate.pp:
        yield Problem(
            rule="schedule",
            text=f"schedule 'interleaved' runs groups of pp = {candidate.pp} micro-batches, and "
            f"{candidate.num_micro_batches} is no multiple of it; 1f1b takes any number",
        )


def state_problems(job: Job, candidate: Candidate) -> Iterator[Problem]:
    """Of how state is cut: ZeRO stage, shard_size, and what the optimizer needs."""
    stage = candidate.zero_stage
    if stage == 0 and candidate.dp_shard > 1:
        yield Problem(rule="sharding", text=f"zero_stage 0 cuts nothing: shard_size is 1, not {candidate.dp_shard}")
    if stage > 0 and candidate.dp_shard * candidate.cp == 1 and candidate.offload != "parameters":
        yield Problem(rule="sharding", text=f"zero_stage {stage} with shard_size 1 cuts nothing: use stage 0")
    if not job.optimizer.is_element_wise:
        if stage == 3:
            yield Problem(
                rule="optimizer",
                text=f"{job.optimizer.name} needs whole parameters, and stage 3 keeps none: use stage 1 or 2",
            )
        if candidate.tp > 1:
            yield Problem(
                rule="optimizer",
                text=f"{job.optimizer.name} needs whole parameters, and tp = {candidate.tp} cuts them: use tp = 1",
            )
    if candidate.offload == "parameters" and stage < 3:
        yield Problem(
            rule="sharding",
            text=f"offload 'parameters' with zero_stage {stage}: what can lie in host memory are cut parameters, which "
            "only stage 3 has; use stage 3, or offload 'optimizer'",
        )
    if candidate.is_offloaded and job.cluster.device.is_processor:
        yield Problem(
            rule="offload",
            text=f"offload {candidate.offload!r} on {job.cluster.name}: its devices are processors, whose memory is "
            "the host's, so nothing would be saved; use offload 'none'",
        )
    if stage < 2 and candidate.grad_reduce == "every_micro_batch":
        yield Problem(rule="sharding", text=f"stage {stage} reduces gradients once per step: last_micro_batch")
    if stage < 3 and candidate.reshard_after == "run":
        yield Problem(rule="sharding", text=f"stage {stage} keeps parameters whole: reshard_after does nothing")


def not_built(candidate: Candidate) -> Iterator[Problem]:
    for name, value, plain in (
        ("cp", candidate.cp, 1),
        ("ep", candidate.ep, 1),
        ("recompute", candidate.recompute if candidate.recompute == "core_attention" else None, None),
    ):
        if value != plain:
            yield Problem(
                rule="not built",
                text=f"{name} = {value}: this version of hybrid cannot run it; --all prices it nevertheless",
            )
