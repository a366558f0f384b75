"""In words: where a step waits for communication, and which settings change that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hybrid.profile.profile import Advice, Profile
from hybrid.units import format_bytes

__all__ = ["THRESHOLD", "advise", "exposed_fraction"]

#: Exposed communication above this fraction of the step is worth a change.
THRESHOLD = 0.3
# Of what is exposed, an axis with less than this fraction of the step is not spoken of.
_LEAST = 0.05
_MESSAGES = ("send", "receive")
_CONTROL = "control"
_REDUCTIONS = ("reduce_scatter", "all_reduce")
_SMALL_BUCKET_BYTES = 2**20


def exposed_fraction(profile: Profile) -> float:
    """Of the step, mean of the ranks."""
    return profile.mean("exposed") / profile.mean("step")


def advise(profile: Profile) -> tuple[Advice, ...]:
    """What to change, the dearest first; nothing while exposed communication is within THRESHOLD of the step, nor on
    GPUs, where the host's waits are not the device's.

    A collective ends on all ranks at about the same time, so the rank that waits least in it came last: its wait is
    what the transfer costs, and what others wait beyond that is for this rank. Messages between stages know no such
    rank: all of their waits count to the axis.
    """
    if profile.is_on_device or exposed_fraction(profile) <= THRESHOLD:
        return ()
    found = [*_axes(profile), *_agreements(profile), *_late_rank(profile)]
    found.sort(key=lambda advice: -advice.fraction)
    return tuple(advice for advice in found if advice.fraction >= _LEAST) or tuple(found[:1])


def _axes(profile: Profile) -> Iterator[Advice]:
    for axis in profile.axes:
        fractions = {op: _fraction(profile, axis, op) for op in _ops(profile, axis) if op != _CONTROL}
        if any(op in _MESSAGES for op in fractions):
            yield _between_stages(profile, axis, sum(fractions.values()))
        elif set(axis.split("+")) <= {"dp_shard", "dp_replicate", "cp"}:
            yield _data_parallel(profile, axis, fractions)
        elif axis == "tp":
            yield _tensor_parallel(profile, axis, sum(fractions.values()))
        elif sum(fractions.values()) > 0:
            yield _advice(axis, sum(fractions.values()), "sums over these ranks", _more_samples(profile))


def _agreements(profile: Profile) -> Iterator[Advice]:
    """Small collectives of a step, of which only the latency counts."""
    fraction = sum(_fraction(profile, axis, _CONTROL) for axis in profile.axes)
    if fraction > 0:
        changes = [("accumulate_steps", "more samples or micro-batches per step, since these come once per step")]
        yield _advice("", fraction, "what all ranks agree on: counts, the gradient norm", changes)


def _ops(profile: Profile, axis: str) -> Iterator[str]:
    yield from dict.fromkeys(one.op for rank in profile.ranks for one in rank.traffic if one.axis == axis)


def _late_waits(profile: Profile, axis: str, op: str) -> list[float]:
    """Exposed seconds of an operation, by rank, beyond what it takes the rank that comes last."""
    waits = _by_step(profile, axis, op)
    least = [min(step) for step in zip(*waits, strict=True)]
    return [sum(wait - low for wait, low in zip(rank, least, strict=True)) / len(rank) for rank in waits]


def _by_step(profile: Profile, axis: str, op: str) -> list[tuple[float, ...]]:
    """Exposed seconds of an operation, by rank and step."""
    nothing = (0.0,) * profile.num_steps
    found = ({(one.axis, one.op): one.exposed_by_step for one in rank.traffic} for rank in profile.ranks)
    return [traffic.get((axis, op), nothing) for traffic in found]


def _fraction(profile: Profile, axis: str, op: str) -> float:
    """Of the step: the transfer alone, without waiting for a rank that is late."""
    by_step = list(zip(*_by_step(profile, axis, op), strict=True))
    seconds: list[float] = [sum(waits) / len(waits) if op in _MESSAGES else min(waits) for waits in by_step]
    return sum(seconds) / len(seconds) / profile.mean("step")


def _late_rank(profile: Profile) -> Iterator[Advice]:
    """Waiting of the ranks for the slowest of them in collectives."""
    totals = [0.0] * len(profile.ranks)
    for axis in profile.axes:
        for op in _ops(profile, axis):
            if op not in _MESSAGES:
                waits = _late_waits(profile, axis, op)
                totals = [total + wait for total, wait in zip(totals, waits, strict=True)]
    fraction = sum(totals) / len(totals) / profile.mean("step")
    if fraction <= 0:
        return
    last = totals.index(min(totals))
    yield Advice(
        axis="",
        fraction=fraction,
        text=f"{fraction:.0%} of the step ranks wait for a slower one, most often for rank {last}: give all ranks "
        "batches of the same size and length, and look for other programs on its machine; no setting helps",
    )


# -- by axis -------------------------------------------------------------------------------------------------------


_Change = tuple[str, str]  # setting, sentence


def _data_parallel(profile: Profile, axis: str, fractions: dict[str, float]) -> Advice:
    reduced = sum(fractions.get(op, 0.0) for op in _REDUCTIONS)
    gathered = fractions.get("all_gather", 0.0)
    what = " and ".join(
        f"{share:.0%} {name}"
        for share, name in sorted(((reduced, "reducing gradients"), (gathered, "gathering parameters")), reverse=True)
        if share >= 0.005
    )
    of_reduction = _of_reduction(profile) if reduced >= 0.25 * (reduced + gathered) else ()
    of_gathering = _of_gathering(profile) if gathered >= 0.25 * (reduced + gathered) else ()
    parts = (of_reduction, of_gathering) if reduced >= gathered else (of_gathering, of_reduction)
    changes = [change for part in parts for change in part]
    if profile.mean("backward") < 0.5 * reduced * profile.mean("step"):  # too short for anything to be hidden in it
        changes.sort(key=lambda change: change[0] != "accumulate_steps")
    changes += [change for make in (_fewer_ranks, _more_samples) for change in make(profile)]
    return _advice(axis, sum(fractions.values()), f"data-parallel communication ({what})", changes)


def _of_reduction(profile: Profile) -> Iterator[_Change]:
    known = profile.settings
    steps, buckets, size = known["accumulate_steps"], known["num_buckets"], known["gradient_bytes"]
    if not known["overlap_comm"]:
        yield "sharding_configs.overlap_comm", "overlap_comm = True, so that gradients are sent while backward goes on"
    if known["overlap_comm"] and buckets <= 2 and size >= 8 * _SMALL_BUCKET_BYTES:
        wanted = max(_SMALL_BUCKET_BYTES, size // 8)
        yield (
            "sharding_configs.bucket_bytes",
            f"bucket_bytes = {format_bytes(wanted)!r} instead of {format_bytes(known['bucket_bytes'])}: all gradients "
            f"lie in {buckets} bucket{'s' * (buckets > 1)}, of which the last is sent when backward has ended",
        )
    elif buckets >= 8 and size < buckets * _SMALL_BUCKET_BYTES / 4:
        yield (
            "sharding_configs.bucket_bytes",
            f"bucket_bytes = {format_bytes(max(size // 4, 1))!r}: {buckets} buckets of {format_bytes(size / buckets)} "
            "each cost more in latency than in bytes",
        )
    once = known["grad_reduce"] == "last_micro_batch"
    more = max(4, 2 * steps)
    if steps > 1 and not once:
        yield (
            "sharding_configs.grad_reduce",
            f"grad_reduce = 'last_micro_batch': one reduction per step instead of {_reductions(known)} (keeps whole "
            "gradients)",
        )
    also = "" if once else " with grad_reduce = 'last_micro_batch'"
    yield (
        "accumulate_steps",
        f"accumulate_steps = {more} instead of {steps}{also}: gradients are sent once for "
        f"{more // steps} times the samples",
    )


def _reductions(known: Mapping[str, Any]) -> str:
    every, steps = known["grad_reduce"], known["accumulate_steps"]
    return str(-(-steps // every)) if isinstance(every, int) else str(steps)


def _of_gathering(profile: Profile) -> Iterator[_Change]:
    known = profile.settings
    if known["zero_stage"] in {1, 2} and not known["overlap_param_gather"]:
        yield (
            "sharding_configs.overlap_param_gather",
            "overlap_param_gather = True, so that parameters arrive while the next forward runs",
        )
    if known["zero_stage"] == 3:
        if known["reshard_after"] == "unit" and known["accumulate_steps"] > 1:
            yield (
                "sharding_configs.reshard_after",
                f"reshard_after = 'run': units are gathered once for {known['accumulate_steps']} micro-batches",
            )
        if known["prefetch"] < 2:
            yield (
                "sharding_configs.prefetch",
                f"prefetch = {known['prefetch'] + 1}: more units are on their way while one computes",
            )
        yield "sharding_configs.stage", "stage = 2, if the parameters fit: they are gathered once per step, not twice"


def _fewer_ranks(profile: Profile) -> Iterator[_Change]:
    here, shards = profile.settings["local_world_size"], profile.degrees.get("dp_shard", 1)
    if profile.settings["zero_stage"] > 0 and profile.world_size > here and shards > here:
        yield (
            "sharding_configs.shard_size",
            f"shard_size = {here} instead of {shards}: what is cut then stays within one machine",
        )


def _more_samples(profile: Profile) -> Iterator[_Change]:
    yield "micro_batch_size", "more samples per rank and micro-batch, which cost no communication"


def _tensor_parallel(profile: Profile, axis: str, fraction: float) -> Advice:
    degree, here = profile.degrees.get("tp", 1), profile.settings["local_world_size"]
    wanted = min(here, degree // 2) if degree <= here else here
    changes = [
        (
            "tensor_parallel_configs.degree",
            f"degree = {max(1, wanted)} instead of {degree}, and ZeRO or pipeline for the rest"
            + (": tp ranks lie on several machines" if degree > here else ""),
        ),
        ("micro_batch_size", "more samples per micro-batch: fewer, larger messages"),
    ]
    return _advice(axis, fraction, "sums over the ranks that share a layer", changes)


# Of a micro-batch on a stage, in which a split backward lets the other stages begin; else its chunks.
_PIECES = {"zb-h1": 3, "zbv": 6}


def _between_stages(profile: Profile, axis: str, fraction: float) -> Advice:
    known, stages = profile.settings, profile.degrees.get("pp", 1)
    steps, schedule = known["accumulate_steps"], known["schedule"]
    pieces = _PIECES.get(schedule, known["virtual_stages"])
    bubble, more = _bubble(stages, steps, pieces), 2 * max(steps, stages)
    changes: list[_Change] = []
    if fraction > 1.5 * bubble + 0.05:
        changes.append(
            (
                "pipeline_configs.split",
                f"a better split (sample= for distributed_model, or split by hand): of a schedule with stages of equal "
                f"cost ranks would wait {bubble:.0%}",
            )
        )
    changes.append(
        (
            "accumulate_steps",
            f"accumulate_steps = {more} instead of {steps}: the bubble of the schedule goes from {bubble:.0%} to "
            f"{_bubble(stages, more, pieces):.0%}",
        )
    )
    if pieces == 1:
        changes.append(
            ("pipeline_configs.virtual_stages", "schedule = 'interleaved' with virtual_stages = 2, which halves it")
        )
    return _advice(axis, fraction, "waiting for the other stages of the pipeline", changes)


def _bubble(stages: int, steps: int, pieces: int) -> float:
    return (stages - 1) / (pieces * steps + stages - 1)


def _advice(axis: str, fraction: float, what: str, changes: Iterable[_Change]) -> Advice:
    listed = list(changes)
    ways = "; ".join(f"({number}) {sentence}" for number, (_, sentence) in enumerate(listed, 1))
    settings = tuple(dict.fromkeys(setting for setting, _ in listed))
    where = f"{axis}: " if axis else ""
    text = f"{where}{fraction:.0%} of the step is {what}, which nothing hides. To try, in this order: {ways}"
    return Advice(axis=axis, fraction=fraction, text=text, settings=settings)
