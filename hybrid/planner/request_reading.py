"""From what `hybrid.plan` and `hybrid plan` are given to a `Request`: every problem at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, prod
from pathlib import Path
from typing import Any

from hybrid.contracts.cluster import Cluster, parse_cluster
from hybrid.contracts.host_kind import usual_host
from hybrid.contracts.schedule import usual_virtual_stages
from hybrid.contracts.schedule_choice import schedule_splits_backward
from hybrid.errors import PlanError
from hybrid.planner.constraints import divisors
from hybrid.planner.correction import corrected_job, correction_of
from hybrid.planner.describe_model import is_module, spec_of
from hybrid.planner.host_memory import devices_per_host
from hybrid.planner.job import Job, OptimizerSpec, Precision
from hybrid.planner.measured import measured_software
from hybrid.planner.model_spec import ModelSpec
from hybrid.planner.request import Request, read_fixed
from hybrid.planner.software import Software, software_of
from hybrid.planner.stages import num_layers
from hybrid.planner.trials import Trial, read_trials
from hybrid.units import format_bytes

__all__ = ["OPTIMIZERS", "PRECISIONS", "contradictions", "make_request", "with_trials"]

_MOST = 10**9  # samples or tokens: what is above it is a slip, and would be divided for hours

# Bytes as `distributed_model` keeps them: bf16 and fp16 mean amp level O2 with fp32 accumulation of gradients, and
# torch's normalisation layers in fp32.
PRECISIONS: Mapping[str, Precision] = {
    "bf16": Precision(norm=4),
    "fp16": Precision(compute="fp16", norm=4),
    "fp32": Precision(compute="fp32", parameter=4, gradient=4, reduce=4, master=0, activation=4),
}
OPTIMIZERS: Mapping[str, OptimizerSpec] = {
    "adamw": OptimizerSpec(),
    "adam": OptimizerSpec(name="Adam"),
    "sgd": OptimizerSpec(name="SGD", state=0),
    "sgd-momentum": OptimizerSpec(name="SGD with momentum", state=4),
    "adafactor": OptimizerSpec(name="Adafactor", state=1, is_element_wise=False),
    "muon": OptimizerSpec(name="Muon", state=4, is_element_wise=False),
}


def make_request(
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
) -> Request:
    """Read every part of what `plan` is asked.

    Raises:
        PlanError: all that is wrong, at once.
    """
    problems: list[str] = []
    made: dict[str, Any] = {}

    def read(name: str, make: Any) -> None:
        try:
            made[name] = make()
        except PlanError as error:
            problems.extend(error.problems)

    links = {
        "network": network,
        "oversubscription": oversubscription,
        "rails": rails,
        "nodes_per_leaf": nodes_per_leaf,
        "domain": domain,
    }
    read("cluster", lambda: _cluster(cluster, {name: value for name, value in links.items() if value is not None}))
    read("precision", lambda: _named("precision", precision, PRECISIONS, Precision))
    activation = made["precision"].activation if "precision" in made else 2
    read("model", lambda: spec_of(model, seq=seq, sample=sample, **_changes(model, activation)))
    read("fixed", lambda: read_fixed(fixed))
    read("optimizer", lambda: _named("optimizer", optimizer, OPTIMIZERS, OptimizerSpec))
    read("software", lambda: _software_given(software))
    if use_measurements and "cluster" in made and made["cluster"].measured is not None:
        read("trials", lambda: read_trials(made["cluster"].path))
    problems += _number_problems(
        {"global_batch_size": global_batch_size, "num_plans": num_plans} | ({} if seq is None else {"seq": seq}),
        risk=risk, sizes={"memory_bytes": memory_bytes, "host_memory_bytes": host_memory_bytes},
    )  # fmt: skip
    switches = {
        "flash_attention": flash_attention, "include_unbuilt": include_unbuilt, "use_measurements": use_measurements,
    }  # fmt: skip
    problems += [
        f"{name} = {value!r}: expected True or False" for name, value in switches.items() if not _is_bool(value)
    ]
    if "model" in made:
        problems += _length_problems(made["model"], seq)
    if "cluster" in made:
        problems += _device_problems(made["cluster"], made.get("precision"), memory_bytes)
    if "fixed" in made and "model" in made and is_module(model):
        from hybrid.strategy.live_model import num_cut_layers  # with it all of the strategy, which a preset needs not

        number, problem = num_cut_layers(model, sample) if made["fixed"].get("pp") != 1 else (0, "")
        if number:
            made["model"] = replace(made["model"], num_cut_layers=number)
        if problem and "pp" in made["fixed"]:
            problems.append(f"pp {made['fixed']['pp']}: {problem}")
        elif problem:
            made["fixed"]["pp"] = 1
            note = f"planned without a pipeline: {problem}"
            made["model"] = replace(made["model"], notes=(*made["model"].notes, note))
    if problems:
        raise PlanError(problems)
    length_notes = made["model"].notes_on_length(seq or made["model"].default_seq)
    if length_notes:
        made["model"] = replace(made["model"], notes=(*length_notes, *made["model"].notes))
    if isinstance(precision, str) and isinstance(software, str) and not software.startswith("hybrid"):
        made["precision"] = replace(made["precision"], norm=0)  # other stacks keep norms as all else
    job = Job(
        model=made["model"],
        cluster=made["cluster"],
        global_batch_size=global_batch_size,
        seq=seq or made["model"].default_seq,
        precision=made["precision"],
        optimizer=made["optimizer"],
        is_flash=flash_attention,
        software=made["software"] or _software(made["cluster"]),
        context_bytes=made["cluster"].measured.context_bytes if made["cluster"].measured is not None else None,
    )
    host, host_memory = None, host_memory_bytes or made["cluster"].host_memory_bytes
    if host_memory is None:
        host = usual_host(made["cluster"].device.name, devices_per_host(made["cluster"]))
        host_memory = None if host is None else host.memory_bytes
    request = Request(
        job=job,
        fixed=made["fixed"],
        is_all=include_unbuilt,
        risk=risk,
        memory_bytes=memory_bytes,
        host_memory_bytes=host_memory,
        host=host,
        num_plans=num_plans,
    )
    wrong = contradictions(request)
    if wrong:
        raise PlanError(wrong)
    return with_trials(request, made.get("trials", ()))


def with_trials(request: Request, trials: Sequence[Trial]) -> Request:
    """Corrected by the layouts that were run, instead of by those before."""
    job = request.job if request.correction is None else request.correction.plain_job
    correction = correction_of(job, trials)
    return replace(request, job=job if correction is None else corrected_job(job, correction), correction=correction)


def _software_given(given: str | Software | None) -> str | Software | None:
    """The name as it is, if there is such a set."""
    if isinstance(given, str):
        software_of(given)
    elif given is not None and not isinstance(given, Software):
        raise PlanError(f"software = {given!r}: expected the name of a set of constants, such as 'hybrid'")
    return given


def _software(cluster: Cluster) -> str | Software:
    """This library's, on gloo where the devices are processors, with what was measured on the cluster."""
    name = "hybrid-gloo" if cluster.device.is_processor else "hybrid"
    if cluster.measured is None:
        return name
    return measured_software(software_of(name), cluster.measured, cluster.device)


def _changes(model: Any, activation_bytes: int) -> dict[str, Any]:
    """Closed forms and measurements count 16-bit activations unless they are told otherwise."""
    return {} if activation_bytes == 2 or isinstance(model, ModelSpec) else {"activation_bytes": activation_bytes}


def _device_problems(cluster: Cluster, precision: Precision | None, memory_bytes: float | None) -> list[str]:
    device = cluster.device
    problems = []
    if precision is not None and precision.compute not in device.flops:
        known = " or ".join(name for name in PRECISIONS if PRECISIONS[name].compute in device.flops)
        problems.append(f"precision {precision.compute}: {device.name} has no such rate; use {known}")
    if isinstance(memory_bytes, int | float) and memory_bytes > device.memory_bytes:
        problems.append(
            f"memory_bytes = {memory_bytes:,.0f} ({format_bytes(memory_bytes)}), but {device.name} has "
            f"{format_bytes(device.memory_bytes)}: give less, or leave it out for all of it"
        )
    return problems


def _cluster(given: Any, links: Mapping[str, Any]) -> Cluster:
    if not isinstance(given, Cluster):
        return parse_cluster(given, **links)
    if links:
        raise PlanError(f"{', '.join(links)} describe a shorthand; this cluster says itself what links it has")
    if given.refusal is not None:
        raise PlanError(given.refusal)
    return given


def _named(what: str, given: Any, known: Mapping[str, Any], kind: type) -> Any:
    if isinstance(given, kind):
        return given
    found = known.get(str(given).lower())
    if found is None:
        raise PlanError(f"{what} {given!r} is not known; known: {', '.join(known)}")
    return found


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _number_problems(counts: Mapping[str, int], *, risk: float, sizes: Mapping[str, float | None]) -> list[str]:
    problems = [
        f"{name} = {value!r}: expected a whole number of at least 1"
        for name, value in counts.items()
        if _is_bool(value) or not isinstance(value, int) or value < 1
    ]
    problems += [
        f"{name} = {value}: expected at most {_MOST:,}"
        for name, value in counts.items()
        if isinstance(value, int) and value > _MOST
    ]
    if _is_bool(risk) or not isinstance(risk, int | float) or not 0 < risk < 1:
        problems.append(f"risk = {risk!r}: expected a chance between 0 and 1, such as 0.05")
    problems += [
        f"{name} = {value!r}: expected the bytes of a {'host' if 'host' in name else 'device'}, a number above 0"
        for name, value in sizes.items()
        if value is not None and (_is_bool(value) or not isinstance(value, int | float) or not 0 < value < inf)
    ]
    return problems


def _length_problems(model: ModelSpec, seq: int | None) -> list[str]:
    if not isinstance(seq, int):
        return []
    if model.is_seq_fixed and seq != model.default_seq:
        return [f"seq = {seq}, but {model.name} was measured with {model.default_seq} tokens per sample: leave seq out"]
    if model.max_seq and seq > model.max_seq:
        return [f"seq = {seq}: {model.name} takes at most {model.max_seq} tokens"]
    return []


def _pipeline_contradictions(job: Job, fixed: Mapping[str, Any]) -> list[str]:
    problems = []
    schedule = fixed.get("schedule", "1f1b")
    usual = usual_virtual_stages(schedule)
    pp, virtual_stages = fixed.get("pp"), fixed.get("virtual_stages", usual)
    is_interleaved = virtual_stages > usual or schedule == "interleaved"
    if pp == 1 and schedule_splits_backward(schedule):
        problems.append(f"schedule {schedule!r} splits backwards to fill the bubble of a pipeline, but pp is 1")
    elif virtual_stages > 1 and pp == 1:
        problems.append(f"virtual_stages {virtual_stages} needs a pipeline, but pp is 1")
    elif schedule == "interleaved" and (pp == 1 or fixed.get("virtual_stages") == 1):
        problems.append("schedule 'interleaved' needs pp and virtual_stages of 2 or more")
    layers = num_layers(job.model)
    if (pp or 1) * virtual_stages > layers:
        problems.append(
            f"pp {pp or 1} × virtual_stages {virtual_stages} is more chunks than the {layers} layers of "
            f"{job.model.name} (embedding, blocks, head)"
        )
    count = fixed.get("num_micro_batches")
    if is_interleaved and pp and count and count % pp:
        near = " or ".join(str(size) for size in (count // pp * pp, (count // pp + 1) * pp) if size)
        problems.append(
            f"accumulate_steps {count} is no multiple of pp {pp}, and the interleaved schedule (virtual_stages above "
            f"1) runs groups of pp micro-batches: give {near}, or virtual_stages 1"
        )
    return problems


def _nearest_divisors(number: int, wanted: int) -> str:
    near = sorted(divisors(number), key=lambda value: (abs(value - wanted), value))[:2]
    return " or ".join(map(str, sorted(near)))


def contradictions(request: Request) -> list[str]:
    """Fixed values that exclude each other or the size of the world."""
    job, fixed = request.job, request.fixed
    world, batch = job.cluster.num_devices, job.global_batch_size
    problems: list[str] = []
    is_cut_alone = fixed.get("offload") == "parameters"
    names = {"dp_shard": "shard_size"}
    replicas = [] if "dp" not in fixed else ["dp"]
    if "dp_shard" in fixed and "dp_replicate" in fixed:
        replicas = ["dp_replicate", "dp_shard"]
        if fixed.get("dp", fixed["dp_shard"] * fixed["dp_replicate"]) != fixed["dp_shard"] * fixed["dp_replicate"]:
            problems.append(
                f"dp_replicate {fixed['dp_replicate']} × shard_size {fixed['dp_shard']} is not dp {fixed['dp']}"
            )
    elif "dp" in fixed:
        problems += [
            f"{names.get(name, name)} {fixed[name]} does not divide dp {fixed['dp']}"
            for name in ("dp_shard", "dp_replicate")
            if name in fixed and fixed["dp"] % fixed[name]
        ]
    else:
        replicas = [name for name in ("dp_replicate", "dp_shard") if name in fixed]
    given = [name for name in ("pp", *replicas, "cp", "tp") if name in fixed]
    product = prod(fixed[name] for name in given)
    is_all_given = {"pp", "tp"} <= set(given) and ("dp" in replicas or len(replicas) == 2)
    if world % product or (is_all_given and product * fixed.get("cp", 1) != world and "cp" not in given):
        shown = " × ".join(f"{names.get(name, name)} {fixed[name]}" for name in given)
        total = f" = {product}" if len(given) > 1 else ""
        what = "does not divide" if world % product else "leaves idle some of"
        if is_all_given:
            way = f"the product must be {world}"
        elif len(given) == 1:
            way = f"{_nearest_divisors(world, product)} would do"
        else:
            way = f"the product must divide {world}"
        problems.append(f"{shown}{total} {what} the {world} devices of {job.cluster.name}: {way}")
    if fixed.get("zero_stage") == 0 and fixed.get("dp_shard", 1) > 1:
        problems.append(
            f"zero_stage 0 cuts nothing, but shard_size is {fixed['dp_shard']}: give stage 1, 2 or 3, or no shard_size"
        )
    if fixed.get("zero_stage", 0) > 0 and fixed.get("dp_shard") == 1 and not (is_cut_alone or request.is_all):
        problems.append(
            f"zero_stage {fixed['zero_stage']} with shard_size 1 cuts nothing: give stage 0, or a shard_size that "
            "divides the data-parallel ranks"
        )
    if fixed.get("zero_stage", 3) < 3 and fixed.get("offload") == "parameters":
        problems.append(
            f"offload 'parameters' is of zero_stage 3 only, not {fixed['zero_stage']}: what can lie in host memory are "
            "cut parameters; 'optimizer' works at every stage"
        )
    if fixed.get("offload", "none") != "none" and job.cluster.device.is_processor:
        problems.append(
            f"offload {fixed['offload']!r}: the devices of {job.cluster.name} are processors, whose memory is the "
            "host's, so nothing would be saved; leave it out"
        )
    if fixed.get("zero_stage", 3) < 3 and fixed.get("reshard_after") == "run":
        problems.append("reshard_after 'run' is of zero_stage 3 only")
    if fixed.get("zero_stage", 3) < 2 and fixed.get("grad_reduce") == "every_micro_batch":
        problems.append("grad_reduce 'every_micro_batch' is of zero_stage 2 and 3 only")
    schedule = fixed.get("schedule", "interleaved")
    usual = usual_virtual_stages(schedule)
    if usual > 1 and fixed.get("virtual_stages", usual) != usual:
        problems.append(
            f"schedule {schedule!r} has {usual} chunks per rank, not virtual_stages {fixed['virtual_stages']}: "
            f"leave it out, or give {usual}"
        )
    elif fixed.get("virtual_stages", 1) > usual and schedule != "interleaved":
        problems.append(
            f"virtual_stages {fixed['virtual_stages']} needs schedule 'interleaved', not {fixed['schedule']!r}"
        )
    problems += _pipeline_contradictions(job, fixed)
    if fixed.get("zero_stage", 0) > 0 and fixed.get("dp", 2) * fixed.get("cp", 1) == 1 and not is_cut_alone:
        problems.append(f"zero_stage {fixed['zero_stage']} cuts state over dp ranks, but dp is 1: give stage 0")
    if fixed.get("sequence_parallel") and fixed.get("tp") == 1:
        problems.append("sequence_parallel needs tp of 2 or more, but tp is 1")
    if not request.is_all:
        for name in ("cp", "ep"):
            if fixed.get(name, 1) > 1:
                problems.append(f"{name} {fixed[name]}: this version of hybrid cannot run it; with --all it is priced")
    size = fixed.get("micro_batch_size", 1) * fixed.get("num_micro_batches", 1)
    if batch % size:
        near = _nearest_divisors(batch, size)
        problems.append(
            f"micro_batch_size × accumulate_steps = {size} does not divide the global batch {batch}: {near} would do"
        )
    return problems
