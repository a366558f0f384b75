"""Prices the layouts of one job, keeping what they have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybrid.contracts.schedule import make_schedule
from hybrid.contracts.schedule_timing import Timeline, time_schedule
from hybrid.planner.axis_links import axis_links
from hybrid.planner.collectives import collective_seconds, measured_fabric
from hybrid.planner.data_parallel import ChunkState, StateLinks, StateSeconds, chunk_state, state_seconds
from hybrid.planner.job import Candidate, Job
from hybrid.planner.model_spec import UnitSpec
from hybrid.planner.pipeline_time import pipeline_seconds
from hybrid.planner.software import software_of
from hybrid.planner.stages import stage_units
from hybrid.planner.unit_time import UnitSeconds, UnitSetting, unit_time

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


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Of one chunk and micro-batch; `parts` of forward and backward together."""

    forward: float
    backward: float
    parts: tuple[tuple[str, float], ...]
    state: ChunkState


class Pricer:
    """Prices candidates of one job. Not for use from several threads at once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.software = software_of(job.software) if isinstance(job.software, str) else job.software
        self._fabric = measured_fabric(job.cluster, self.software)
        self._links = axis_links(job.cluster)
        looks: dict[object, int] = {}
        self._look = {id(unit): looks.setdefault(unit.look, len(looks)) for unit in job.model.units}
        self._units: dict[tuple[object, ...], UnitSeconds] = {}
        self._chunks: dict[tuple[object, ...], _Chunk] = {}
        # With the stages, which are known by their id, so that it stays theirs.
        self._priced: dict[tuple[object, ...], tuple[object, list[_Chunk]]] = {}
        self._states: dict[tuple[object, ...], ChunkState] = {}
        self._plain_ends: dict[tuple[object, ...], tuple[float, ...]] = {}

    def least_seconds(self, candidate: Candidate) -> float:
        """Not more than `price` gives.

        What a rank waits for its state makes no action shorter, so that it ends no sooner than without, nor sooner
        than it can do its own work.
        """
        p, m = candidate.pp, candidate.num_micro_batches
        chunks = self._priced_chunks(candidate)
        states = self._state_of_ranks(chunks, candidate)
        forward, backward = _with_waits(chunks, states)
        ends = self._ends_without_waits(candidate, chunks)
        ready = max(
            max(ends[rank], m * sum(forward[c] + backward[c] for c in range(rank, len(chunks), p)))
            + state.last_reduction
            for rank, state in enumerate(states)
        )
        after = max(state.optimizer + state.gather for state in states)
        return (ready + after + self.software.step_seconds) * _ROUNDED

    def _ends_without_waits(self, candidate: Candidate, chunks: Sequence[_Chunk]) -> tuple[float, ...]:
        key: tuple[object, ...] = (candidate.schedule, candidate.pp, candidate.virtual_stages)
        key = (*key, candidate.num_micro_batches, *map(id, chunks))
        known = self._plain_ends.get(key)
        if known is None:
            known = self._play(candidate, [c.forward for c in chunks], [c.backward for c in chunks])
            self._plain_ends[key] = known
        return known

    def price(self, candidate: Candidate) -> Priced:
        p, m = candidate.pp, candidate.num_micro_batches
        chunks = self._priced_chunks(candidate)
        size = len(chunks)
        ranks = range(p)
        states = self._state_of_ranks(chunks, candidate)
        forward, backward = _with_waits(chunks, states)
        own = [m * sum(forward[c] + backward[c] for c in range(rank, size, p)) for rank in ranks]
        is_waiting = forward != [c.forward for c in chunks] or backward != [c.backward for c in chunks]
        ends = self._play(candidate, forward, backward) if is_waiting else self._ends_without_waits(candidate, chunks)
        shown, delays = self._messages(candidate, size)
        ready = [end + state.last_reduction for end, state in zip(ends, states, strict=True)]
        tied = self._tied_seconds(chunks[-1], candidate)
        if tied:
            ready[0] = ready[-1] = max(ready[0], ready[-1]) + tied
        last = max(ranks, key=lambda rank: ready[rank])

        parts = dict.fromkeys(PARTS, 0.0)
        state = states[last]
        for chunk in chunks[last::p]:
            for name, seconds in chunk.parts:
                parts[name] += m * seconds
        parts["gather_exposed"] += m * (sum(state.forward_gathers) + sum(state.backward_gathers))
        parts["dp_exposed"] += m * sum(state.reductions) + state.last_reduction
        idle = ready[last] - state.last_reduction - own[last]
        if tied and last in {0, p - 1}:
            parts["dp_exposed"] += tied
            idle -= tied
        if p > 1:
            # Waiting that messages make: what shows of each, and one way forth and back to fill and drain the pipeline.
            moved = m * sum(shown[c] for c in range(last, size, p)) + 2 * sum(delays)
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
        forward, backward = _with_waits(chunks, self._state_of_ranks(chunks, candidate))
        shown, delays = self._messages(candidate, len(chunks))
        schedule = make_schedule(
            candidate.schedule,
            num_stages=candidate.pp,
            num_micro_batches=candidate.num_micro_batches,
            virtual_stages=candidate.virtual_stages,
        )
        return time_schedule(
            schedule,
            forward_seconds=[a + b / 2 for a, b in zip(forward, shown, strict=True)],
            backward_seconds=[a + b / 2 for a, b in zip(backward, shown, strict=True)],
            transfer_seconds=delays,
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
            tp_links=self._links.of(candidate, ("tp",)),
            cp_links=self._links.of(candidate, ("cp",)),
            ep_links=self._links.of_experts(candidate, is_data_parallel=False),
        )

    def _key(self, candidate: Candidate) -> tuple[object, ...]:
        """All that the time of a unit depends on."""
        c = candidate
        links = (
            self._links.of(c, ("tp",)),
            self._links.of(c, ("cp",)),
            self._links.of_experts(c, is_data_parallel=False),
        )
        return (c.micro_batch_size, c.tp, c.cp, c.ep, c.sequence_parallel, c.recompute, *map(id, links))

    def _unit(self, unit: UnitSpec, setting: UnitSetting, key: tuple[object, ...]) -> UnitSeconds:
        own = (self._look[id(unit)], key)
        known = self._units.get(own)
        if known is None:
            known = self._units[own] = unit_time(unit, setting)
        return known

    def _priced_chunks(self, candidate: Candidate) -> list[_Chunk]:
        key = self._key(candidate)
        stages = stage_units(self.job, candidate)
        known = self._priced.get((id(stages), key))
        if known is None:
            setting: UnitSetting | None = None
            found = []
            for units in stages:
                looks = tuple(self._look[id(unit)] for unit in units)
                chunk = self._chunks.get((looks, key))
                if chunk is None:
                    setting = setting or self._setting(candidate)
                    chunk = self._chunks[looks, key] = self._chunk(units, looks, setting, key)
                found.append(chunk)
            known = self._priced[id(stages), key] = stages, found
        return known[1]

    def _chunk(
        self, units: Sequence[UnitSpec], looks: tuple[int, ...], setting: UnitSetting, key: tuple[object, ...]
    ) -> _Chunk:
        parts = dict.fromkeys(PARTS, 0.0)
        fixed = self.software.micro_batch_seconds
        forward = backward = fixed
        parts["host"] = 2 * fixed
        first = dict(zip(reversed(looks), reversed(units), strict=True))
        for look, unit in first.items():
            seconds, times = self._unit(unit, setting, key), looks.count(look)
            forward += times * seconds.forward.total
            backward += times * seconds.backward_total
            for phase in (seconds.forward, seconds.backward):
                parts["compute"] += times * phase.compute
                parts["attention"] += times * phase.attention
                parts["elementwise"] += times * phase.elementwise
                parts["host"] += times * phase.host
                parts["tp_exposed"] += times * phase.tp
                parts["cp_exposed"] += times * phase.cp
                parts["ep_exposed"] += times * phase.ep
            parts["recompute"] += times * seconds.recompute
        place = (looks, setting.tp, setting.ep)
        state = self._states.get(place)
        if state is None:
            state = self._states[place] = chunk_state(units, tp=setting.tp, ep=setting.ep, job=self.job)
        added = (state.dense + state.expert) * self.software.accumulate_bytes
        added /= setting.device.memory_bytes_per_second * self.software.memory_fraction
        backward += added
        parts["elementwise"] += added
        return _Chunk(forward, backward, tuple((name, value) for name, value in parts.items() if value), state)

    # ---------------------------------------------------------------- state

    def _state_of_ranks(self, chunks: Sequence[_Chunk], candidate: Candidate) -> list[StateSeconds]:
        """Per pipeline rank; ranks with equal chunks share it."""
        known: dict[tuple[int, ...], StateSeconds] = {}
        found = []
        for rank in range(candidate.pp):
            own = chunks[rank :: candidate.pp]
            place = tuple(map(id, own))
            if place not in known:
                known[place] = self._state(own, candidate)
            found.append(known[place])
        return found

    def _state(self, chunks: Sequence[_Chunk], candidate: Candidate) -> StateSeconds:
        over_experts = self._links.of_experts(candidate, is_data_parallel=True)
        return state_seconds(
            self.job,
            candidate,
            software=self.software,
            fabric=self._fabric,
            chunks=[chunk.state for chunk in chunks],
            forward_seconds=[chunk.forward for chunk in chunks],
            backward_seconds=[chunk.backward for chunk in chunks],
            dense=StateLinks(
                shard=self._links.of(candidate, ("dp_shard", "cp")),
                replica=self._links.of(candidate, ("dp_replicate",)),
                whole=self._links.of(candidate, ("dp_replicate", "dp_shard", "cp")),
            ),
            expert=StateLinks(shard=over_experts, replica=None, whole=over_experts),
        )

    def _tied_seconds(self, last: _Chunk, candidate: Candidate) -> float:
        """Gradients of a weight that the first and the last stage hold, summed once per step."""
        if candidate.pp == 1 or not last.state.tied:
            return 0.0
        links = self._links.of_stages(candidate, 0, candidate.pp - 1)
        shards = candidate.dp_shard * candidate.cp if candidate.zero_stage else 1
        size = last.state.tied * self.job.precision.reduce / shards
        return collective_seconds("all_reduce", size, links, fabric=self._fabric, software=self.software)

    # ---------------------------------------------------------------- pipeline

    def _messages(self, candidate: Candidate, num_chunks: int) -> tuple[list[float], list[float]]:
        """What each chunk waits for its messages per micro-batch, and what delays the others at each cut."""
        transfers = self._transfers(candidate, num_chunks)
        share = self.software.pp_exposed_fraction
        shown = [0.0] * num_chunks
        for cut, seconds in enumerate(transfers):
            for chunk in (cut, cut + 1):
                shown[chunk] += seconds * share
        return shown, [seconds * (1 - share) for seconds in transfers]

    def _play(self, candidate: Candidate, forward: Sequence[float], backward: Sequence[float]) -> tuple[float, ...]:
        """When each rank ends."""
        shown, delays = self._messages(candidate, len(forward))
        return pipeline_seconds(
            candidate.schedule,
            num_stages=candidate.pp,
            num_micro_batches=candidate.num_micro_batches,
            virtual_stages=candidate.virtual_stages,
            forward_seconds=[a + b / 2 for a, b in zip(forward, shown, strict=True)],
            backward_seconds=[a + b / 2 for a, b in zip(backward, shown, strict=True)],
            transfer_seconds=delays,
        ).end_seconds

    def _transfers(self, candidate: Candidate, num_chunks: int) -> list[float]:
        """Seconds of one message over each cut between chunks."""
        if candidate.pp == 1:
            return []
        job, software = self.job, self.software
        size = candidate.micro_batch_size * job.seq / candidate.cp * job.model.hidden * job.precision.activation
        gather = 0.0
        tp_links = self._links.of(candidate, ("tp",))
        if tp_links is not None and (candidate.sequence_parallel or software.is_scatter_gather):
            if not candidate.sequence_parallel:
                gather = collective_seconds("all_gather", size, tp_links, fabric=self._fabric, software=software)
            size /= candidate.tp
        links = [self._links.of_boundary(candidate, cut) for cut in range(num_chunks - 1)]
        seconds = {
            id(link): collective_seconds("send", size, link, fabric=self._fabric, software=software) for link in links
        }
        return [seconds[id(link)] + gather for link in links]


def _with_waits(chunks: Sequence[_Chunk], states: Sequence[StateSeconds]) -> tuple[list[float], list[float]]:
    """Forward and backward of each chunk and micro-batch, with what they wait for gathers and reductions."""
    p = len(states)
    forward = [chunk.forward + states[c % p].forward_gathers[c // p] for c, chunk in enumerate(chunks)]
    backward = [
        chunk.backward + states[c % p].backward_gathers[c // p] + states[c % p].reductions[c // p]
        for c, chunk in enumerate(chunks)
    ]
    return forward, backward
