"""Seconds that one pipeline rank spends on its state: reducing gradients, gathering parameters, the optimizer step.

Messages run beside the compute of their phase: gradients beside the last backward, the units of stage 3 beside the
compute of the unit before. What runs beside compute is hidden, but slows it by `Software.contention`; the last message
has nothing left to hide behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.contracts.cluster import GroupLinks
from hybrid.contracts.partition import plan_buckets
from hybrid.planner.action_numbers import gathers_of_runs
from hybrid.planner.collectives import Collective, Fabric, collective_seconds
from hybrid.planner.job import Candidate, Job, Precision
from hybrid.planner.model_spec import UnitSpec
from hybrid.planner.software import Software
from hybrid.planner.traffic import StateMessage, gather_message, reduction_message, replica_message

__all__ = ["ChunkState", "StateLinks", "StateMessages", "StateSeconds", "UnitWaits", "chunk_state", "state_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLinks:
    """Links of the groups over which state is cut (`shard`), over which it is repeated (`replica`), and of both."""

    shard: GroupLinks | None
    replica: GroupLinks | None
    whole: GroupLinks | None

    @property
    def num_shards(self) -> int:
        return self.shard.size if self.shard else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkState:
    """Elements of a chunk that are trained, on one rank before data parallel cuts them.

    Args:
        dense, expert: of all parameters but those of experts, and of these.
        frozen, frozen_expert: as these, of those that are not trained: stage 3 gathers them too.
        frozen_behind, frozen_expert_behind: those of them that a backward needs.
        tied: of the dense ones those that are tied to a parameter of another chunk.
        num_units: units.
        num_buckets: into which the runtime lays the dense ones.
    """

    dense: int
    expert: int
    tied: int
    num_units: int
    num_buckets: int
    frozen: int = 0
    frozen_expert: int = 0
    frozen_behind: int = 0
    frozen_expert_behind: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSeconds:
    """Args:
    forward_gathers, backward_gathers, reductions: per chunk: what a forward and a backward of one micro-batch wait for.
    last_reduction: exposed behind the last backward, beside what `reductions` has of it.
    gather: of parameters behind the step, exposed.
    optimizer: norm, clipping and update.
    """

    forward_gathers: tuple[float, ...]
    backward_gathers: tuple[float, ...]
    reductions: tuple[float, ...]
    last_reduction: float
    gather: float
    optimizer: float


def chunk_state(units: Sequence[UnitSpec], *, tp: int, ep: int, job: Job) -> ChunkState:
    """A tied parameter counts once in a chunk."""
    seen: set[str] = set()
    dense = expert = tied = 0
    frozen = {False: 0, True: 0}
    behind = {False: 0, True: 0}
    sizes: list[tuple[tuple[str, int], ...]] = []
    for unit in units:
        own = []
        for parameter in unit.parameters:
            if parameter.tied_to in seen:
                continue
            seen.add(parameter.tied_to or f"{unit.name}.{parameter.name}")
            elements = parameter.local_elements(tp, ep=ep)
            if not parameter.trainable:
                frozen[parameter.is_expert] += elements
                behind[parameter.is_expert] += elements * unit.has_backward
                continue
            if parameter.is_expert:
                expert += elements
            else:
                dense += elements
                tied += elements if parameter.tied_to else 0
                own.append((parameter.name, elements * job.precision.parameter))
        sizes.append(tuple(reversed(own)))
    buckets = plan_buckets(sizes[::-1], bucket_bytes=job.bucket_bytes)
    return ChunkState(
        dense=dense, expert=expert, tied=tied, num_units=len(sizes), num_buckets=len(buckets),
        frozen=frozen[False], frozen_expert=frozen[True],
        frozen_behind=behind[False], frozen_expert_behind=behind[True],
    )  # fmt: skip


def state_seconds(
    job: Job,
    candidate: Candidate,
    *,
    software: Software,
    fabric: Fabric,
    chunks: Sequence[ChunkState],
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    dense: StateLinks,
    expert: StateLinks,
    weight_seconds: Sequence[float] | None = None,
    gathered_again: int = 0,
    known_waits: dict[tuple[object, ...], UnitWaits] | None = None,
    known_messages: dict[tuple[object, ...], StateMessages] | None = None,
) -> StateSeconds:
    """Of one pipeline rank; chunks and their compute per micro-batch in the order of the model.

    Args:
        weight_seconds: what of a backward computes gradients of weights apart from it, where the schedule splits it.
        gathered_again: bytes of parameters that a forward gathers once more: they take what the first gathers take.
        known_waits, known_messages: what was worked out before for chunks and links that are still these objects; grow.
    """
    traffic = _Traffic(job, candidate, software, fabric, chunks)
    kinds = [(sum(c.dense for c in chunks), dense)]
    if any(c.expert for c in chunks):
        kinds.append((sum(c.expert for c in chunks), expert))
    stage = candidate.zero_stage
    optimizer = sum(_optimizer_seconds(size, links, job, candidate, software) for size, links in kinds)
    none = (0.0,) * len(chunks)
    if dense.whole is None and expert.whole is None and candidate.offload != "parameters":
        return StateSeconds(
            forward_gathers=none, backward_gathers=none, reductions=none, last_reduction=0.0, gather=0.0,
            optimizer=optimizer,
        )  # fmt: skip

    ahead, back = none, none
    # Gradients come out of the second half of a backward that is split.
    behind = backward_seconds if weight_seconds is None else weight_seconds
    window = sum(behind) * software.dp_overlap_fraction if candidate.is_overlapped else 0.0
    if stage == 3:
        known = {} if known_waits is None else known_waits
        waits = []
        for chunk, forward, backward in zip(chunks, forward_seconds, backward_seconds, strict=True):
            comes_from_host = candidate.offload == "parameters"
            key = (id(chunk), forward, backward, id(dense.shard), id(expert.shard), comes_from_host)
            wait = known.get(key)
            if wait is None:
                wait = known[key] = traffic.gathered_units(chunk, dense, expert, forward, backward)
            waits.append(wait)
        per_forward = per_backward = 1.0
        if candidate.reshard_after == "run":
            per_forward, per_backward = gathers_of_runs(
                candidate.schedule, candidate.pp, candidate.num_micro_batches, candidate.virtual_stages
            )
        if gathered_again:
            whole = sum(c.dense + c.frozen + c.expert + c.frozen_expert for c in chunks) * job.precision.parameter
            per_forward *= 1.0 + gathered_again / whole
        ahead = tuple(wait.forward * per_forward for wait in waits)
        back = tuple(wait.backward * per_backward for wait in waits)
        if weight_seconds is None:
            window = max(0.0, window - per_backward * sum(wait.hidden for wait in waits))

    messages = traffic.messages(kinds, {} if known_messages is None else known_messages)
    each = traffic.exposed(messages.reduction, window)
    last = traffic.exposed(messages.reduction + messages.replicas, window)
    reductions = none
    if stage >= 2 and candidate.grad_reduce == "every_micro_batch":
        reductions = (each / len(chunks),) * len(chunks)
        last -= each
    gather = 0.0
    if stage in {1, 2}:
        total = messages.gather
        gather = total - min(total, software.gather_overlap_fraction * sum(forward_seconds))
    return StateSeconds(
        forward_gathers=ahead, backward_gathers=back, reductions=reductions, last_reduction=last, gather=gather,
        optimizer=optimizer,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Message:
    """Seconds of all messages of a kind, and of one."""

    total: float
    one: float


@dataclass(frozen=True, slots=True)
class StateMessages:
    """Of dense parameters and of experts: gradients over shards and over replicas; `gather`: seconds of all
    parameters once, under stages 1 and 2."""

    reduction: tuple[_Message, ...]
    replicas: tuple[_Message, ...]
    gather: float


@dataclass(frozen=True, slots=True)
class UnitWaits:
    """What a forward and a backward of a chunk wait for; `hidden`: of the backward gathers, behind compute."""

    forward: float
    backward: float
    hidden: float


class _Traffic:
    """Prices what data-parallel ranks send each other."""

    def __init__(
        self, job: Job, candidate: Candidate, software: Software, fabric: Fabric, chunks: Sequence[ChunkState]
    ) -> None:
        self._candidate = candidate
        self._software = software
        self._fabric = fabric
        self._precision = job.precision
        self._host_rate = job.cluster.device.host_bytes_per_second
        self._num_buckets = sum(chunk.num_buckets for chunk in chunks)
        self._num_units = sum(chunk.num_units for chunk in chunks)

    def messages(
        self, kinds: Sequence[tuple[float, StateLinks]], known: dict[tuple[object, ...], StateMessages]
    ) -> StateMessages:
        """What does not depend on compute: many candidates have the same.

        Args:
            known: by all that it depends on; links are told by their id.
        """
        stage = self._candidate.zero_stage
        key: tuple[object, ...] = (stage, self._candidate.is_overlapped, self._num_buckets, self._num_units)
        for size, links in kinds:
            key += (size, id(links.shard), id(links.replica), id(links.whole))
        found = known.get(key)
        if found is None:
            found = known[key] = StateMessages(
                tuple(self.reduction(size, links) for size, links in kinds),
                tuple(self.over_replicas(size, links) for size, links in kinds),
                sum(self.gather(size, links) for size, links in kinds) if stage in {1, 2} else 0.0,
            )
        return found

    def reduction(self, elements: float, links: StateLinks) -> _Message:
        """All gradients once."""
        stage = self._candidate.zero_stage
        message = reduction_message(elements, self._precision, zero_stage=stage)
        if stage == 0:
            return self._bucketed(message, links.whole)
        return self._owned(self._bucketed(message, links.shard), links.shard)

    def over_replicas(self, elements: float, links: StateLinks) -> _Message:
        """Shards summed over their replicas, once per step."""
        stage, shards = self._candidate.zero_stage, links.num_shards
        message = replica_message(elements, self._precision, zero_stage=stage, num_shards=shards)
        return self._bucketed(message, links.replica)

    def gather(self, elements: float, links: StateLinks) -> float:
        """All parameters once."""
        message = self._bucketed(gather_message(elements, self._precision), links.shard)
        return self._owned(message, links.shard).total

    def gathered_units(
        self, chunk: ChunkState, dense: StateLinks, expert: StateLinks, forward: float, backward: float
    ) -> UnitWaits:
        """Stage 3: each unit is gathered while the one before computes, in a forward and again in a backward."""
        count = max(1, chunk.num_units)
        messages = self._software.unit_messages or max(1.0, chunk.num_buckets / count)
        share, slowed = self._software.unit_overlap_fraction, self._software.contention - 1.0
        waits, behind = [], []
        ahead = (chunk.dense + chunk.frozen, chunk.expert + chunk.frozen_expert)
        back = (chunk.dense + chunk.frozen_behind, chunk.expert + chunk.frozen_expert_behind)
        for sizes, compute in ((ahead, forward), (back, backward)):
            gather = messages * sum(
                self._seconds(
                    "all_gather", gather_message(size, self._precision).num_bytes / count / messages, links.shard
                )
                for size, links in zip(sizes, (dense, expert), strict=True)
            )
            if self._candidate.offload == "parameters":  # own shards come from the host, and are gathered then
                own = sum(size / links.num_shards for size, links in zip(sizes, (dense, expert), strict=True))
                gather += own * self._precision.parameter / count / self._host_rate
            hidden = min(gather, compute / count * share)
            waits.append(gather + (count - 1) * (gather - hidden + slowed * hidden))
            behind.append(hidden)
        return UnitWaits(waits[0], waits[1], (count - 1) * behind[1])

    def exposed(self, messages: Sequence[_Message], window: float) -> float:
        """What `window` seconds of compute do not hide, and what they are slowed by."""
        total = sum(message.total for message in messages)
        last = max((message.one for message in messages), default=0.0)
        hidden = min(max(0.0, total - last), window)
        return total - hidden + (self._software.contention - 1.0) * hidden

    def _bucketed(self, message: StateMessage, links: GroupLinks | None) -> _Message:
        if links is None or message.num_bytes <= 0:
            return _Message(0.0, 0.0)
        software, count = self._software, 1
        if self._candidate.is_overlapped:
            size = software.dp_bucket_bytes
            count = max(1, round(message.num_bytes / size)) if size else max(1, self._num_buckets)
        if self._candidate.zero_stage == 3:
            count = max(count, round(self._num_units * software.unit_messages))
        one = self._seconds(message.kind, message.num_bytes / count, links)
        return _Message(one * count, one)

    def _owned(self, message: _Message, links: GroupLinks | None) -> _Message:
        """With what starting one message per owner takes, where a stack does that."""
        extra = self._software.owner_seconds * links.size if links is not None and message.total else 0.0
        return _Message(message.total + extra, message.one + extra)

    def _seconds(self, kind: Collective, size: float, links: GroupLinks | None) -> float:
        return collective_seconds(kind, size, links, fabric=self._fabric, software=self._software)


def _optimizer_seconds(elements: float, links: StateLinks, job: Job, candidate: Candidate, software: Software) -> float:
    """Memory traffic of a rank's part: gradients twice (norm, update), masters and state read and written, parameters
    written. With state on the host: gradients and parameters over the host's link (docs/offload.md, "Bytes per step"),
    the rest in its memory."""
    owned = elements / links.num_shards if candidate.zero_stage else elements
    precision, device = job.precision, job.cluster.device
    master = precision.master or precision.parameter
    kept = 2 * master + 2 * job.optimizer.state
    passed = 2 * precision.gradient + precision.parameter
    if candidate.is_offloaded:
        link = _host_link_bytes(precision, candidate) / device.host_bytes_per_second
        return owned * (link + (kept + passed) / software.host_memory_bytes_per_second)
    rate = device.memory_bytes_per_second * software.optimizer_memory_fraction
    return owned * (kept + passed + software.optimizer_bytes) / rate


def _host_link_bytes(precision: Precision, candidate: Candidate) -> float:
    """Per own element: gradients to the host once per reduction, parameters there before the update where they may have
    been edited, and back after it; under `parameters` these come with each gather instead, which is priced there."""
    reduces_each_time = candidate.zero_stage >= 2 and candidate.grad_reduce == "every_micro_batch"
    # What is summed over replicas stays on the device until the step.
    if reduces_each_time and candidate.dp_replicate == 1:
        gradients = candidate.num_micro_batches * precision.reduce
    else:
        gradients = precision.reduce if candidate.dp_replicate == 1 else precision.gradient
    if candidate.offload == "parameters":
        return gradients
    is_known_there = candidate.zero_stage == 3 and precision.master > 0
    return gradients + precision.parameter * (1 if is_known_there else 2)
