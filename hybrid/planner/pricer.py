"""Prices the layouts of one job, keeping what they have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybrid.contracts.chunk_placement import ChunkPlacement
from hybrid.contracts.schedule import make_schedule
from hybrid.contracts.schedule_choice import schedule_placement, schedule_splits_backward
from hybrid.contracts.schedule_timing import Timeline, time_schedule
from hybrid.planner.axis_links import axis_links
from hybrid.planner.chunk_kinds import ChunkKind, ChunkKinds
from hybrid.planner.chunk_seconds import ChunkSeconds, PricedChunk, placed
from hybrid.planner.collectives import collective_seconds, measured_fabric
from hybrid.planner.data_parallel import (
    ChunkState,
    StateLinks,
    StateMessages,
    StateSeconds,
    UnitWaits,
    chunk_state,
    state_seconds,
)
from hybrid.planner.job import Candidate, Job
from hybrid.planner.memory import gathered_again
from hybrid.planner.model_spec import UnitSpec
from hybrid.planner.pipeline_time import pipeline_seconds
from hybrid.planner.rank_kinds import RankKinds, rank_kinds
from hybrid.planner.software import software_of
from hybrid.planner.stage_messages import StageMessages
from hybrid.planner.stages import stage_units
from hybrid.planner.unit_time import UnitSeconds, UnitSetting, recomputing, unit_time

__all__ = ["PARTS", "Priced", "Pricer"]

#: In the order in which tables show them.
PARTS = (
    "compute", "attention", "elementwise", "host", "recompute", "tp_exposed", "cp_exposed", "ep_exposed",
    "pp_bubble", "pp_transfer", "dp_exposed", "gather_exposed", "optimizer", "overhead",
)  # fmt: skip


# A bound is added up in another order than what it bounds.
_ROUNDED = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class Priced:
    """`parts` of the pipeline rank that is ready last; `stage_seconds` per rank: work on its micro-batches."""

    parts: Mapping[str, float]
    stage_seconds: tuple[float, ...]


class Pricer:
    """Prices candidates of one job. Not for use from several threads at once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.software = software_of(job.software) if isinstance(job.software, str) else job.software
        self._fabric = measured_fabric(job.cluster, self.software)
        self._links = axis_links(job.cluster)
        # A product is put off where it is written into a buffer of its own type.
        precision = job.precision
        is_written = precision.gradient == precision.parameter == precision.activation
        self._is_gradient_first = self.software.is_gradient_first > 0 and is_written
        looks: dict[object, int] = {}
        self._look = {id(unit): looks.setdefault(unit.look, len(looks)) for unit in job.model.units}
        self._units: dict[tuple[object, ...], UnitSeconds] = {}
        self._messages = StageMessages(job, self.software, self._fabric, self._links)
        self._chunks: dict[tuple[object, ...], PricedChunk] = {}
        self._kinds = ChunkKinds(self._look)
        # With the stages, which are known by their id, so that it stays theirs.
        self._priced: dict[tuple[object, ...], tuple[object, list[PricedChunk]]] = {}
        self._states: dict[tuple[object, ...], ChunkState] = {}
        self._of_ranks: dict[tuple[object, ...], RankKinds] = {}
        self._plain_ends: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._untied: dict[int, ChunkState] = {}
        self._known_states: dict[tuple[object, ...], StateSeconds] = {}
        self._unit_waits: dict[tuple[object, ...], UnitWaits] = {}
        self._state_messages: dict[tuple[object, ...], StateMessages] = {}

    def least_seconds(self, candidate: Candidate, *, is_played: bool) -> float:
        """Not more than `price` gives; from the schedule if `is_played`, else from what must come one behind the other.

        What a rank waits for its state makes no action shorter, so that it ends no sooner than without, nor sooner
        than the first micro-batch gets there and it has done its own work; and no sooner does the first rank than the
        last gradient has come back.
        """
        m = candidate.num_micro_batches
        chunks = self._priced_chunks(candidate)
        kinds = self._kinds_of_ranks(chunks, candidate)
        states = [self._state_of(own, is_whole, candidate) for own, is_whole in kinds.ranks]
        shown, delays = self._messages.of(candidate, len(chunks))
        is_split, is_shown = schedule_splits_backward(candidate.schedule), any(shown)
        places = placed(candidate, len(chunks))
        work, forward, backward, later = [], [], [], []
        for (own, _), state in zip(kinds.ranks, states, strict=True):
            waits = sum(state.forward_gathers) + sum(state.backward_gathers) + sum(state.reductions)
            work.append(m * (sum(chunk.forward + chunk.backward + chunk.weights for chunk in own) + waits))
            forward.append(own[0].forward + state.forward_gathers[0])
            backward.append(own[0].backward + state.backward_gathers[0] + state.reductions[0])
            later.append(own[0].later)
        ends = self._ends_without_waits(candidate, chunks) if is_played else (0.0,) * candidate.pp
        ready = head = tail = 0.0
        for rank, kind in enumerate(kinds.numbers):
            message = shown[rank] / 2 if is_shown else 0.0
            here = head + work[kind] + (m * sum(shown[at] for at in places[rank]) if is_shown else 0.0)
            ready = max(ready, max(here, ends[rank]) + states[kind].last_reduction)
            sent = max(0.0, tail - later[kind])  # the way back begins before its last backward ends
            ready = max(ready, here + sent + (states[kinds.numbers[0]].last_reduction if sent else 0.0))
            if rank < len(delays):
                head += forward[kind] + message + delays[rank]
                tail += 0.0 if is_split else backward[kind] - (later[kind] if rank else 0.0) + message + delays[rank]
        after = max(state.optimizer + state.gather for state in states)
        return (ready + after + self.software.step_seconds) * _ROUNDED

    def least_base_seconds(self, candidate: Candidate, *, is_played: bool) -> float:
        """Not more than `price` gives of any way to cut the state."""
        chunks = self._priced_chunks(candidate)
        ready = max(self._ends_without_waits(candidate, chunks)) if is_played else self._critical(candidate, chunks)
        return (ready + self.software.step_seconds) * _ROUNDED

    def _critical(self, candidate: Candidate, chunks: Sequence[PricedChunk]) -> float:
        """What the slowest rank needs for its work, the first micro-batch to get there, and the last gradient back.

        Where backward is split, a rank may end with weights, for which no other waits.
        """
        shown, delays = self._messages.of(candidate, len(chunks))
        is_split, m = schedule_splits_backward(candidate.schedule), candidate.num_micro_batches
        ranks = placed(candidate, len(chunks))
        # Equal chunks are one object: the work of ranks that have the same ones is added up once.
        work = {id(chunk): chunk.forward + chunk.backward + chunk.weights for chunk in chunks}
        of_ranks: dict[tuple[int, ...], float] = {}
        is_shown = any(shown)
        most = head = tail = 0.0
        for rank, own in enumerate(ranks):
            first = chunks[rank]
            forward, backward = first.forward, first.backward
            if is_shown:
                seconds = sum(work[id(chunks[at])] + shown[at] for at in own)
                forward, backward = forward + shown[rank] / 2, backward + shown[rank] / 2
            else:
                place = tuple([id(chunks[at]) for at in own])
                if place not in of_ranks:
                    of_ranks[place] = sum(map(work.__getitem__, place))
                seconds = of_ranks[place]
            # The way back begins before its last backward ends.
            here = head + m * seconds + max(0.0, tail - first.later)
            if here > most:
                most = here
            if rank < len(delays):
                head += forward + delays[rank]
                tail += 0.0 if is_split else backward - (first.later if rank else 0.0) + delays[rank]
        return most

    def _ends_without_waits(self, candidate: Candidate, chunks: Sequence[PricedChunk]) -> tuple[float, ...]:
        key: tuple[object, ...] = (candidate.schedule, candidate.pp, candidate.virtual_stages)
        key = (*key, candidate.num_micro_batches, *map(id, chunks))
        known = self._plain_ends.get(key)
        if known is None:
            known = self._plain_ends[key] = self._play(candidate, ChunkSeconds.plain(chunks))
        return known

    def price(self, candidate: Candidate) -> Priced:
        p, m = candidate.pp, candidate.num_micro_batches
        chunks = self._priced_chunks(candidate)
        mine = placed(candidate, len(chunks))
        states = self._state_of_ranks(chunks, candidate, self._gathered_again(candidate))
        plain, waiting = ChunkSeconds.plain(chunks), ChunkSeconds.waiting(chunks, states, candidate)
        own = [m * waiting.of_rank(chunks_here) for chunks_here in mine]
        ends = self._ends_without_waits(candidate, chunks) if waiting == plain else self._play(candidate, waiting)
        shown, delays = self._messages.of(candidate, len(chunks))
        ready = [end + state.last_reduction for end, state in zip(ends, states, strict=True)]
        tied = self._tied_seconds(chunks[-1], candidate)
        if tied:
            ready[0] = ready[-1] = max(ready[0], ready[-1]) + tied
        last = max(range(p), key=lambda rank: ready[rank])

        parts = dict.fromkeys(PARTS, 0.0)
        state = states[last]
        for place in mine[last]:
            for name, seconds in chunks[place].parts:
                parts[name] += m * seconds
        parts["gather_exposed"] += m * (sum(state.forward_gathers) + sum(state.backward_gathers))
        parts["dp_exposed"] += m * sum(state.reductions) + state.last_reduction
        idle = ready[last] - state.last_reduction - own[last]
        if tied and last in {0, p - 1}:
            parts["dp_exposed"] += tied
            idle -= tied
        if p > 1:
            # Waiting that messages make: what shows of each, and one way forth and back to fill and drain the pipeline.
            moved = m * sum(shown[c] for c in mine[last]) + 2 * sum(delays)
            parts["pp_transfer"] = min(idle, moved)
            parts["pp_bubble"] = idle - parts["pp_transfer"]
        after = max(states, key=lambda state: state.optimizer + state.gather)
        parts["optimizer"] = after.optimizer
        parts["gather_exposed"] += after.gather
        parts["overhead"] = self.software.step_seconds
        return Priced(parts, tuple(own))

    def units(self, candidate: Candidate) -> dict[str, UnitSeconds]:
        """Each unit's time for one micro-batch."""
        setting = self._setting(candidate)
        return {unit.name: self._unit(unit, setting, self._key(candidate)) for unit in self.job.model.units}

    def work_seconds(self, candidate: Candidate) -> float:
        """Forward and backward of one micro-batch through all units."""
        setting, key = self._setting(candidate), self._key(candidate)
        looks = {self._look[id(unit)]: unit for unit in self.job.model.units}
        seconds = {look: self._unit(unit, setting, key) for look, unit in looks.items()}
        totals = {look: unit.forward.total + unit.backward_total for look, unit in seconds.items()}
        return sum(totals[look] for look in map(self._look.__getitem__, map(id, self.job.model.units)))

    def timeline(self, candidate: Candidate) -> Timeline:
        """The schedule on the clock, every action by name."""
        chunks = self._priced_chunks(candidate)
        states = self._state_of_ranks(chunks, candidate, self._gathered_again(candidate))
        waiting = ChunkSeconds.waiting(chunks, states, candidate)
        shown, delays = self._messages.of(candidate, len(chunks))
        seconds = waiting.with_messages(shown)
        schedule = make_schedule(
            candidate.schedule,
            num_stages=candidate.pp,
            num_micro_batches=candidate.num_micro_batches,
            virtual_stages=candidate.virtual_stages,
        )
        return time_schedule(
            schedule,
            forward_seconds=seconds.forward,
            backward_seconds=[a + b for a, b in zip(seconds.backward, seconds.weights, strict=True)],
            input_seconds=seconds.backward,
            weight_seconds=seconds.weights,
            transfer_seconds=delays,
            later_seconds=seconds.later,
        )

    # ---------------------------------------------------------------- compute

    def _setting(self, candidate: Candidate) -> UnitSetting:
        job = self.job
        return UnitSetting(
            device=job.cluster.device,
            fabric=self._fabric,
            software=self.software,
            dtype=job.precision.compute,
            activation=job.precision.activation,
            hidden=job.model.hidden,
            batch=candidate.micro_batch_size,
            seq=job.seq,
            tp=candidate.tp,
            cp=candidate.cp,
            ep=candidate.ep,
            sequence_parallel=candidate.sequence_parallel,
            recompute=candidate.recompute,
            is_flash=job.is_flash,
            is_split=self._is_shown(candidate),
            is_gradient_first=self._is_gradient_first,
            is_pipeline_across=self._messages.is_across(candidate),
            tp_links=self._links.of(candidate, ("tp",)),
            cp_links=self._links.of(candidate, ("cp",)),
            ep_links=self._links.of_experts(candidate, is_data_parallel=False),
        )

    def _key(self, candidate: Candidate) -> tuple[object, ...]:
        """All that the time of a unit depends on."""
        c = candidate
        of = self._links.of
        links = of(c, ("tp",)), of(c, ("cp",)), self._links.of_experts(c, is_data_parallel=False)
        flags = self._is_shown(c), self._messages.is_across(c)
        return (c.micro_batch_size, c.tp, c.cp, c.ep, c.sequence_parallel, c.recompute, *flags, *map(id, links))

    def _is_shown(self, candidate: Candidate) -> bool:
        """Whether no product of a weight gradient hides what tensor parallel sends in a backward; usually one does."""
        return self.software.tp_backward_overlap_fraction > 0 and schedule_splits_backward(candidate.schedule)

    def _unit(self, unit: UnitSpec, setting: UnitSetting, key: tuple[object, ...]) -> UnitSeconds:
        own = (self._look[id(unit)], key)
        known = self._units.get(own)
        if known is None:
            # The phases are the same for each way to recompute.
            plain = (self._look[id(unit)], key[:5], key[6:])
            if plain not in self._units:
                self._units[plain] = unit_time(unit, setting)
            known = self._units[own] = recomputing(unit, self._units[plain], setting)
        return known

    def _priced_chunks(self, candidate: Candidate) -> list[PricedChunk]:
        key = self._key(candidate)
        is_split = schedule_splits_backward(candidate.schedule)
        stages = stage_units(self.job, candidate)
        known = self._priced.get((id(stages), is_split, key))
        if known is None:
            looks = self._kinds.of(stages)
            setting: UnitSetting | None = None
            found = {}
            for kind in looks.kinds:
                chunk = self._chunks.get((kind.number, is_split, key))
                if chunk is None:
                    setting = setting or self._setting(candidate)
                    chunk = self._chunks[kind.number, is_split, key] = self._chunk(
                        kind, setting, key, is_split=is_split
                    )
                found[kind.number] = chunk
            known = self._priced[id(stages), is_split, key] = stages, [found[number] for number in looks.numbers]
        return known[1]

    def _chunk(self, kind: ChunkKind, setting: UnitSetting, key: tuple[object, ...], *, is_split: bool) -> PricedChunk:
        parts = dict.fromkeys(PARTS, 0.0)
        fixed = self.software.micro_batch_seconds
        forward = backward = fixed
        weights, later = fixed if is_split else 0.0, 0.0
        parts["host"] = 2 * fixed + weights
        for unit, times in kind.counted:
            seconds = self._unit(unit, setting, key)
            forward += times * seconds.forward.total
            put_off, apart = (seconds.weights, seconds.apart) if is_split else (0.0, 0.0)
            backward += times * (seconds.backward_total - put_off + apart)
            parts["host"] += times * apart
            later += 0.0 if is_split else times * seconds.later
            weights += times * put_off
            for phase in (seconds.forward, seconds.backward):
                parts["compute"] += times * phase.compute
                parts["attention"] += times * phase.attention
                parts["elementwise"] += times * phase.elementwise
                parts["host"] += times * phase.host
                parts["tp_exposed"] += times * phase.tp
                parts["cp_exposed"] += times * phase.cp
                parts["ep_exposed"] += times * phase.ep
            parts["recompute"] += times * seconds.recompute
        place = (kind.number, setting.tp, setting.ep)
        state = self._states.get(place)
        if state is None:
            state = self._states[place] = chunk_state(kind.units, tp=setting.tp, ep=setting.ep, job=self.job)
        added = (state.dense + state.expert) * self.software.accumulate_bytes
        added /= setting.device.memory_bytes_per_second * self.software.memory_fraction
        if is_split:
            weights += added
        else:
            backward += added
        parts["elementwise"] += added
        own = tuple((name, value) for name, value in parts.items() if value)
        return PricedChunk(forward, backward, weights, later, own, state)

    # ---------------------------------------------------------------- state

    def _gathered_again(self, candidate: Candidate) -> tuple[int, ...]:
        """Bytes of each pipeline rank; none where a run of micro-batches keeps what is whole, or another stack gathers
        in its own way."""
        if candidate.zero_stage != 3 or candidate.reshard_after == "run" or self.software.unit_messages:
            return (0,) * candidate.pp
        return gathered_again(self.job, candidate)

    def _state_of_ranks(
        self, chunks: Sequence[PricedChunk], candidate: Candidate, again: Sequence[int]
    ) -> list[StateSeconds]:
        """Per pipeline rank; ranks with equal chunks share it. `again`: bytes that each gathers once more."""
        kinds = self._kinds_of_ranks(chunks, candidate)
        return [
            self._state_of(*kinds.ranks[kind], candidate, repeated)
            for kind, repeated in zip(kinds.numbers, again, strict=True)
        ]

    def _kinds_of_ranks(self, chunks: Sequence[PricedChunk], candidate: Candidate) -> RankKinds:
        """`chunks`: of `_priced_chunks`, which keeps them, so that their id stays theirs."""
        key = (id(chunks), candidate.pp, schedule_placement(candidate.schedule))
        known = self._of_ranks.get(key)
        if known is None:
            known = self._of_ranks[key] = rank_kinds(chunks, candidate)
        return known

    def _state_of(
        self, own: tuple[PricedChunk, ...], is_whole: bool, candidate: Candidate, repeated: int = 0
    ) -> StateSeconds:
        """Of a rank with these chunks; without `repeated` not more than with."""
        c = candidate
        run = (c.schedule, c.num_micro_batches) if c.reshard_after == "run" else ()
        key = (
            c.pp, c.dp_replicate, c.dp_shard, c.zero_stage, c.grad_reduce, run, c.is_overlapped, c.offload,
            is_whole, repeated, *map(id, own),
        )  # fmt: skip
        state = self._known_states.get(key)
        if state is None:
            parts = [chunk.state for chunk in own]
            if is_whole and parts[-1].tied:  # what is tied to the beginning lies on this rank once
                parts[-1] = self._without_ties(parts[-1])
            state = self._known_states[key] = self._state(own, parts, candidate, repeated)
        return state

    def _without_ties(self, state: ChunkState) -> ChunkState:
        if id(state) not in self._untied:
            self._untied[id(state)] = replace(state, dense=state.dense - state.tied, tied=0)
        return self._untied[id(state)]

    def _state(
        self, chunks: Sequence[PricedChunk], parts: Sequence[ChunkState], candidate: Candidate, repeated: int
    ) -> StateSeconds:
        over_experts = self._links.of_experts(candidate, is_data_parallel=True)
        return state_seconds(
            self.job,
            candidate,
            software=self.software,
            fabric=self._fabric,
            chunks=parts,
            forward_seconds=[chunk.forward for chunk in chunks],
            backward_seconds=[chunk.backward for chunk in chunks],
            weight_seconds=(
                [chunk.weights for chunk in chunks] if schedule_splits_backward(candidate.schedule) else None
            ),
            dense=StateLinks(
                shard=self._links.of(candidate, ("dp_shard", "cp")),
                replica=self._links.of(candidate, ("dp_replicate",)),
                whole=self._links.of(candidate, ("dp_replicate", "dp_shard", "cp")),
            ),
            expert=StateLinks(shard=over_experts, replica=None, whole=over_experts),
            gathered_again=repeated,
            known_waits=self._unit_waits,
            known_messages=self._state_messages,
        )

    def _tied_seconds(self, last: PricedChunk, candidate: Candidate) -> float:
        """Gradients of a weight that the first and the last stage hold, summed once per step."""
        if candidate.pp == 1 or not last.state.tied or schedule_placement(candidate.schedule) is ChunkPlacement.V:
            return 0.0
        links = self._links.of_stages(candidate, 0, candidate.pp - 1)
        shards = candidate.dp_shard * candidate.cp if candidate.zero_stage else 1
        size = last.state.tied * self.job.precision.reduce / shards
        return collective_seconds("all_reduce", size, links, fabric=self._fabric, software=self.software)

    # ---------------------------------------------------------------- pipeline

    def _play(self, candidate: Candidate, seconds: ChunkSeconds) -> tuple[float, ...]:
        """When each rank ends."""
        shown, delays = self._messages.of(candidate, len(seconds.forward))
        seconds = seconds.with_messages(shown)
        return pipeline_seconds(
            candidate.schedule,
            num_stages=candidate.pp,
            num_micro_batches=candidate.num_micro_batches,
            virtual_stages=candidate.virtual_stages,
            forward_seconds=seconds.forward,
            backward_seconds=seconds.backward,
            weight_seconds=seconds.weights if schedule_splits_backward(candidate.schedule) else (),
            transfer_seconds=delays,
            later_seconds=seconds.later,
        ).end_seconds
