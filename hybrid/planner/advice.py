"""What a person should know about the best plan: what binds, what is lost, what would change it, what to measure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hybrid.planner.cost import StepTime, least_step_seconds, step_time
from hybrid.planner.job import Candidate, Job
from hybrid.planner.memory import memory
from hybrid.planner.remedies import LOSSES, remedy
from hybrid.planner.request import Request
from hybrid.planner.rules import rule
from hybrid.planner.scaled import scaled_job
from hybrid.planner.search import Priced, SearchResult, fit_of
from hybrid.planner.unlock import unlocks
from hybrid.units import format_bytes

__all__ = ["COMMUNICATION", "Advice", "Sensitivity", "advise"]

#: Parts of a step in which a device waits for others.
COMMUNICATION = ("tp_exposed", "cp_exposed", "ep_exposed", "pp_transfer", "dp_exposed", "gather_exposed")
_COMMUNICATION_SHARE: float = rule("communication_share")
_STAGE_3_BITS_PER_SECOND: float = rule("stage_3_bits_per_second")
_CHANGE = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Args:
    what: the quantity that is changed.
    change: relative, such as -0.1.
    step_seconds: of the best plan then.
    best: label of the layout that is best then, among those ranked.
    """

    what: str
    change: float
    step_seconds: float
    best: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Args:
    binding: what keeps the best plan from being faster.
    loss: the largest part of the step that is no model computation.
    unlocks: what more memory would admit.
    sensitivities: of the ranking to 10 % either way.
    slow_device: what one device that is 10 % slower costs.
    notes: on stage, network and recompute.
    measure_first: labels of three layouts that differ, to be measured before a long run.
    """

    binding: str
    loss: str
    unlocks: tuple[str, ...]
    sensitivities: tuple[Sensitivity, ...]
    slow_device: str
    notes: tuple[str, ...]
    measure_first: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "binding": self.binding,
            "loss": self.loss,
            "unlocks": list(self.unlocks),
            "sensitivity": [
                {"what": one.what, "change": one.change, "step_seconds": one.step_seconds, "best": one.best}
                for one in self.sensitivities
            ],
            "slow_device": self.slow_device,
            "notes": list(self.notes),
            "measure_first": list(self.measure_first),
        }


def advise(request: Request, result: SearchResult) -> Advice:
    """About the best plan of a search."""
    best = result.found[0]
    time = best.time
    return Advice(
        binding=_binding(best, time),
        loss=_loss(request.job, best),
        unlocks=unlocks(result),
        sensitivities=tuple(_sensitivities(request.job, result)),
        slow_device=_slow_device(request.job, best),
        notes=tuple(_notes(request, result, time)),
        measure_first=measure_first(result.found),
    )


def _binding(best: Priced, time: StepTime) -> str:
    used = best.fit.needed_bytes / best.fit.limit_bytes
    return f"{time.binding}; memory {used:.0%} used at the accepted risk"


def _loss(job: Job, best: Priced) -> str:
    time = best.time
    lost = {name: seconds for name, seconds in time.parts.items() if name in LOSSES and seconds > 0}
    if not lost:
        return "nothing but computation"
    name = max(lost, key=lambda part: (lost[part], part))
    ways = remedy(name, job, best.candidate)
    return f"{LOSSES[name]}: {lost[name] / time.total_seconds:.0%} of the step; smaller with {ways}"


def _sensitivities(job: Job, result: SearchResult) -> Iterator[Sensitivity]:
    changes = {
        "speed of matrix products": "flops",
        "memory bandwidth": "memory",
        "links inside a node": "inside",
        "links between nodes": "across",
    }
    for what, name in changes.items():
        for change in (-_CHANGE, _CHANGE):
            changed = scaled_job(job, **{name: 1 + change})
            first, *others = (one.candidate for one in result.found)
            seconds = step_time(changed, first).total_seconds
            best = (seconds, first.label)
            for other in others:
                if least_step_seconds(changed, other, is_played=False) <= best[0]:  # else it is slower for sure
                    best = min(best, (step_time(changed, other).total_seconds, other.label))
            yield Sensitivity(what=what, change=change, step_seconds=seconds, best=best[1])


def _slow_device(job: Job, best: Priced) -> str:
    slower = step_time(scaled_job(job, flops=1 / (1 + _CHANGE), memory=1 / (1 + _CHANGE)), best.candidate)
    most = slower.total_seconds / best.time.total_seconds - 1
    if best.candidate.pp == 1:
        return f"one device 10 % slower makes every step {most:.1%} longer: all ranks wait for it"
    stages = sorted(best.time.stage_seconds)
    light, heavy = stages[0], stages[-1]
    least = max(0.0, light * (1 + _CHANGE) - heavy) / best.time.total_seconds
    return (
        f"one device 10 % slower makes a step up to {most:.1%} longer on the heaviest stage, about {least:.1%} on the "
        "lightest"
    )


def _notes(request: Request, result: SearchResult, time: StepTime) -> Iterator[str]:
    best = result.found[0]
    yield from _stage_notes(request, best.candidate)
    waiting = {name: time.parts.get(name, 0.0) for name in COMMUNICATION}
    share = sum(waiting.values()) / time.total_seconds
    if share > _COMMUNICATION_SHARE:
        name = max(waiting, key=lambda part: (waiting[part], part))
        yield (
            f"communication takes {share:.0%} of the step, above 30 %: the network is the bottleneck, first of all "
            f"{LOSSES[name]}; try {remedy(name, request.job, best.candidate)}"
        )
    if best.candidate.zero_stage == 3:
        if best.candidate.recompute == "none":
            lower = (one for one in result.found if one.candidate.zero_stage < 3)
            other = next((one for one in lower if one.candidate.recompute != "none"), None)
            if other is not None:
                longer = other.time.total_seconds / best.time.total_seconds - 1
                yield (
                    f"recompute comes before stage 3 where it is enough: {other.candidate.label} fits as well and "
                    f"takes {longer:.1%} longer"
                )
        bits = _bits_per_device(request.job, best.candidate)
        if bits is not None and bits < _STAGE_3_BITS_PER_SECOND:
            yield (
                f"stage 3 gathers every unit over {bits / 1e9:.0f} Gb/s per device; below about 25 Gb/s it is worth it "
                "only where nothing else fits"
            )
    if best.candidate.is_offloaded:
        kept = best.memory.fullest_host_bytes
        yield f"offload keeps {format_bytes(kept)} in the memory of one host: {request.host_words}"
    if best.candidate.tp > request.job.cluster.domain_size:
        yield (
            f"tp = {best.candidate.tp} crosses the fast links of {request.job.cluster.domain_size} devices: its sums "
            "in every layer run over the network"
        )


def _stage_notes(request: Request, best: Candidate) -> Iterator[str]:
    """Stage 1, 2, 3 by need: which is the first that fits with all else as it is."""
    if best.dp * best.cp == 1:
        return
    told = []
    for stage in range(4):
        size = 1 if stage == 0 else (best.dp_shard if best.dp_shard > 1 else best.dp)
        other = replace(
            best,
            zero_stage=stage,
            dp_shard=size,
            dp_replicate=best.dp // size,
            grad_reduce=best.grad_reduce if stage >= 2 else "last_micro_batch",
            reshard_after=best.reshard_after if stage == 3 else "unit",
        )
        if stage and size * best.cp == 1:
            continue
        fit = fit_of(request, memory(request.job, other))
        told.append(f"stage {stage} {format_bytes(fit.needed_bytes)}{'' if fit.fits else ' (does not fit)'}")
    yield f"memory of this layout by ZeRO stage: {', '.join(told)}"


def _bits_per_device(job: Job, candidate: Candidate) -> float | None:
    """Of the network, per device, for gathers; None where those that gather share fast links."""
    if job.cluster.num_domains == 1:
        return None
    links = job.cluster.axis_links(size=candidate.dp_shard * candidate.cp, stride=candidate.tp)
    if links.num_domains == 1:
        return None
    return 8 * links.across_bytes_per_second / links.ranks_per_domain


def measure_first(found: tuple[Priced, ...], number: int = 3) -> tuple[str, ...]:
    """The best, then the best that differ from those before: in degrees first, then in anything that computes."""
    chosen: list[Priced] = []
    for differs in (
        lambda one: (one.candidate.tp, one.candidate.pp, one.candidate.cp),
        lambda one: (one.candidate.micro_batch_size, one.candidate.recompute, one.candidate.virtual_stages),
        lambda one: one.candidate,
    ):
        for priced in found:
            if len(chosen) < number and differs(priced) not in {differs(other) for other in chosen}:
                chosen.append(priced)
    return tuple(one.candidate.label for one in sorted(chosen, key=lambda one: one.key))
