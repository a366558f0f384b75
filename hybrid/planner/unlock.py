"""What would have to change: the nearest request under which something fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hybrid.planner.request import Request
from hybrid.planner.search import SearchResult, anything_fits
from hybrid.units import format_bytes

__all__ = ["nearest_change"]

_SHOWN = {"dp_shard": "shard_size", "num_micro_batches": "accumulate_steps"}
_MOST_HALVINGS = 6
_MOST_DOUBLINGS = 6
_MOST_DEVICES = 16384
_LEAST_GAIN = 0.01  # of a step, below which a change is not worth a word


def nearest_change(request: Request) -> str:
    """`"; with … it fits"` for the first that helps: one fixed value free, offload, a shorter sample; and for the least
    number of nodes that does."""
    told = (
        next((words for words, changed in changes(request) if anything_fits(changed)), "")
        for changes in (_changes, _more_nodes)
    )
    return "".join(f"; {words} it fits" for words in told if words)


def _more_nodes(request: Request) -> Iterator[tuple[str, Request]]:
    """Twice as many, four times, ...; where the links of the cluster follow from its nodes."""
    job = request.job
    if job.cluster.device.is_processor:
        return
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        cluster = job.cluster.with_nodes(2**doubling)
        if cluster is None or cluster.num_devices > _MOST_DEVICES:
            return
        yield f"on {cluster.name}", replace(request, job=replace(job, cluster=cluster))


def _changes(request: Request) -> Iterator[tuple[str, Request]]:
    job = request.job
    for name, value in request.fixed.items():
        left = {other: kept for other, kept in request.fixed.items() if other != name}
        yield f"without {_SHOWN.get(name, name)}={value}", replace(request, fixed=left)
    if len(request.fixed) > 1:
        yield "with nothing fixed", replace(request, fixed={})
    if not request.is_all and "offload" not in request.fixed:
        for what in ("optimizer", "parameters"):
            yield f"with offload={what}", replace(request, fixed={**request.fixed, "offload": what})
    if not job.is_flash:
        yield "with a fused attention kernel (flash)", replace(request, job=replace(job, is_flash=True))
    if not job.model.is_seq_fixed:
        for halving in range(1, _MOST_HALVINGS + 1):
            if job.seq % 2**halving:
                break
            seq = job.seq // 2**halving
            yield f"with seq={seq}", replace(request, job=replace(job, seq=seq))


def unlocks(result: SearchResult) -> tuple[str, ...]:
    """What more memory would buy, cheapest first: `"+5.6 GiB admits …, 9 % faster"`; each faster than the last."""
    if not result.found:
        return ()
    best = result.found[0]
    told: list[str] = []
    fastest = best.time.total_seconds
    for larger in result.too_large:
        if larger.time.total_seconds < fastest * (1 - _LEAST_GAIN):
            fastest = larger.time.total_seconds
            gain = best.time.total_seconds / fastest - 1
            told.append(
                f"+{format_bytes(larger.fit.over_bytes)} admits {larger.candidate.label}, {gain:+.0%} throughput"
            )
    return tuple(told)
