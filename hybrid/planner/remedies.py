"""What would make a part of a step smaller: only what the layout does not do already, and the job allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from hybrid.planner.job import Candidate, Job
from hybrid.planner.stages import num_layers

__all__ = ["LOSSES", "remedy"]

#: Part of a step that is no model computation -> what it is, in words.
LOSSES = {
    "tp_exposed": "sums of tensor parallel",
    "cp_exposed": "exchange of keys and values",
    "ep_exposed": "tokens on their way to experts",
    "pp_transfer": "messages between stages",
    "pp_bubble": "the pipeline's bubble",
    "dp_exposed": "sums of gradients",
    "gather_exposed": "gathers of parameters",
    "optimizer": "the update of the weights",
    "recompute": "activations computed again",
    "host": "launching kernels",
    "elementwise": "norms, activation functions and other pointwise work",
}


def remedy(part: str, job: Job, candidate: Candidate) -> str:
    """`"a larger micro-batch, or a smaller tp"`."""
    return ", or ".join(_WAYS[part](job, candidate))


def _of_bubble(job: Job, candidate: Candidate) -> Iterator[str]:
    size, layers = candidate.micro_batch_size, num_layers(job.model)
    yield "more micro-batches" if size > 1 else "a larger global batch"
    is_plain = candidate.schedule in {"1f1b", "gpipe"} and candidate.num_micro_batches % candidate.pp == 0
    if is_plain and 2 * candidate.pp <= layers:
        yield "virtual stages"
    yield "a smaller pp"


def _of_sums(job: Job, candidate: Candidate) -> Iterator[str]:
    if candidate.zero_stage >= 2 and candidate.grad_reduce == "every_micro_batch" and candidate.num_micro_batches > 1:
        yield "grad_reduce 'last_micro_batch'"
    yield "a larger global batch"


def _of_gathers(job: Job, candidate: Candidate) -> Iterator[str]:
    if candidate.zero_stage == 3:
        if candidate.reshard_after == "unit":
            yield "reshard_after 'run'"
        yield "a lower ZeRO stage"
    if candidate.dp_shard > 1:
        yield "a smaller shard_size"


def _of_update(job: Job, candidate: Candidate) -> Iterator[str]:
    if candidate.is_offloaded:
        yield "no offload"
    if candidate.zero_stage == 0 and candidate.dp > 1:
        yield "ZeRO stage 1"
    elif candidate.dp_replicate > 1:
        yield "a larger shard_size"
    else:
        yield "more devices"


def _of_recompute(job: Job, candidate: Candidate) -> Iterator[str]:
    less = "a smaller micro-batch" if candidate.micro_batch_size > 1 else "more memory"
    is_cut = job.model.num_heads and not job.model.tensor_refusal and not job.model.num_experts
    is_cut = is_cut and candidate.tp < job.cluster.domain_size  # beyond it sums cross the network
    yield f"{less}{' or more tp' if is_cut else ''}, so that they can be kept"


def _of_host(job: Job, candidate: Candidate) -> Iterator[str]:
    if candidate.num_micro_batches > 1:
        yield "a larger micro-batch"
    if candidate.tp > 1:
        yield "a smaller tp"
    yield "a compiler that fuses them"


_WAYS: Mapping[str, Callable[[Job, Candidate], Iterable[str]]] = {
    # Not sequence_parallel: its gathers are hidden less than the sums whose place they take.
    "tp_exposed": lambda job, candidate: ("a smaller tp",),
    "cp_exposed": lambda job, candidate: ("a smaller cp",),
    "ep_exposed": lambda job, candidate: ("a smaller ep, inside a node",),
    "pp_transfer": lambda job, candidate: ("a smaller pp",),
    "pp_bubble": _of_bubble,
    "dp_exposed": _of_sums,
    "gather_exposed": _of_gathers,
    "optimizer": _of_update,
    "recompute": _of_recompute,
    "host": _of_host,
    "elementwise": lambda job, candidate: ("a compiler that fuses them",),
}
