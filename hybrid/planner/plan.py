"""The answer: ranked layouts of one request, each with its memory, its time and the strategy that runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from hybrid.contracts.cluster import Cluster
from hybrid.errors import PlanError
from hybrid.planner.advice import Advice, advise
from hybrid.planner.cost import StepTime
from hybrid.planner.job import Candidate, Job, OptimizerSpec, Precision
from hybrid.planner.memory import MemoryPlan
from hybrid.planner.rank_order import rank_orders
from hybrid.planner.request import Request
from hybrid.planner.request_reading import make_request
from hybrid.planner.search import Fit, Progress, SearchResult, search
from hybrid.planner.software import Software
from hybrid.planner.strategy_of import strategy_of
from hybrid.planner.unlock import nearest_change
from hybrid.units import format_bytes

if TYPE_CHECKING:
    from hybrid.strategy import DistributedStrategy

__all__ = ["Plan", "Plans", "plan", "plan_request"]


_SAME = 1e-6  # two steps that differ by less take the same time


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout.

    Args:
        job: what it is for; its cluster is in the rank order of the plan.
        candidate: degrees, ZeRO stage, micro-batch, ...
        memory, fit: bytes of each pipeline rank, and whether they fit.
        time: of one step, with its parts.
        rank_order: which device of the cluster, by number, each rank runs on.
    """

    job: Job
    candidate: Candidate
    memory: MemoryPlan
    fit: Fit
    time: StepTime
    rank_order: tuple[int, ...]

    @property
    def strategy(self) -> DistributedStrategy:
        """What `distributed_model(model, strategy=...)` takes; a pipeline of a model that is no chain also a `sample`.

        Raises:
            PlanError: a layout that this version cannot run (`--all`).
        """
        return strategy_of(self.job, self.candidate)

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.job.global_batch_size * self.job.seq / self.time.total_seconds

    @property
    def flops_per_second(self) -> float:
        """Model flops (three forwards, the whole attention square, no recompute) per device."""
        tokens = self.job.global_batch_size * self.job.seq
        flops = self.job.model.step_flops_per_token(self.job.seq) * tokens
        return flops / self.time.total_seconds / self.job.cluster.num_devices

    @property
    def model_flops_utilization(self) -> float:
        """`flops_per_second` over the peak of the device in the compute dtype."""
        return self.flops_per_second / self.job.cluster.device.flops[self.job.precision.compute]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        candidate, worst = self.candidate, self.memory.worst
        return {
            "layout": {
                "tp": candidate.tp,
                "pp": candidate.pp,
                "dp_replicate": candidate.dp_replicate,
                "shard_size": candidate.dp_shard,
                "cp": candidate.cp,
                "ep": candidate.ep,
                "sequence_parallel": candidate.sequence_parallel,
                "zero_stage": candidate.zero_stage,
                "schedule": candidate.schedule,
                "virtual_stages": candidate.virtual_stages,
                "micro_batch_size": candidate.micro_batch_size,
                "accumulate_steps": candidate.num_micro_batches,
                "recompute": candidate.recompute,
                "grad_reduce": candidate.grad_reduce,
                "reshard_after": candidate.reshard_after,
                "offload": candidate.offload,
            },
            "step_seconds": self.time.total_seconds,
            "time_parts_seconds": dict(self.time.parts),
            "binding": self.time.binding,
            "tokens_per_second": self.tokens_per_second,
            "flops_per_second_per_device": self.flops_per_second,
            "model_flops_utilization": self.model_flops_utilization,
            "memory_parts_bytes": dict(worst.parts),
            "tensors_bytes": worst.tensors_bytes,
            "reserved_bytes": _interval(worst.reserved),
            "device_bytes": _interval(worst.device),
            "host_bytes": self.memory.fullest_host_bytes,
            "chance_of_running_out": self.fit.chance_of_running_out,
            "rank_order": _order(self.rank_order),
        }


def _interval(interval: Any) -> dict[str, float]:
    return {"low": interval.low, "expected": interval.expected, "high": interval.high}


def _order(order: tuple[int, ...]) -> list[int] | str:
    return "as the cluster" if order == tuple(range(len(order))) else list(order)


@dataclass(frozen=True, kw_only=True)
class Plans(Sequence[Plan]):
    """The plans of one request, best first; and what was found on the way.

    Args:
        request: what was asked.
        plans: at most `request.num_plans`.
        result: rejected layouts by reason, counts, seconds.
        advice: about the best one.
    """

    request: Request
    plans: tuple[Plan, ...]
    result: SearchResult
    advice: Advice

    @property
    def best(self) -> Plan:
        return self.plans[0]

    @property
    def strategy(self) -> DistributedStrategy:
        """Of the best plan."""
        return self.best.strategy

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, index: int | slice) -> Plan | tuple[Plan, ...]:
        return self.plans[index]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        job = self.request.job
        return {
            "model": {
                "name": job.model.name,
                "source": job.model.source,
                "num_parameters": job.model.num_parameters,
                "notes": list(job.model.notes),
            },
            "cluster": {
                "name": job.cluster.name,
                "num_devices": job.cluster.num_devices,
                "host_memory_bytes": self.request.host_memory_bytes,
                "assumed_host": None if self.request.host is None else self.request.host.name,
            },
            "global_batch_size": job.global_batch_size,
            "seq": job.seq,
            "correction": None if self.request.correction is None else self.request.correction.to_dict(),
            "plans": [one.to_dict() for one in self.plans],
            "advice": self.advice.to_dict(),
            "rejected": [
                {"rule": rejection.rule, "count": rejection.count, "first": rejection.text}
                for rejection in self.result.rejections
            ],
            "num_considered": self.result.num_considered,
            "num_priced": self.result.num_priced,
            "search_seconds": self.result.seconds,
        }


def plan(
    model: Any,
    cluster: Cluster | str | Path | Mapping[str, Any],
    *,
    global_batch_size: int,
    seq: int | None = None,
    sample: Any = None,
    network: str | None = None,
    oversubscription: float | None = None,
    rails: bool | None = None,
    nodes_per_leaf: int | None = None,
    domain: int | None = None,
    precision: str | Precision = "bf16",
    optimizer: str | OptimizerSpec = "adamw",
    software: str | Software | None = None,
    flash_attention: bool = True,
    fixed: Mapping[str, Any] | str = "",
    include_unbuilt: bool = False,
    risk: float = 0.05,
    memory_bytes: float | None = None,
    host_memory_bytes: float | None = None,
    num_plans: int = 10,
    use_measurements: bool = True,
    progress: Progress | None = None,
) -> Plans:
    """The layouts of a model on a cluster that train fastest and fit.

    Args:
        model: a preset's name (`llama3-70b`), a path to a Hugging Face `config.json`, a `transformers` config, a
            `ModelSpec`, or any `nn.Module` (then with `sample`, an example batch that its forward takes).
        cluster: `16x8xH100`, the path of a YAML file, or a `Cluster`.
        global_batch_size: samples per optimizer step.
        seq: tokens per sample; the model's own default if not given.
        sample: an example batch for a live module; a micro-batch of one sample, best.
        network, oversubscription, rails, nodes_per_leaf, domain: of a shorthand cluster, as `parse_cluster` and
            `hybrid cluster show` take them.
        precision: `bf16`, `fp16` or `fp32`, or a `Precision`.
        optimizer: a name in `hybrid.planner.request_reading.OPTIMIZERS`, or an `OptimizerSpec`.
        software: name of the set of constants that time is priced with (`planner/data/software.yaml`), or one of one's
            own; None: this library's, on gloo where the devices are processors.
        flash_attention: False where scores are stored.
        fixed: what is decided already: `{"tp": 4}` or `"tp=4,pp=2"`.
        include_unbuilt: also offload, and layouts that this version cannot run (context and expert parallel).
        risk: highest accepted chance of running out of memory.
        memory_bytes: of a device, if not all of it may be used.
        host_memory_bytes: of one host, for offload: plans that need more there are refused. None: as the cluster's file
            says, else as the usual machine with so many of these devices has; where there is none, plans tell what they
            need.
        num_plans: how many to return.
        use_measurements: False leaves out of account what `hybrid.measure_plans` found on a calibrated cluster.
        progress: called with (bases looked at, all bases).

    Raises:
        PlanError: bad input, all of it at once; or nothing fits, with what is missing and the nearest change.
    """
    request = make_request(
        model,
        cluster,
        global_batch_size=global_batch_size,
        seq=seq,
        sample=sample,
        network=network,
        oversubscription=oversubscription,
        rails=rails,
        nodes_per_leaf=nodes_per_leaf,
        domain=domain,
        precision=precision,
        optimizer=optimizer,
        software=software,
        flash_attention=flash_attention,
        fixed=fixed,
        include_unbuilt=include_unbuilt,
        risk=risk,
        memory_bytes=memory_bytes,
        host_memory_bytes=host_memory_bytes,
        num_plans=num_plans,
        use_measurements=use_measurements,
    )
    return plan_request(request, progress=progress)


def plan_request(request: Request, *, progress: Progress | None = None) -> Plans:
    """As `plan`, for a request that is made already: searched in each rank order that the cluster has."""
    order, asked, result = _best_order(request, progress)
    if not result.found:
        raise PlanError(_nothing_fits(request, result))
    plans = tuple(
        Plan(
            job=asked.job,
            candidate=one.candidate,
            memory=one.memory,
            fit=one.fit,
            time=one.time,
            rank_order=order,
        )
        for one in result.found
    )
    return Plans(request=asked, plans=plans, result=result, advice=advise(asked, result))


def _best_order(request: Request, progress: Progress | None) -> tuple[tuple[int, ...], Request, SearchResult]:
    """(device of each rank, the request in that order, what was found in it); the given order unless one is faster."""
    cluster = request.job.cluster
    best: tuple[tuple[int, ...], Request, SearchResult] | None = None
    for order in rank_orders(cluster):
        asked = request
        if best is not None:
            asked = replace(request, job=replace(request.job, cluster=cluster.with_rank_order(order)))
        result = search(asked, progress=progress)
        if best is None or _seconds(result) < _seconds(best[2]) * (1 - _SAME):
            best = (order, asked, result)
    assert best is not None  # there is the given order
    return best


def _seconds(result: SearchResult) -> float:
    return result.found[0].time.total_seconds if result.found else inf


def _nothing_fits(request: Request, result: SearchResult) -> str:
    job = request.job
    what = f"no layout of {job.model.name} on {job.cluster.name} with a global batch of {job.global_batch_size}"
    host = "".join(f"; {one.text}" for one in result.rejections if one.rule == "host memory")
    if result.too_large:
        nearest = result.too_large[0]
        return (
            f"{what} fits into {format_bytes(nearest.fit.limit_bytes)} per device: the nearest, "
            f"{nearest.candidate.label}, needs {format_bytes(nearest.fit.needed_bytes)}, "
            f"{format_bytes(nearest.fit.over_bytes)} more{host}{nearest_change(request)}"
        )
    reasons = "; ".join(
        f"{rejection.text} ({rejection.count} layout{'s' * (rejection.count > 1)})"
        for rejection in result.rejections[:4]
    )
    return f"{what} can be tried: {reasons or 'nothing is left of what is fixed'}"
